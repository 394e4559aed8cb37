"""Make the table of the bytes that rows sent between nodes, beside the fewest possible."""

from typing import Sequence

from bench.cases.paper import HEADINGS, Row, title
from bench.records.folder import Results
from bench.records.model_run import Run
from bench.document import Cell, Column, Notes, Number, Part, Rows, Table, number_cell
from bench.reports.emulated import describe_clusters
from mm3d.tracing.events import PHASES


def wire_parts(results: Results) -> list[Part]:
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
