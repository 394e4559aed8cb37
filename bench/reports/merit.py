"""Compute figures of merit of a run, each beside its closed form if it has one."""

import math
from dataclasses import dataclass

import numpy as np

from bench.cases.paper import title
from bench.document import Column, Notes, Number, Part, Table, number_cell
from bench.errors import StoreError
from bench.records import model_run
from bench.records.folder import FolderContents
from bench.records.model_run import Run
from bench.records.notes import words_note
from bench.reports import time_parts
from mm3d.tracing.events import PHASES


@dataclass(frozen=True)
class Figure:
    """A number with its unit and its closed form; NaN where missing."""

    name: str
    value: float
    unit: str
    expected: float = math.nan


def throughput(run: Run) -> tuple[float, float]:
    """Return the tokens a second, and the useful operations a second of a rank.

    A step is the median forward and backward, both untraced.
    """
    seconds = sum(model_run.typical(run.times[phase]) for phase in PHASES)
    return (run.configuration["batch"] * run.configuration["seq"] / seconds,
            int(run.values("flops")) / seconds / run.ranks)


def figures_of_merit(run: Run) -> list[Figure]:
    """Compute all figures of a run; the MFU is its useful rate over the peak of products."""
    tokens, rate = throughput(run)
    found = [Figure("average step time", model_run.average_step_time(
                        run.times, run.configuration["batch"]), "s a sequence"),
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
    """Compute executed over useful operations of a run with recomputation.

    Traced operations include the attention scores that every backward recomputes, and computation
    repeated on several ranks.
    """
    name = run.configuration.get("recompute", "none")
    if name == "none":
        return []
    useful, again = int(run.values("flops")), int(run.values("flops_again"))
    traced = time_parts.find_variable(run, "parts", "flops")
    executed = math.nan if traced is None else float(traced.values.sum())
    return [Figure(f"operations executed, recompute {name}, over useful", executed / useful, "1",
                   (useful + again) / useful)]


def traffic_figures(run: Run) -> list[Figure]:
    """Compute words, bytes and bandwidth of a step by direction, the mean over the ranks.

    Words are those counted, and those that the transport moved by its own count.
    """
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
    received, least = (run.groups["wire"].variables[name].values.sum(axis=1)
                       for name in ("received", "least"))
    return [Figure(f"bytes that nodes received from others, {phase}, on the wire",
                   float(received[p]), "byte", float(least[p])) for p, phase in enumerate(PHASES)]


def moved_words(run: Run) -> np.ndarray:
    """Return the words that the transport moved in a step, by its own count, by direction.

    They are means over the ranks; NaN where the transport does not count.
    """
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
    counts = [time_parts.find_variable(run, "parts", name)
              for name in ("flops", "bytes", "seconds")]
    if None in counts:
        return None
    place = list(run.groups["parts"].scales["part"]).index("gemm")
    flops, moved, seconds = (v.values[..., place] for v in counts)
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
    found = []
    for name, words in names.items():
        bytes_ = time_parts.find_variable(run, "memory", name)
        if bytes_ is not None:
            expected = time_parts.recorded_number(run, "memory", f"expected_{name}")
            found.append(Figure(f"memory: {words}", float(bytes_.values.max()) / 2 ** 20, "MiB",
                                expected / 2 ** 20))
    return found


def merit_document(found: FolderContents) -> list[Part]:
    """Make the tables of time parts and figures of merit of all runs of rows.

    Raises StoreError when there is no run of a row.
    """
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
