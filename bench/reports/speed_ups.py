"""Compute speed-ups, and their intervals, over several runs of two rows; make their table.

Repetitions of one run share its placement, its neighbours and its minutes: only several runs tell
how much a speed-up changes from run to run.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from bench.cases.paper import BASELINES, PROPOSED, Row, title
from bench.cases.selection import select_rows
from bench.document import Cell, Column, Number, Rows, Table, number_cell
from bench.records import model_run
from bench.records.folder import EFFORT, Results, SAME
from bench.records.model_run import Run
from bench.reports import certainty
from bench.statistics import geometric_mean_interval

MIN_RUNS = 3    # least pairs of runs for a confidence interval
SEVERAL_RUNS = (
    "Speed-ups of several runs of both rows (repeat the command with the same --out) are "
    "geometric means of the quotients of their runs, the latest with the latest, and so on back, "
    "as far as settings, commit, machine and libraries are those of the latest. From three runs "
    "on low and high are the bounds of the 95 % interval of that mean, by Student's t on the "
    "logarithms of the quotients; of two runs they are the two quotients.")


@dataclass(frozen=True)
class SpeedUp:
    """The quotient of the times of two rows over several runs of both.

    Attributes
    ----------
    ratio, low, high : float
        The geometric mean of the quotients of the pairs of runs, and its bounds.
    """

    ratio: float
    low: float
    high: float
    runs: int


def speed_up(slow: Sequence[float], fast: Sequence[float]) -> SpeedUp:
    """Compute how many times as fast one row is as another, over pairs of runs.

    Parameters
    ----------
    slow, fast : sequence of float
        Seconds of the runs of both rows, oldest first.  The latest of both are a pair, the runs
        before them another, and so on: changes from hour to hour affect both of a pair alike.

    Returns
    -------
    SpeedUp
        From `MIN_RUNS` pairs on with the 95 % interval by Student's t, where the logarithms of
        the quotients are normal and independent; of fewer with the least and the greatest one.

    Raises ValueError when a side has no run.
    """
    count = min(len(slow), len(fast))
    if not count:
        raise ValueError("a speed-up takes a run of both rows")
    ratios = np.asarray(slow[-count:], float) / np.asarray(fast[-count:], float)
    mean = float(ratios.prod() ** (1 / count))
    if count < MIN_RUNS:
        return SpeedUp(mean, float(ratios.min()), float(ratios.max()), count)
    return SpeedUp(mean, *geometric_mean_interval(ratios), count)


def repeated_runs(results: Results, row: Row) -> list[Run]:
    """List the runs of a row that repeat its latest, which comes last; empty without any.

    They share its commit, machine, libraries and settings, but for those of how long it was
    measured.
    """
    runs = results.history.get((row.key, row.like), [])
    return [run for run in runs if _identity(run) == _identity(runs[-1])]


def _identity(run: Run) -> tuple:
    settings = {name: value for name, value in run.configuration.items()
                if name not in EFFORT and name != "command" and not name.startswith("clock_")}
    return (sorted((name, str(value)) for name, value in settings.items()),
            [str(run.environment.get(name)) for name in SAME])


def speed_up_table(heading: str, name: str, results: Results) -> Table:
    """Make the table of ratios of average step times at equal ranks, published and measured.

    A pair of rows with different batches is followed by the pair with equal batches, if measured.
    """
    rows = {(row.scheme, row.gpus): row for row in select_rows(name)}
    lines: Rows = []
    for cube in (row for row in rows.values() if row.scheme == PROPOSED):
        for other in BASELINES:
            if row := rows.get((other, cube.gpus)):
                lines.append(speed_up_line(f"over {title(other)}", row, cube, results))
                equal = ((replace(row, like=PROPOSED), cube), (row, replace(cube, like=other)))
                lines += [speed_up_line(f"over {title(other)}, equal batches", *pair, results)
                          for pair in equal if any(one.like and results.get(one) for one in pair)]
    batches = [Column("batch", "other"), Column("batch", "3-D")]
    published = [*batches, Column("printed"), Column("recomputed")]
    measured = [*batches, Column("tokens", "other"), Column("tokens", "3-D"), Column("speed-up"),
                Column("low"), Column("high"), Column("runs"), Column("differs")]
    return Table(f"{heading}: speed-up of 3-D", [Column("speed-up"), Column("ranks"), *(
        dataclasses.replace(column, group=group) for group, columns in (
            ("published", published), ("measured", measured)) for column in columns)], lines)


def speed_up_line(name: str, other: Row, cube: Row, results: Results) -> list[Cell]:
    """Make the line of a pair of rows; rows with another's batch have no published figures."""
    cells: list[Cell] = [name, cube.gpus]
    if other.like or cube.like:
        cells += [""] * 4
    else:
        cells += [other.batch, cube.batch, _ratio(other.average, cube.average),
                  _ratio(other.recomputed, cube.recomputed)]
    runs = [results.get(row) for row in (other, cube)]
    if None in runs:
        return [*cells, *[""] * 4, number_cell(math.nan, missing="missing"), *[""] * 4]
    batches = [run.configuration["batch"] for run in runs]
    tokens = [run.configuration["batch"] * run.configuration["seq"] for run in runs]
    found = speed_up(*(
        [model_run.average_step_time(run.times, batch)
         for run in repeated_runs(results, row)]
        for row, batch in zip((other, cube), batches)))
    bounds = [_cell(found.low), _cell(found.high)] if found.runs > 1 else ["", ""]
    return [*cells, *batches, *tokens, _cell(found.ratio), *bounds, found.runs,
            certainty.compare_repetitions(*runs)]


def speed_up_notes(results: Results) -> list[str]:
    """Explain speed-ups over several runs, and between different batches."""
    cubes = select_rows(schemes=PROPOSED)
    several = any(len(repeated_runs(results, cube)) > 1 for cube in cubes)
    said = [SEVERAL_RUNS] * several
    unequal = any(results.get(cube) and results.get(row)
                  and results.get(cube).configuration["batch"]
                  != results.get(row).configuration["batch"]
                  for cube in cubes for row in select_rows(cube.table)
                  if row.gpus == cube.gpus)
    if not unequal:
        return said
    text = ("Speed-ups are ratios of seconds a sequence. Where the batches of both sides differ, "
            "what a larger batch gains is in them, in the published ones as well.")
    more = "" if results.equal else " --equal-tokens measures both at equal batches."
    return [*said, text + more]


def _ratio(slow: float, fast: float) -> Number:
    return _cell(slow / fast)


def _cell(ratio: float) -> Number:
    return Number(ratio, f"{ratio:.2f}x")
