"""Report how certain figures of runs are: intervals, tests, and speed-ups over several runs."""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Sequence

import numpy as np
from msgspec.structs import replace

from bench.cases.paper import BASELINES, PROPOSED, Row, title
from bench.cases.selection import select_rows
from bench.cases.variants import recorded_variant
from bench.document import Cell, Column, Number, Rows, Table, make_table, number_cell, spread
from bench.records import model_run
from bench.records.folder import EFFORT, SAME, Results, is_crowded, policy_of, row_of
from bench.records.model_run import Run
from bench.records.notes import counted
from bench.statistics import CONFIDENCE, geometric_mean_interval, median_interval, rank_sum_p
from mm3d.tracing.events import PHASES

SIGNIFICANT = 0.05
END_REASONS = {"width": "the intervals are narrow enough",
               "repetitions": "the limit of repetitions", "seconds": "the limit of seconds",
               "stopped": "the end of the job"}


def certainty_table(heading: str, found: Sequence[tuple[Row, Run]]) -> Table:
    """Make the table of intervals of each measured row, with what ended and verified it."""
    def bounds(one: tuple[Row, Run], phase: str) -> list[Number]:
        interval = median_interval(model_run.slowest(one[1].times[phase]))
        few = "" if interval.confidence >= CONFIDENCE else "+"
        return [*(number_cell(bound, "#.3g") for bound in interval[1:3]),
                Number(interval.width, f"{100 * interval.width:.1f} %{few}")]
    columns = [
        Column("scheme", of=lambda one: title(one[0].scheme)),
        Column("ranks", of=lambda one: one[0].gpus),
        Column("a core", of=lambda one: float(one[1].environment["ranks_per_core"]), form="g"),
        Column("n", of=lambda one: len(one[1].times["forward"])),
        *(column for phase in PHASES for column in spread(
            partial(bounds, phase=phase), "", phase, ("low", "high", "width"), ("(s)", "(s)"))),
        Column("ended by", of=lambda one: one[1].ended_by),
        Column("verified by", of=lambda one: verified_by(one[1]))]
    return make_table(f"{heading}: 95 % confidence intervals of the medians", columns, found)


def run_name(run: Run) -> str:
    """Name the row of a run with all that tells it from others: variant, batch, policy, sizes."""
    chosen = run.configuration
    name = (f"{chosen['table']} {title(chosen['scheme'])} {run.ranks} ranks, {chosen['preset']}"
            f"{recorded_variant(chosen).label}")
    if like := row_of(run)[1]:
        name += f", batch of {title(like)}"
    if (again := policy_of(run)) != "none":
        name += f", recompute {again}"
    if chosen["overridden"]:
        name += ", with " + " ".join(f"{word} {chosen.get(word)}"
                                     for word in chosen["overridden"].split())
    return name


def verified_by(run: Run) -> str:
    """Return how the measured model was verified, or that a smaller one was verified instead."""
    chosen = run.configuration
    whole = bool(chosen["verified_measured_model"])
    return str(chosen.get("verified_by", "serial model" if whole else "a smaller model"))


def compare_repetitions(slow: Run, fast: Run) -> str:
    """Test whether the steps of two runs differ, by rank sums; not where ranks outnumber cores."""
    if any(map(is_crowded, (slow, fast))):
        return "not tested"
    p = rank_sum_p(*(run.steps / run.batch for run in (slow, fast)))
    return f"{'yes' if p < SIGNIFICANT else 'no'}, p = {p:.2g}"


def certainty_notes(runs: Sequence[Run]) -> list[str]:
    """Explain the intervals, the limits that ended the repetitions, and the clock's resolution."""
    text = ["Intervals hold the true median with at least 95 % (order statistics; + marks those "
            "of fewer than six repetitions, which have less), where repetitions are independent; "
            "'differs' is the two-sided rank-sum test of the steps' times at 5 %, of each pair by "
            "itself, where no ranks outnumber cores: p is not corrected for the number of tests. "
            "The repetitions of a row are from one run: what changes from run to run, such as "
            "placement, clocks and neighbours, is in no interval of theirs and no p."]
    ended = {reason: sum(run.ended_by == reason for run in runs) for reason in END_REASONS}
    widths = " or ".join(sorted({f"{100 * float(run.configuration.get('width', np.nan)):g} %"
                                 for run in runs}))
    counts = ", ".join(f"{END_REASONS[reason]} in {count}"
                       for reason, count in ended.items() if count)
    reached = sorted(max(median_interval(model_run.slowest(run.times[phase])).width
                         for phase in PHASES) for run in runs)
    least, median, most = (f"{100 * float(width):.2g}" for width in (
        reached[0], np.median(reached), reached[-1]))
    spread = f"{least} to {most} % wide, {median} % in the median" * (len(runs) > 1)
    text.append(f"Asked for: a width of {widths} of the median. What ended the repetitions, of "
                f"{counted(len(runs), 'row')}: {counts}. Reached: the wider interval of a row is "
                f"{spread or f'{most} % wide'}.")
    late = np.concatenate([found.max(axis=1) for run in runs for found in run.late.values()])
    text.append(f"Clock: resolution {max(run.clock['resolution'] for run in runs):.2g} s, "
                f"error between nodes {max(run.clock['offset_error'] for run in runs):.2g} "
                f"s. After the barrier the last rank began {np.median(late):.2g} s (median; "
                f"at most {late.max():.2g} s) after the first.")
    orders = sorted({run.configuration["order"] for run in runs})
    text.append(f"Order: one number of ranks after another, at random, and the rows of each "
                f"at random, seed {', '.join(map(str, orders))}.")
    return text


