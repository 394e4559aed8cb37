"""Make tables of predicted seconds beside measured ones."""

from dataclasses import dataclass
from typing import Iterator, Sequence

import numpy as np

from bench.cases.paper import TITLES
from bench.document import Cell, Column, Notes, Part, Table, number_cell
from bench.prediction.beside_measured import Measured
from bench.prediction.machine_model import Machine
from bench.prediction.work import SIZE_NAMES, Seconds, Work, predict_seconds
from bench.records.notes import counted
from mm3d.tracing.events import PHASES


@dataclass(frozen=True)
class Pair:
    """A measurement with its prediction."""

    measured: Measured
    predicted: Seconds

    @property
    def phases(self) -> tuple[str, ...]:
        """Return the measured phases, which may be one whole "step"."""
        took = self.measured.seconds
        return PHASES if "step" in took else tuple(took)

    @property
    def totals(self) -> tuple[float, float]:
        """Sum predicted and measured seconds of the phases that were measured."""
        return (sum(self.predicted[phase] for phase in self.phases),
                sum(self.measured.seconds.values()))

    @property
    def error(self) -> float:
        """Return the error of the prediction, relative to the measured seconds."""
        guessed, took = self.totals
        return guessed / took - 1


def compare_predictions(machine: Machine, found: Sequence[Measured]) -> list[Part]:
    """Make the document of predictions beside measurements, with errors and the planner's choices.

    Measurements on other ranks or transports than the machine's are left out.
    """
    known = [one for one in found if one.dtype in machine.gemm_rate]
    own = [one for one in known if one.matches(machine)]
    left = [f"{counted(count, 'run')} of {what} left out" for count, what in (
        (len(known) - len(own), "other numbers of ranks or another transport"),
        (len(found) - len(known), "dtypes without a rate of products")) if count]
    parts: list[Part] = [machine.described]
    if own:
        pairs = [Pair(one, predict_seconds(machine, one.work, one.dtype)) for one in own]
        parts += [seconds_table(pairs),
                  Notes("Errors of predictions", list(describe_errors(pairs)))]
        rows = choice_table(pairs)
        parts += [rows] if rows.rows else []
    return parts + [Notes("Left out", left)] * bool(left)


def _plan(work: Work) -> str:
    """Name the grid, and the direction that is inside a node if the ranks were placed anew."""
    return f"{work.grid}, {work.order[-1]} inside" if work.order else str(work.grid)


def _sizes(work: Work) -> str:
    return f"{work.kind} {' x '.join(map(str, work.sizes))} {work.form}".rstrip()


def seconds_table(pairs: Sequence[Pair]) -> Table:
    """Make the table of milliseconds, errors of the sums, and published averages."""
    published = any(pair.measured.published is not None for pair in pairs)
    rows: list[list[Cell]] = []
    for pair in sorted(pairs, key=lambda pair: pair.measured.work.kind):
        one, work = pair.measured, pair.measured.work
        times = [cell for phase in PHASES for cell in (
            number_cell(1e3 * pair.predicted[phase]),
            number_cell(1e3 * one.seconds[phase]) if phase in one.seconds else "-")]
        average: list[Cell] = ["-"] * 3
        if work.kind == "layer" and one.published is not None:
            average = [number_cell(seconds) for seconds in (
                one.published, *(total / work.sizes[2] for total in pair.totals))]
        rows.append([TITLES.get(work.scheme, work.scheme), _plan(work), _sizes(work),
                     one.dtype, *times, number_cell(pair.error, "+.0%"),
                     *(average if published else [])])
    columns = [Column("scheme"), *(Column(name, align="<") for name in ("grid", "sizes", "dtype")),
               *(Column(kind, "", f"{phase} ms", ".") for phase in PHASES
                 for kind in ("predicted", "measured")), Column("error")]
    if published:
        columns += [Column(kind, "", "average s", ".")
                    for kind in ("published", "predicted", "measured")]
    return Table("Predicted and measured", columns, rows)


def describe_errors(pairs: Sequence[Pair]) -> Iterator[str]:
    """Summarize the errors of predictions of products and of Transformers."""
    for kind in SIZE_NAMES:
        off = [abs(pair.error) for pair in pairs if pair.measured.work.kind == kind]
        if off:
            yield (f"{kind}: {counted(len(off), 'run')}, error {np.median(off):.0%} in the "
                   f"median, {np.mean(off):.0%} in the mean, {max(off):.0%} at most")


def choice_table(pairs: Sequence[Pair]) -> Table:
    """Make the table of the planner's grid, with the least predicted seconds, beside the fastest.

    Each size measured on several grids has a line for all schemes, and one for each scheme with
    several grids.  A plan measured in several runs counts with their median: otherwise the fastest
    run of one would be compared with the slowest of another.
    """
    runs: dict[tuple, list[tuple[float, float]]] = {}
    for pair in pairs:
        plan = pair.measured.work, pair.measured.dtype, pair.phases
        runs.setdefault(plan, []).append(pair.totals)
    groups: dict[tuple, list[tuple[float, float, Work]]] = {}
    for (work, *how), totals in runs.items():
        predicted, seconds = np.median(totals, axis=0).tolist()
        for schemes in ("all", work.scheme):
            key = work.kind, work.sizes, work.form, *how, work.ranks, schemes
            groups.setdefault(key, []).append((predicted, seconds, work))
    rows: list[list[Cell]] = []
    for (*_, ranks, schemes), tried in groups.items():
        if len(tried) == 1:
            continue
        taken = min(tried, key=lambda plan: plan[:2])    # the faster of equals
        fastest = min(tried, key=lambda plan: plan[1])
        least, slowest = fastest[1], max(seconds for _, seconds, _ in tried)
        chosen: list[Cell] = []
        for _, seconds, work in (taken, fastest):
            chosen += [f"{TITLES.get(work.scheme, work.scheme)} {_plan(work)}",
                       number_cell(1e3 * seconds)]
        rows.append([_sizes(taken[2]), ranks, TITLES.get(schemes, schemes), len(tried),
                     *chosen, number_cell(taken[1] / least - 1, "+.0%"),
                     number_cell(slowest / least - 1, "+.0%")])
    several = ", by medians of several runs" if len(pairs) > len(runs) else ""
    return Table(f"The planner's choices{several}", [
        Column("sizes"), Column("ranks"), Column("of schemes", align="<"), Column("grids"),
        Column("grid", "", "planner's", "<"), Column("ms", "", "planner's", "."),
        Column("grid", "", "fastest", "<"), Column("ms", "", "fastest", "."),
        Column("planner's", "", "over the fastest"), Column("slowest", "", "over the fastest")],
        rows)
