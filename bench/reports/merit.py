"""Compute figures of merit of runs, and make their tables, of one run and with a line a row."""

import math
from dataclasses import dataclass
from typing import Callable, Iterable, Sequence

import numpy as np

from bench.cases.paper import HEADINGS, Row, title
from bench.document import Column, Notes, Number, Part, Table, make_table, number_cell
from bench.errors import StoreError
from bench.records import model_run
from bench.records.folder import FolderContents, Results, policy_of, row_of
from bench.records.model_run import Run
from bench.records.notes import words_note
from bench.reports import time_parts
from bench.reports.emulated import describe_clusters
from mm3d.tracing.events import PHASES


@dataclass(frozen=True)
class Figure:
    """A number with its unit and its closed form; NaN where missing."""

    name: str
    value: float
    unit: str
    expected: float = math.nan


def throughput(run: Run) -> tuple[float, float]:
    """Return tokens a second, and useful operations a second of a rank, of medians, untraced."""
    seconds = sum(model_run.typical(run.times[phase]) for phase in PHASES)
    return (run.batch * run.configuration["seq"] / seconds,
            int(run.values("flops")) / seconds / run.ranks)


def figures_of_merit(run: Run) -> list[Figure]:
    """Compute all figures of a run; the MFU is its useful rate over the peak of products."""
    tokens, rate = throughput(run)
    found = [Figure("average step time", run.average, "s a sequence"),
             Figure("tokens a second", tokens, "1/s"),
             Figure("useful rate a rank", rate / 1e9, "GFLOP/s"),
             *recomputation_figures(run)]
    rates = {name: time_parts.machine_rate(run, name) for name in (
        "gemm_together", "gemm_alone", "memory_together", "memory_alone")}
    for name, who in (("together", "all ranks at once"), ("alone", "one rank alone")):
        peak = rates[f"gemm_{name}"]
        found += [Figure(f"peak of products, {who}", peak / 1e9, "GFLOP/s"),
                  Figure("  part of it that is useful (MFU)", 100 * (rate / peak), "%"),
                  Figure(f"memory bandwidth, {who}", rates[f"memory_{name}"] / 1e9, "GB/s")]
    return (found + traffic_figures(run) + wire_figures(run) + intensity_figures(run)
            + memory_figures(run))


def recomputation_figures(run: Run) -> list[Figure]:
    """Compute executed operations, with repeated scores and copies, over useful ones, if any."""
    name = run.configuration.get("recompute", "none")
    if name == "none":
        return []
    useful, again = int(run.values("flops")), int(run.values("flops_again"))
    traced = run.of_group("parts", "flops")
    executed = math.nan if traced is None else float(traced.sum())
    return [Figure(f"operations executed, recompute {name}, over useful", executed / useful, "1",
                   (useful + again) / useful)]


def traffic_figures(run: Run) -> list[Figure]:
    """Compute words, by both counts, bytes and bandwidth by direction, means over the ranks."""
    words, moved = (run.traffic[name].sum(axis=(0, 3)).mean(axis=0) for name in ("words", "bytes"))
    expected = run.expected_words.sum(axis=(0, 2)) / run.ranks
    speed, found = time_parts.collective_bandwidth(run) or {}, []
    stated = moved_words(run)
    for a, axis in enumerate(run.directions):
        if expected[a] or words[a]:
            item = moved[a] / words[a] if words[a] else math.nan
            found += [Figure(f"words a rank along {axis}, counted", float(words[a]), "1",
                             float(expected[a])),
                      Figure(f"  moved by transport {transport_name(run)}", float(stated[a]), "1"),
                      Figure(f"bytes a rank along {axis}, counted", float(moved[a]), "byte",
                             float(expected[a] * item)),
                      Figure(f"  bandwidth in collectives along {axis}",
                             speed.get(axis, math.nan) / 1e9, "GB/s")]
    return found


