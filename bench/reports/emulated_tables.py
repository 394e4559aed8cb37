"""Make the tables of an emulated cluster: published, predicted before the run, and emulated."""

import math
from typing import Iterable, Sequence

import numpy as np

from bench.cases.paper import BASELINES, HEADINGS, PROPOSED, Row, load_tables, title
from bench.document import (Cell, Column, Notes, Number, Part, Table, make_table, number_cell,
                            spread)
from bench.records.folder import Results
from bench.reports import speed_ups
from bench.reports.emulated import waited_rows
from bench.reports.emulated_rows import Emulated, of_run


STAR = "*"    # of software that takes more than its allowed share of a step


def emulated_parts(results: Results) -> list[Part]:
    """Make the tables of the rows of a preset that were measured on an emulated cluster.

    There are none if ranks computed, or had no links between them.
    """
    parts: list[Part] = []
    for found in group_rows(emulated_rows(results)):
        parts += tables_of(found, measured=True)
        parts.append(Notes("About the emulated cluster:", similarity_notes(found)))
    return parts


def emulated_rows(results: Results) -> list[Emulated]:
    """Describe each of `waited_rows`, with the runs that repeat it."""
    return [of_run(row, run, speed_ups.repeated_runs(results, row))
            for row, run in waited_rows(results)]


def group_rows(rows: Iterable[Emulated]) -> list[list[Emulated]]:
    """Group rows that can be compared: of one cluster, one machine and one scale."""
    groups: dict[tuple, list[Emulated]] = {}
    for one in rows:
        groups.setdefault((one.cluster, one.machine, one.scale), []).append(one)
    return list(groups.values())


def tables_of(found: Sequence[Emulated], measured: bool) -> list[Part]:
    """Make the tables of rows, and of speed-ups, of both of the paper's tables."""
    parts: list[Part] = []
    for where, rows in by_heading(found):
        parts += [rows_table(where, rows, measured), speed_ups_table(where, rows, measured)]
    if any(one.variant.overlap for one in found):
        parts.append(Notes("About overlap:", [
            "Predictions hide nothing: seconds of work and of communication add up, also where a "
            "scheme sends while its ranks wait for their work."]))
    return parts


def by_heading(found: Sequence[Emulated]) -> Iterable[tuple[str, list[Emulated]]]:
    """Return the rows of each of the paper's tables, with a heading that names the cluster."""
    for name, heading in HEADINGS.items():
        rows = [one for one in found if one.row.table == name]
        if rows:
            yield f"{heading}: {rows[0].cluster and rows[0].cluster.describe()}", rows


def rows_table(heading: str, found: Iterable[Emulated], measured: bool) -> Table:
    """Make the table of seconds a sequence at the scale of the emulated machine."""
    group = "seconds a sequence"
    columns = [
        Column("scheme", of=lambda one: title(one.row.scheme) + _batch_of(one.row)),
        Column("ranks", of=lambda one: one.row.gpus),
        Column("batch", of=lambda one: one.sizes.batch),
        Column("hidden", of=lambda one: one.sizes.hidden),
        Column("published", "", group, form=".3f",
               of=lambda one: math.nan if one.row.like else one.row.recomputed),
        Column("machine's", "model", group, of=lambda one: one.original_average, form=".3f"),
        Column("predicted", "here", group, of=lambda one: one.predicted_average, form=".3f")]
    if measured:
        columns += [
            *spread(lambda one: (one.average, *one.interval), ".3f", group,
                    ("emulated", "low", "high")),
            Column("error of", "prediction", form="+.0%",
                   of=lambda one: one.predicted_average / one.average - 1),
            Column("slowed", "by", of=lambda one: one.dilation, form=".2g"),
            Column("share of", "software", of=lambda one: Number(
                one.software, f"{software_text(one)}{STAR * (not one.quotable)}"))]
    else:
        columns.append(Column("step here", "(s)", of=lambda one: one.predicted))
    return make_table(f"{heading}: rows", columns, found)


def software_text(one: Emulated) -> str:
    """Return the share of software; of one above its bound with a digit more, to be seen above."""
    return f"{one.software:.0%}" if one.quotable else f"{one.software:.1%}"


def _batch_of(row: Row) -> str:
    """Name the scheme whose batch a row has, if it is another's."""
    return f", batch of {title(row.like)}" * bool(row.like)


def speed_ups_table(heading: str, found: Sequence[Emulated], measured: bool) -> Table:
    """Make the table of speed-ups of 3-D over the other schemes."""
    lines = [speed_up_cells(*pair, measured) for pair in compared(found)]
    columns = [Column("speed-up of 3-D"), Column("ranks"), Column("published"),
               Column("machine's", "model"), Column("predicted", "here")]
    if measured:
        columns += [Column("emulated"), Column("low"), Column("high"), Column("runs"),
                    Column("error of", "prediction")]
    return Table(f"{heading}: speed-ups", columns, lines)


