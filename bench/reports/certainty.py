"""Report how certain the figures of runs are: confidence intervals, tests, which run it was."""

from typing import Callable, Sequence

import numpy as np

from bench.cases.paper import Row, title
from bench.cases.variants import recorded_variant
from bench.document import Column, Number, Table, make_table, number_cell, spread
from bench.records import model_run
from bench.records.folder import is_crowded, policy_of, row_of
from bench.records.model_run import Run
from bench.records.notes import counted
from bench.statistics import CONFIDENCE, Interval, median_interval, rank_sum_p
from mm3d.tracing.events import PHASES

SIGNIFICANT = 0.05
END_REASONS = {"width": "the intervals are narrow enough",
               "repetitions": "the limit of repetitions", "seconds": "the limit of seconds",
               "stopped": "the end of the job"}


def certainty_table(heading: str, found: Sequence[tuple[Row, Run]]) -> Table:
    """Make the table of confidence intervals of forward and backward of each measured row.

    It also states the limit that ended the repetitions, and how the model was verified.
    """
    def bounds(phase: str) -> Callable[[tuple[Row, Run]], list[Number]]:
        return lambda one: interval_cells(median_interval(model_run.slowest(
            one[1].times[phase])))
    columns = [
        Column("scheme", of=lambda one: title(one[0].scheme)),
        Column("ranks", of=lambda one: one[0].gpus),
        Column("a core", of=lambda one: float(one[1].environment["ranks_per_core"]), form="g"),
        Column("n", of=lambda one: len(one[1].times["forward"])),
        *(column for phase in PHASES for column in spread(
            bounds(phase), "", phase, ("low", "high", "width"), ("(s)", "(s)"))),
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


def interval_cells(interval: Interval) -> list[Number]:
    """Make cells of both bounds and the width in per cent; "+" marks less than 95 % confidence."""
    few = "" if interval.confidence >= CONFIDENCE else "+"
    bounds = [number_cell(bound, "#.3g") for bound in interval[1:3]]
    return [*bounds, Number(interval.width, f"{100 * interval.width:.1f} %{few}")]


def compare_repetitions(slow: Run, fast: Run) -> str:
    """Test whether the steps of two runs differ, by the rank-sum test on their repetitions.

    Where ranks outnumber cores nothing is tested: repetitions then vary with the scheduling of
    ranks.
    """
    if any(map(is_crowded, (slow, fast))):
        return "not tested"
    p = rank_sum_p(*(model_run.step_times(run.times, run.configuration["batch"])
                   for run in (slow, fast)))
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
