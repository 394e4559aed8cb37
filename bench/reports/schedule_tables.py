"""Make tables of pipeline schedules: their costs, and the zero-bubble paper's Table 5."""

import itertools
from fractions import Fraction
from typing import Iterable, Mapping, Sequence

from bench.prediction.zero_bubble import DIGITS, EXACT, SEARCHED, Cell, Row
from bench.document import Column, Notes, Number, Part, Table, number_cell
from mm3d.training.schedules.clock import Timeline
from mm3d.training.schedules.memory import peak_in_flight
from mm3d.training.schedules.messages import message_count, pending_needed


def costs(timelines: Mapping[str, Timeline]) -> Table:
    """Make the table of what schedules cost, one a line, by name."""
    columns = [Column("schedule"), *(Column(name, unit, group, ".") for name, unit, group in (
        ("cost", "", ""), ("bubble", "", ""), ("bubble", "/ cost", ""), ("bubble", "/ work", ""),
        ("idle", "share", ""), ("to B", "", "in flight"), ("to W", "", "in flight"),
        ("messages", "", ""), ("sends", "pending", "")))]
    return Table("Pipeline schedules", columns, [[name, *_costs(timeline)]
                                                 for name, timeline in timelines.items()])


def _costs(timeline: Timeline) -> list[Number | int]:
    schedule = timeline.schedule
    flights = [max(peak_in_flight(schedule, kept)) / schedule.chunks for kept in (0, 1)]
    return [*(number_cell(float(value)) for value in (
        timeline.cost, timeline.bubble, timeline.bubble_rate, timeline.bubble_over_work,
        timeline.idle_share, *flights)), message_count(schedule), pending_needed(schedule)]


def cost_notes() -> Notes:
    """Say what the columns of `costs` mean."""
    return Notes("Meaning", [
        "cost: the longest time of a rank from its own first begin to its own last end; bubble: "
        "the cost less the mean work of a rank; bubble / cost is the rate of the zero-bubble "
        "paper, bubble / work that of Narayanan et al., the idle share of all ranks from the "
        "first begin to the last end that of GPipe",
        "in flight: the most micro-batches of any rank, from F to the end of B or W, in "
        "activations of all its layers",
        "sends pending: how many messages a rank must be able to leave unreceived to another "
        "rank; 0 says that synchronous sends do",
        "all exact, by these times; a message keeps neither rank busy"])


def chains(timelines: Mapping[str, Timeline]) -> Notes:
    """Name for each schedule its critical path: the actions that its last end waits for."""
    lines = []
    for name, timeline in timelines.items():
        path = timeline.critical_path()
        ranks = [rank for rank, _ in path]
        hops = sum(rank != following for rank, following in itertools.pairwise(ranks))
        lines.append(f"{name}: {len(path)} actions and {hops} messages, from rank {ranks[0]} to "
                     f"rank {ranks[-1]}")
    return Notes("Critical path", lines)


def table_5(rows: Sequence[tuple[Row, Sequence[Cell]]]) -> list[Part]:
    """Make the zero-bubble paper's Table 5, published beside computed, with a mark a cell."""
    names = {"1f1b": "1F1B", "1f1b-i": "1F1B-I", **{
        name: name.upper() for name in ("zb-h1", "zb-h2")}, "zb-1p": "ZB-1p", "zb-2p": "ZB-2p"}
    return [_rates("Table 5 of arXiv:2401.10241, bubble rates by Table 9", rows, EXACT, names),
            _rates("The schedules that are searched for", rows, tuple(SEARCHED), names),
            _verdict(cell for _, cells in rows for cell in cells)]


def _rates(title: str, rows: Sequence[tuple[Row, Sequence[Cell]]], wanted: Sequence[str],
           names: Mapping[str, str]) -> Table:
    searched = wanted[0] in SEARCHED
    columns = [Column("model"), Column("p"), Column("m")]
    for name in wanted:
        columns += [Column(kind, group=names[name], align=".") for kind in (
            "publ.", "computed", *["bound"] * searched)]
    lines = []
    for row, cells in rows:
        line = [row.model, row.ranks, row.microbatches]
        for cell in cells:
            if cell.schedule in wanted:
                line += [_rate(cell.published), _rate(cell.computed, f" {cell.verdict}")]
                line += [_rate(cell.least)] if cell.least is not None else []
        lines.append(line)
    return Table(title, columns, lines)


def _rate(value: Fraction, mark: str = "") -> Number:
    return Number(float(value), f"{float(round(value, DIGITS)):.{DIGITS}f}{mark}")


def _verdict(cells: Iterable[Cell]) -> Notes:
    marks = [cell.verdict for cell in cells]
    return Notes("Cells", [
        f"{marks.count('=')} of {len(marks)} agree in all printed digits (=), {marks.count('<')} "
        f"searched ones are lower (<), {marks.count('!')} differ (!)",
        "1F1B, ZB-H1 and ZB-H2 are timed action by action in exact fractions; 1F1B-I is by the "
        "paper's own count of hops; ZB-1p and ZB-2p are the best that `auto` finds in the memory "
        "of p and 2 p micro-batches",
        "bound: the rate that no schedule with one stage a rank falls below, by the work, the "
        "forwards that fit the memory before the first backward, and the way to later stages"])
