"""Make tables of figures of merit, and of bytes on the wire, with a line for each row."""

import math
from typing import Callable, Iterable, Sequence

from bench.cases.paper import HEADINGS, Row, title
from bench.document import (Cell, Column, Notes, Number, Part, Rows, Table, make_table,
                            number_cell)
from bench.records.folder import Results, policy_of, row_of
from bench.records.model_run import Run
from bench.records.notes import words_note
from bench.reports import merit, time_parts
from bench.reports.emulated import describe_clusters
from mm3d.tracing.events import PHASES


def merit_table(heading: str, found: Sequence[tuple[Row, Run]]) -> Table:
    """Make the table of throughput, utilization, words and memory; "-" if not recorded."""
    words, moved, peak = ("counted a rank, bucket algorithm", "moved a rank",
                          "peak memory of a rank")

    def column(name: str, unit: str, group: str, of: Callable[[Run], float]) -> Column:
        return Column(name, unit, group, of=lambda one: _rounded(of(one[1])))
    columns = [
        Column("scheme", of=lambda one: title(one[0].scheme)),
        Column("ranks", of=lambda one: one[0].gpus),
        column("tokens", "a second", "", lambda run: merit.throughput(run)[0]),
        column("useful", "GFLOP/s a rank", "", lambda run: merit.throughput(run)[1] / 1e9),
        column("of the", "peak (%)", "", lambda run: 100 * merit.throughput(run)[1]
               / time_parts.recorded_number(run, "machine", "gemm_together")),
        column("words", "(millions)", words,
               lambda run: run.traffic["words"].sum() / run.ranks / 1e6),
        column("closed form", "(millions)", words,
               lambda run: run.expected_words.sum() / run.ranks / 1e6),
        column("MB", "", words, lambda run: run.traffic["bytes"].sum() / run.ranks / 1e6),
        Column("by", "transport", moved, of=lambda one: merit.transport_name(one[1])),
        column("words", "(millions)", moved, lambda run: merit.moved_words(run).sum() / 1e6),
        column("measured", "(MiB)", peak, lambda run: most_bytes(run, "pool_peak") / 2 ** 20),
        column("dry run", "(MiB)", peak, lambda run: time_parts.recorded_number(
            run, "memory", "expected_pool_peak") / 2 ** 20)]
    return make_table(f"{heading}: figures of merit", columns, found)


def merit_notes(runs: Sequence[Run]) -> list[str]:
    """Explain the words, the transports that move other words, and the peaks of memory."""
    found = [words_note(map(merit.transport_name, runs))
             + ' "-" where it does not know, or was not asked.']
    peaks = [run for run in runs if not math.isnan(most_bytes(run, "pool_peak"))]
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


def most_bytes(run: Run, name: str) -> float:
    """Return the bytes of the rank that has the most; NaN if they were not recorded."""
    found = time_parts.find_variable(run, "memory", name)
    return math.nan if found is None else float(found.values.max())


def _rounded(value: float) -> Number:
    """Make a cell with three significant digits, integers in full."""
    return number_cell(value, ".0f" if abs(value) >= 1000 else "#.3g")


def row_wire_parts(results: Results) -> list[Part]:
    """Make the tables of the rows whose bytes between nodes were counted; none if there are none.
    """
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
    rows: Rows = []
    for row, run in found:
        like = f", batch of {title(row.like)}" * bool(row.like)
        cells: list[Cell] = [f"{title(row.scheme)}{like}", run.ranks]
        for phase in range(len(PHASES)):
            counted = float(run.traffic["bytes"][phase].sum())
            least, received = (float(run.groups["wire"].variables[name].values[phase].sum())
                               for name in ("least", "received"))
            over = received / least - 1 if least else float("nan")
            cells += [number_cell(1e-6 * counted, ".3g"), number_cell(1e-6 * least, ".3g"),
                      number_cell(1e-6 * received, ".3g"),
                      Number(over, f"{100 * over:.1f} %" if least else "-")]
        rows.append(cells)
    columns = [Column("scheme"), Column("ranks")]
    for phase in PHASES:
        columns += [Column("counted", "(MB)", phase), Column("has to", "cross (MB)", phase),
                    Column("on the", "wire (MB)", phase), Column("over", "that", phase)]
    return Table(heading, columns, rows)
