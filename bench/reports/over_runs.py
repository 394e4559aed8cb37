"""Compute speed-ups, and their intervals, over several runs of two rows.

Repetitions of one run share its placement, its neighbours and its minutes: only several runs tell
how much a speed-up changes from run to run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.cases.paper import Row
from bench.records.folder import EFFORT, Results, SAME
from bench.records.model_run import Run
from bench.statistics import geometric_mean_interval

MIN_RUNS = 3    # least pairs of runs for a confidence interval
NOTE = ("Speed-ups of several runs of both rows (repeat the command with the same --out) are "
        "geometric means of the quotients of their runs, the latest with the latest, and so on "
        "back, as far as settings, commit, machine and libraries are those of the latest. From "
        "three runs on low and high are the bounds of the 95 % interval of that mean, by "
        "Student's t on the logarithms of the quotients; of two runs they are the two quotients.")


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