def compared(found: Sequence[Emulated]) -> Iterable[tuple[str, Emulated, Emulated]]:
    """Return the pairs of rows whose ratio is a speed-up of 3-D, the slower first, with names."""
    known = {(one.row.key, one.row.like): one for one in found}
    for cube in (one for one in found if one.row.scheme == PROPOSED and not one.row.like):
        for other in BASELINES:
            key = cube.row.table, other, cube.row.gpus
            for like, cube_like, words in (("", "", ""), (PROPOSED, "", ", batch of 3-D"),
                                           ("", other, f", batch of {title(other)}")):
                slow, fast = known.get((key, like)), known.get((cube.row.key, cube_like))
                if slow and fast:
                    yield f"over {title(other)}{words}", slow, fast


def marked_shares(found: Sequence[Emulated]) -> list[str]:
    """Name the rows of ratios with a `STAR`, each with the share that software took of a step."""
    rows = {(one.row.key, one.row.like): one for _, *pair in compared(found) for one in pair
            if not one.quotable}
    return [(f"{software_text(one)} of" if one.software > 0 else "an unknown share of")
            + f" {title(one.row.scheme)} on {one.row.gpus} ranks, {one.row.table}"
            + _batch_of(one.row) for one in rows.values()]


def speed_up_cells(name: str, slow: Emulated, fast: Emulated, measured: bool) -> list[Cell]:
    """Make the cells of the speed-up of a pair of rows."""
    alike = bool(slow.row.like or fast.row.like)
    published = math.nan if alike else slow.row.recomputed / fast.row.recomputed
    predicted = slow.predicted_average / fast.predicted_average
    cells: list[Cell] = [name, slow.row.gpus, _ratio(published),
                         _ratio(slow.original_average / fast.original_average),
                         _ratio(predicted)]
    if not measured:
        return cells
    over = speed_ups.speed_up(slow.averages, fast.averages)
    low, high = over.low, over.high
    if over.runs == 1:
        low, high = (slow.interval[k] / fast.interval[1 - k] for k in range(2))
    mark = STAR * (not (slow.quotable and fast.quotable))
    return [*cells, Number(over.ratio, f"{over.ratio:#.3g}{mark}"), _ratio(low), _ratio(high),
            over.runs, number_cell(predicted / over.ratio - 1, "+.0%")]


def _ratio(value: float) -> Number:
    return number_cell(value, "#.3g")


def similarity_notes(found: Sequence[Emulated]) -> list[str]:
    """State how the emulated cluster keeps the machine's ratios, and what it shows."""
    one, layers = found[0], load_tables().settings.layers
    scales = "; ".join(sorted({
        f"{each.row.table}: hidden and sequence / {each.shrink:g}, so words and passes / "
        f"{each.shrink ** 2:g} and operations / {each.shrink ** 3:g}, and {each.to_paper:.3g} "
        f"seconds of the machine for each here" for each in found}))
    errors = [abs(each.predicted_average / each.average - 1) for each in found
              if each.run is not None]
    name = one.machine
    unknown = "; -: not stored with the row" * any(math.isnan(each.original) for each in found)
    notes = [
        f"Scale: links are {one.scale:g} times slower than those of {name} are in use, and ranks "
        f"wait {one.scale:g} times the seconds of {name}, whose rate of products is divided as "
        f"lengths are. So computing keeps its ratio to communicating, but for hidden sizes that "
        f"are rounded to whole heads. Of the paper's {layers} layers, which are assumed, "
        f"{one.sizes.layers} is run. {scales}. Seconds a sequence are at the machine's scale.",
        f"The ratio is that of data sheets and usual fractions of them, in the file of machine "
        f"{name}. The paper's times fit a slower network and slower GPUs (bench predict), so "
        f"compare speed-ups, not seconds.",
        f"Machine's model: {name} itself, at the published sizes, predicted{unknown}. Predicted "
        "here: by the same model with the emulated links, which the ranks of a node share, from a "
        "dry run of ranks as they are placed; links and waits alone, nothing is fitted. Where "
        "there is a measurement, these are the seconds that it stored before its first step.",
        "Slowed by: links and waits of a row are this many times slower than the scale says, and "
        "its seconds are divided by it again. Share of software: seconds of a step whose links "
        "have no limit and which waits for nothing, over those of a step as it is timed; ranks "
        f"share few cores for it. {STAR} marks a share above what was allowed, and ratios of such "
        "rows: do not quote them.",
        "It shows: traffic, the placement of ranks on nodes, contention for links, what MPI's "
        "algorithms send beyond the least, and this software. It does not show: GPUs and their "
        "kernels, NVLink (ranks of a node share memory, which is faster beside these links than "
        "NVLink is beside InfiniBand), real switches, or sending while a GPU computes."]
    if errors:
        notes.append("Low and high: the bounds of the 95 % interval of the median of the latest "
                     "run's steps, less of fewer than six; those of a speed-up of one run are "
                     "quotients of both rows' bounds. What changes from run to run is in the "
                     "intervals of speed-ups of several runs alone.")
        notes.append(f"Errors of predictions: {np.median(errors):.0%} in the median, "
                     f"{max(errors):.0%} at most, of {len(errors)} rows.")
    return notes