def wire_figures(run: Run) -> list[Figure]:
    """Return the bytes that all nodes received in each phase, beside the least possible."""
    if "wire" not in run.groups:
        return []
    received, least = (run.of_group("wire", name).sum(axis=1) for name in ("received", "least"))
    return [Figure(f"bytes that nodes received from others, {phase}, on the wire",
                   float(received[p]), "byte", float(least[p])) for p, phase in enumerate(PHASES)]


def moved_words(run: Run) -> np.ndarray:
    """Return the mean words that the transport says it moved, by direction; NaN for none."""
    stated = run.traffic.get("moved", np.full(run.traffic["words"].shape, math.nan))
    return stated.sum(axis=(0, 3)).mean(axis=0)


def transport_name(run: Run) -> str:
    """Return the transport of the run's collectives."""
    return str(run.configuration.get("transport", "not recorded"))


def intensity_figures(run: Run) -> list[Figure]:
    """Compute arithmetic intensities: useful operations per byte counted, and per operand byte."""
    flops, moved = int(run.values("flops")), run.traffic["bytes"].sum()
    found = [Figure("arithmetic intensity, a byte counted", flops / moved if moved else math.nan,
                    "flop/byte")]
    lie = roofline_points(run)
    for phase in PHASES if lie else ():
        intensity, rate = lie[phase]
        found += [Figure(f"intensity of {phase} products, a byte of memory", intensity,
                         "flop/byte"),
                  Figure("  rate a rank while in them", rate / 1e9, "GFLOP/s")]
    return found


def roofline_points(run: Run) -> dict[str, tuple[float, float]] | None:
    """Return intensity and rate of the matrix products of each phase, and of the "step".

    The intensity is in flops for each byte of operands and results, the rate in flops a second of
    a rank during products.  The roof is ``machine/gemm_together``, and
    ``machine/memory_together`` times the intensity (see `bench.reports.time_parts.machine_rate`).
    None if the run was not traced.
    """
    counts = [run.of_group("parts", name) for name in ("flops", "bytes", "seconds")]
    if any(one is None for one in counts):
        return None
    place = list(run.groups["parts"].scales["part"]).index("gemm")
    flops, moved, seconds = (one[..., place] for one in counts)
    phases = {phase: [p] for p, phase in enumerate(PHASES)} | {"step": [*range(len(PHASES))]}
    found = {}
    for name, which in phases.items():
        operations, bytes_, taken = (float(values.sum()) for values in (
            flops[which], moved[which], seconds[:, which].mean(axis=0)))
        found[name] = (operations / bytes_ if bytes_ else math.nan,
                       operations / taken if taken else math.nan)
    return found


def memory_figures(run: Run) -> list[Figure]:
    """List the memory by kind, each of the rank that has the most."""
    names = {"parameters": "parameters", "gradients": "gradients", "saved": "saved activations",
             "transient": "transient beyond what forward leaves", "pool_peak": "peak of arrays",
             "device_peak": "peak on the device", "resident_growth": "growth of the process"}
    return [Figure(f"memory: {words}", run.most("memory", name) / 2 ** 20, "MiB",
                   run.most("memory", f"expected_{name}") / 2 ** 20)
            for name, words in names.items() if run.of_group("memory", name) is not None]


def merit_document(found: FolderContents) -> list[Part]:
    """Make the tables of parts and figures of merit of all rows; StoreError for none."""
    if not found.rows:
        raise StoreError("\n".join(["no run of a row of the tables was read: the microbenchmarks "
                                    "have no parts", *found.problems]))
    return [part for run in found.rows for part in run_parts(run)]