MIN_RUNS = 3    # least pairs of runs for a confidence interval
SEVERAL_RUNS = (
    "Speed-ups of several runs of both rows (repeat the command with the same --out) are "
    "geometric means of the quotients of their runs, the latest with the latest, and so on back, "
    "as far as settings, commit, machine and libraries are those of the latest. From three runs "
    "on low and high are the bounds of the 95 % interval of that mean, by Student's t on the "
    "logarithms of the quotients; of two runs they are the two quotients.")


@dataclass(frozen=True)
class SpeedUp:
    """The quotient of the times of two rows over several runs of both."""

    # The geometric mean of the quotients of the pairs of runs, and its bounds.
    ratio: float
    low: float
    high: float
    runs: int


def speed_up(slow: Sequence[float], fast: Sequence[float]) -> SpeedUp:
    """Compute how many times as fast one row is as another, over pairs of runs.

    Both sides are seconds of runs, oldest first.  The latest of both are a pair, the runs before
    them another, and so on: changes from hour to hour affect both of a pair alike.

    From `MIN_RUNS` pairs on it has the 95 % interval by Student's t, where the logarithms of the
    quotients are normal and independent; of fewer the least and the greatest one.

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
    """List the runs of a row with all but the effort of its latest, which comes last."""
    runs = results.history.get((row.key, row.like), [])
    return [run for run in runs if _identity(run) == _identity(runs[-1])]


def _identity(run: Run) -> tuple:
    settings = {name: value for name, value in run.configuration.items()
                if name not in EFFORT and name != "command" and not name.startswith("clock_")}
    return (sorted((name, str(value)) for name, value in settings.items()),
            [str(run.environment.get(name)) for name in SAME])


def speed_up_table(heading: str, name: str, results: Results) -> Table:
    """Make the table of speed-ups at equal ranks, published and measured; see `speed_up_line`."""
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
        cells += [other.batch, cube.batch, _cell(other.average / cube.average),
                  _cell(other.recomputed / cube.recomputed)]
    runs = [results.get(row) for row in (other, cube)]
    if None in runs:
        return [*cells, *[""] * 4, number_cell(math.nan, missing="missing"), *[""] * 4]
    batches = [run.batch for run in runs]
    tokens = [run.batch * run.configuration["seq"] for run in runs]
    found = speed_up(*([run.average for run in repeated_runs(results, row)]
                       for row in (other, cube)))
    bounds = [_cell(found.low), _cell(found.high)] if found.runs > 1 else ["", ""]
    return [*cells, *batches, *tokens, _cell(found.ratio), *bounds, found.runs,
            compare_repetitions(*runs)]


def speed_up_notes(results: Results) -> list[str]:
    """Explain speed-ups over several runs, and between different batches."""
    cubes = select_rows(schemes=PROPOSED)
    several = any(len(repeated_runs(results, cube)) > 1 for cube in cubes)
    said = [SEVERAL_RUNS] * several
    unequal = any(results.get(cube) and results.get(row)
                  and results.get(cube).batch != results.get(row).batch
                  for cube in cubes for row in select_rows(cube.table)
                  if row.gpus == cube.gpus)
    if not unequal:
        return said
    text = ("Speed-ups are ratios of seconds a sequence. Where the batches of both sides differ, "
            "what a larger batch gains is in them, in the published ones as well.")
    more = "" if results.equal else " --equal-tokens measures both at equal batches."
    return [*said, text + more]


def _cell(ratio: float) -> Number:
    return Number(ratio, f"{ratio:.2f}x")
