"""Make the tables of an emulated cluster: published, predicted before the run, and emulated."""

import math
from dataclasses import dataclass, replace
from typing import Iterable, Iterator, Sequence

import numpy as np

from bench.cases.paper import BASELINES, HEADINGS, PROPOSED, Row, load_tables, title
from bench.document import Column, Notes, Number, Part, Table, make_table, spread
from bench.records.folder import Results
from bench.reports import certainty
from bench.reports.emulated import Emulated, of_run, waited_rows


STAR = "*"    # of software that takes more than its allowed share of a step


def emulated_parts(results: Results) -> list[Part]:
    """Make the tables of the rows of a preset that were measured on an emulated cluster."""
    parts: list[Part] = []
    for found in group_rows(emulated_rows(results)):
        parts += tables_of(found, measured=True)
        parts.append(Notes("About the emulated cluster:", similarity_notes(found)))
    return parts


def emulated_rows(results: Results) -> list[Emulated]:
    """Describe each of `waited_rows`, with the runs that repeat it."""
    return [of_run(row, run, certainty.repeated_runs(results, row))
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


RATIO = "#.3g"    # the form of speed-ups


@dataclass(frozen=True)
class ComparedRows:
    """Two rows whose ratio is a speed-up of 3-D."""

    slow: Emulated
    fast: Emulated
    like: str    # the scheme whose batch both have; "" where each has its own
    published: float    # the paper's speed-up; NaN if it has none
    found: certainty.SpeedUp | None    # the emulated one; None without measurements

    @property
    def over(self) -> str:
        """The title of the slower scheme."""
        return title(self.slow.row.scheme)

    @property
    def predicted(self) -> float:
        """The speed-up that was predicted here."""
        return self.slow.predicted_average / self.fast.predicted_average

    @property
    def quotable(self) -> bool:
        """Whether software takes at most its allowed share of both rows' steps."""
        return self.slow.quotable and self.fast.quotable


def speed_ups_table(heading: str, found: Sequence[Emulated], measured: bool) -> Table:
    """Make the table of speed-ups of 3-D over the other schemes."""
    columns = [
        Column("speed-up of 3-D", of=lambda one: (
            f"over {one.over}" + f", batch of {title(one.like)}" * bool(one.like))),
        Column("ranks", of=lambda one: one.slow.row.gpus),
        Column("published", of=lambda one: one.published, form=RATIO),
        Column("machine's", "model", form=RATIO,
               of=lambda one: one.slow.original_average / one.fast.original_average),
        Column("predicted", "here", of=lambda one: one.predicted, form=RATIO)]
    if measured:
        columns += [
            Column("emulated", of=lambda one: Number(
                one.found.ratio, f"{one.found.ratio:{RATIO}}{STAR * (not one.quotable)}")),
            Column("low", of=lambda one: one.found.low, form=RATIO),
            Column("high", of=lambda one: one.found.high, form=RATIO),
            Column("runs", of=lambda one: one.found.runs),
            Column("error of", "prediction", form="+.0%",
                   of=lambda one: one.predicted / one.found.ratio - 1)]
    return make_table(f"{heading}: speed-ups", columns, compared(found))


def compared(found: Sequence[Emulated]) -> Iterator[ComparedRows]:
    """List the pairs of rows whose ratio is a speed-up of 3-D."""
    known = {(one.row.key, one.row.like): one for one in found}
    for cube in (one for one in found if one.row.scheme == PROPOSED and not one.row.like):
        for other in BASELINES:
            key = cube.row.table, other, cube.row.gpus
            for like, cube_like in (("", ""), (PROPOSED, ""), ("", other)):
                slow, fast = known.get((key, like)), known.get((cube.row.key, cube_like))
                if slow and fast:
                    alike = like or cube_like
                    published = (math.nan if alike else
                                 slow.row.recomputed / fast.row.recomputed)
                    yield ComparedRows(slow, fast, alike, published, _speed_up(slow, fast))


def _speed_up(slow: Emulated, fast: Emulated) -> certainty.SpeedUp | None:
    """Compute a speed-up; of one run with the quotients of both rows' bounds."""
    if not (slow.averages and fast.averages):
        return None
    found = certainty.speed_up(slow.averages, fast.averages)
    if found.runs > 1:
        return found
    low, high = (slow.interval[k] / fast.interval[1 - k] for k in range(2))
    return replace(found, low=low, high=high)


def marked_shares(found: Sequence[Emulated]) -> list[str]:
    """Name the rows of ratios with a `STAR`, each with the share that software took of a step."""
    rows = {(one.row.key, one.row.like): one for pair in compared(found)
            for one in (pair.slow, pair.fast) if not one.quotable}
    return [(f"{software_text(one)} of" if one.software > 0 else "an unknown share of")
            + f" {title(one.row.scheme)} on {one.row.gpus} ranks, {one.row.table}"
            + _batch_of(one.row) for one in rows.values()]


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