def run_parts(run: Run) -> list[Part]:
    """Make the tables and notes of one run."""
    chosen = run.configuration
    name = (f"{chosen['table']} {title(chosen['scheme'])} on {chosen['grid']} = {run.ranks} "
            f"ranks, {chosen['preset']}, {run.created[:19]}")
    merits = Table(f"Figures of merit, {name}",
                   [Column("figure"), Column("value"), Column("closed form"), Column("unit")],
                   [[figure.name, *map(_merit_cell, (figure.value, figure.expected)), figure.unit]
                    for figure in figures_of_merit(run)])
    words = words_note([transport_name(run)]) + ' "-" where it does not know, or was not asked.'
    shares = time_parts.mean_parts(run)
    if shares is None:
        return [merits, Notes("About it:", ["The run was not traced: no parts.", words])]
    ratio = time_parts.tracing_overhead(run)
    rows = [[phase, *map(_merit_cell, found.values()), _merit_cell(sum(found.values())),
             _merit_cell(model_run.typical(run.times[phase])), number_cell(ratio[phase], ".2f")]
            for phase, found in shares.items()]
    for phase, found in shares.items():
        whole = sum(found.values())
        rows.append([f"{phase}, %", *(number_cell(100 * (value / whole), ".1f")
                                      for value in found.values()), "", "", ""])
    columns = [Column("seconds"),
               *(Column(part, "", "collectives along" if part in run.directions else "")
                 for part in time_parts.stacked_parts(run.directions)),
               Column("sum", "traced"), Column("time", "untraced"), Column("traced /", "untraced")]
    return [Table(f"Where the time goes, {name}", columns, rows), merits, Notes("About them:", [
        "Parts are means over ranks and traced repetitions, which follow those that count; what a "
        "rank waits for others before a collective and at the end is waiting. Times and rates are "
        "of untraced medians; bandwidth and products are of traced repetitions, bandwidth of "
        "collectives that copy: what is gathered or broadcast in shared memory is read where it "
        "lies, and has none.",
        "Peaks of all ranks at once are those of all cores, over the ranks. Memory bandwidth is "
        "of c = a + b, each array counted once, beyond the caches; it is left out where it may be "
        "theirs.",
        words,
        "Useful operations are counted once, and none that is computed again. Memory is that of "
        "the rank with the most; the closed form of the peak is a dry run's."])]


def _merit_cell(value: float) -> Number:
    """Make a cell of a figure; large whole numbers have all of their digits."""
    whole = abs(value) >= 1000 and float(value).is_integer()
    return number_cell(value, ".0f" if whole else ".4g")


def merit_table(heading: str, found: Sequence[tuple[Row, Run]]) -> Table:
    """Make the table of throughput, utilization, words and memory; "-" if not recorded."""
    words, moved, peak = ("counted a rank, bucket algorithm", "moved a rank",
                          "peak memory of a rank")

    def column(name: str, unit: str, group: str, of: Callable[[Run], float]) -> Column:
        return Column(name, unit, group, of=lambda one: _rounded(of(one[1])))
    columns = [
        Column("scheme", of=lambda one: title(one[0].scheme)),
        Column("ranks", of=lambda one: one[0].gpus),
        column("tokens", "a second", "", lambda run: throughput(run)[0]),
        column("useful", "GFLOP/s a rank", "", lambda run: throughput(run)[1] / 1e9),
        column("of the", "peak (%)", "", lambda run: 100 * throughput(run)[1]
               / run.most("machine", "gemm_together")),
        column("words", "(millions)", words,
               lambda run: run.traffic["words"].sum() / run.ranks / 1e6),
        column("closed form", "(millions)", words,
               lambda run: run.expected_words.sum() / run.ranks / 1e6),
        column("MB", "", words, lambda run: run.traffic["bytes"].sum() / run.ranks / 1e6),
        Column("by", "transport", moved, of=lambda one: transport_name(one[1])),
        column("words", "(millions)", moved, lambda run: moved_words(run).sum() / 1e6),
        column("measured", "(MiB)", peak, lambda run: run.most("memory", "pool_peak") / 2 ** 20),
        column("dry run", "(MiB)", peak,
               lambda run: run.most("memory", "expected_pool_peak") / 2 ** 20)]
    return make_table(f"{heading}: figures of merit", columns, found)


def merit_notes(runs: Sequence[Run]) -> list[str]:
    """Explain the words, the transports that move other words, and the peaks of memory."""
    found = [words_note(map(transport_name, runs))
             + ' "-" where it does not know, or was not asked.']
    peaks = [run for run in runs if not math.isnan(run.most("memory", "pool_peak"))]
    if not peaks:
        return found
    text = ("Peak memory: all arrays of the rank that has the most, beside a dry run of rank 0, "
            "which counts them as MPI needs them: each rank has what it gathers to itself.")
    if any("shared" in str(run.configuration.get("transport")) for run in peaks):
        text += (" Ranks that share memory have a gathered block only once and count an equal "
                 "part of it each, which is less. A large all-reduce takes more, by this rank's "
                 "part of the sum: it lies in shared memory while the whole is copied out.")
    return [*found, text]


def recomputation_notes(runs: Iterable[Run]) -> list[str]:
    """Name the rows with recomputation and their policies, in a note; none if no row has one."""
    found: dict[str, list[str]] = {}
    for run in sorted(runs, key=row_of):
        found.setdefault(policy_of(run), []).append(row_name(run))
    if set(found) <= {"none"}:
        return []
    rows = "; ".join(f"{name}: {'all rows' if len(found) == 1 else ', '.join(names)}"
                     for name, names in found.items())
    return [f"Recomputed in backward, which times, words and memory show and useful operations "
            f"do not: {rows}."]


def row_name(run: Run) -> str:
    """Name the row of a run, with the scheme whose batch it has if that is another's."""
    (table, scheme, ranks), like = row_of(run)
    return f"{table} {title(scheme)} {ranks}" + (
        f" with the batch of {title(like)}" if like else "")


def _rounded(value: float) -> Number:
    """Make a cell with three significant digits, integers in full."""
    return number_cell(value, ".0f" if abs(value) >= 1000 else "#.3g")


def row_wire_parts(results: Results) -> list[Part]:
    """Make the tables of the rows whose bytes between nodes were counted, if there are any."""
    parts: list[Part] = []
    for name, heading in HEADINGS.items():
        found = [(row, run) for row in results.rows(name) if (run := results.get(row))
                 and "wire" in run.groups]
        if found:
            parts.append(wire_table(f"{heading}: bytes of a step on the wire, "
                                    f"{describe_clusters([run for _, run in found])}", found))
    if parts:
        parts.append(Notes("About the bytes on the wire:", [
            "Of one step, over all nodes. Counted: by the bucket algorithm, of all ranks, also "
            "inside nodes. Has to cross: what nodes have to receive if each block crosses the "
            "link of a node once. On the wire: what nodes received by their kernels' counters, "
            "with headers, acknowledgements and four barriers.",
            "What is over is protocol (some per cent) and, where lines have one rank a node or "
            "arrays are small, what MPI's own algorithms send beyond the least."]))
    return parts


def wire_table(heading: str, found: Sequence[tuple[Row, Run]]) -> Table:
    """Make the table of some rows."""
    columns = [
        Column("scheme", of=lambda one: (
            title(one[0].scheme) + f", batch of {title(one[0].like)}" * bool(one[0].like))),
        Column("ranks", of=lambda one: one[1].ranks)]
    return make_table(heading, [*columns, *(
        column for place in range(len(PHASES)) for column in _wire_columns(place))], found)


def _wire_columns(phase: int) -> list[Column]:
    """Describe the bytes of a phase: counted, that have to cross, and on the wire."""
    def wire(one: tuple[Row, Run], name: str) -> float:
        return float(one[1].of_group("wire", name)[phase].sum())

    def over(one: tuple[Row, Run]) -> Number:
        least = wire(one, "least")
        share = wire(one, "received") / least - 1 if least else math.nan
        return Number(share, f"{100 * share:.1f} %" if least else "-")
    group = PHASES[phase]
    return [Column("counted", "(MB)", group, form=".3g",
                   of=lambda one: 1e-6 * float(one[1].traffic["bytes"][phase].sum())),
            Column("has to", "cross (MB)", group, of=lambda one: 1e-6 * wire(one, "least"),
                   form=".3g"),
            Column("on the", "wire (MB)", group, of=lambda one: 1e-6 * wire(one, "received"),
                   form=".3g"),
            Column("over", "that", group, of=over)]
