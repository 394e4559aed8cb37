"""Derive the bubble, and the clock's beside it, from the times of the actions of a pipeline.

The ranks of a stage begin and end an action nearly together: its times are the means of theirs.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from bench.records.kinds import BOUND, medians
from bench.records.measurements import Measurements, Variable
from bench.records.texts import named
from bench.statistics import elapsed
from mm3d.training.schedules import Schedule, Times, check, clock, parse_schedule
from mm3d.training.schedules.clock import Timeline


def derive(record: Measurements) -> dict[str, Variable]:
    """Return seconds and bubble of a step, those of the clock, and those of a reference."""
    schedule = parse_schedule(str(record.configuration["schedule_text"]))
    raw = {name: variable.values for name, variable in record.raw.items()}
    times = raw["times"]
    steps, hop = durations(times, schedule), float(np.median(raw["hop_samples"]))
    timeline = clock_timeline(schedule, steps, hop)
    found = {"seconds": Variable(medians(step_seconds(times)), "s", BOUND),
             "bubble": Variable(medians(bubble_rates(times, schedule)), "1", BOUND),
             "durations": Variable(steps, "s", ("step", "stage")),
             "hop": Variable(np.array(hop), "s", ()),
             "clock_seconds": Variable(np.array(float(timeline.makespan)), "s", ()),
             "clock_bubble": Variable(np.array(float(timeline.bubble_rate)), "1", ())}
    if "reference_times" in raw:
        sides = [times, raw["reference_times"]]
        own, reference = map(step_seconds, sides)
        found |= {"reference_seconds": Variable(medians(reference), "s", BOUND),
                  "ratio": Variable(medians(reference / own), "1", BOUND)}
        if "slept" in raw:
            found["overhead"] = Variable(np.array([
                medians(overheads(*side, schedule)) for side in zip(sides, raw["slept"])]),
                "s", ("side", *BOUND))
    return found


def check_texts(run: Measurements) -> None:
    """Check that the schedule can be kept, and has the ranks, actions and stages measured.

    Raises
    ------
    ValueError
        When it cannot, or has others.
    """
    schedule = named("configuration/schedule_text", parse_schedule,
                     str(run.configuration["schedule_text"]))
    named("configuration/schedule_text", check, schedule)
    _, ranks, actions, _ = np.shape(run.raw["times"].values)
    if (ranks % schedule.ranks or actions != max(map(len, schedule.rows))
            or len(run.scales["stage"]) != schedule.stage_count):
        raise ValueError(f"configuration/schedule_text has {schedule.ranks} ranks, "
                         f"{schedule.stage_count} stages and at most "
                         f"{max(map(len, schedule.rows))} actions a rank: not those of the "
                         f"{ranks} ranks, {len(run.scales['stage'])} stages and {actions} actions "
                         f"that were measured")
    chosen = run.configuration
    if chosen["reference"] != "none" and chosen["work"] == "wait" and "slept" not in run.raw:
        raise ValueError("measurements/slept is missing, of waits beside a reference")


def stage_times(times: np.ndarray, stages: int) -> np.ndarray:
    """Return (repetition, stage, action, edge) from (repetition, rank, action, edge)."""
    return times.reshape(len(times), stages, -1, *times.shape[2:]).mean(axis=2)


def bubble_rates(times: np.ndarray, schedule: Schedule) -> np.ndarray:
    """Compute the bubble of each repetition, as a share of the cost.

    As of a timeline: the cost is the longest time of a stage from its own first begin to its own
    last end, and the bubble is what of it is not the mean time in actions.

    Parameters
    ----------
    times : ndarray
        Seconds, (repetition, rank, action, begin and end); NaN beyond the actions of a rank.
    schedule : Schedule
        What was executed.
    """
    found = stage_times(times, schedule.ranks)
    cost = (np.nanmax(found[..., 1], axis=2) - np.nanmin(found[..., 0], axis=2)).max(axis=1)
    work = np.nansum(found[..., 1] - found[..., 0], axis=2).mean(axis=1)
    return 1 - work / cost


def step_seconds(times: np.ndarray) -> np.ndarray:
    """Compute the makespan of each repetition, from the first begin to the last end of all."""
    return elapsed(times.reshape(len(times), -1, 2))


def durations(times: np.ndarray, schedule: Schedule) -> np.ndarray:
    """Return the median seconds of F, B and W in each stage of the schedule, (step, stage).

    Where B and W are only taken together, that time is B's, and W's is 0.
    """
    found = stage_times(times, schedule.ranks)
    took: dict[tuple[str, int], list[np.ndarray]] = {}
    for rank, row in enumerate(schedule.rows):
        for index, action in enumerate(row):
            key = action.kind, schedule.stage_of(rank, action.chunk)
            took.setdefault(key, []).append(found[:, rank, index, 1] - found[:, rank, index, 0])
    median = {key: float(np.median(values)) for key, values in took.items()}
    both = np.zeros((3, schedule.stage_count))
    for stage in range(schedule.stage_count):
        together = median.get(("BW", stage), 0.0)
        both[:, stage] = (median["F", stage], median.get(("B", stage), together),
                          median.get(("W", stage), 0.0))
    return both


def clock_timeline(schedule: Schedule, steps: np.ndarray, hop: float) -> Timeline:
    """Return the clock's timeline for `durations` and a time of a hop, in seconds."""
    return clock(schedule, Times.by_stage(*(map(float, row) for row in steps), hop=float(hop)))


def overheads(times: np.ndarray, slept: np.ndarray, schedule: Schedule) -> np.ndarray:
    """Compute by how much each repetition of waits exceeds the clock, for each action.

    It is the makespan less the clock's, without hops and with the times that the waits really
    took, over the number of actions that the clock's last end waits for.

    Parameters
    ----------
    times : ndarray
        As of `bubble_rates`.
    slept : ndarray
        Mean seconds of F, B and W of a chunk, (repetition, rank, step).
    schedule : Schedule
        What was executed.
    """
    found = []
    by_rank = slept.reshape(len(slept), schedule.ranks, -1, slept.shape[-1]).mean(axis=2)
    for seconds, repetition in zip(step_seconds(times), by_rank):
        steps = np.zeros((slept.shape[-1], schedule.stage_count))
        for rank, stages in enumerate(schedule.stages):
            steps[:, list(stages)] = repetition[rank][:, np.newaxis]
        timeline = clock_timeline(schedule, steps, 0.0)
        found.append((seconds - float(timeline.makespan)) / len(timeline.critical_path()))
    return np.array(found)


@dataclass(frozen=True)
class MeasuredTimeline(Timeline):
    """Hold when actions began and ended in a run; what takes time is what was measured."""

    @property
    def work(self) -> tuple[Fraction, ...]:
        """Return the time of each rank in actions, as measured."""
        return tuple(sum((end - start for start, end in zip(starts, ends)), Fraction(0))
                     for starts, ends in zip(self.starts, self.ends))


def measured_timeline(schedule: Schedule, times: np.ndarray, like: Timeline) -> MeasuredTimeline:
    """Return the repetition with the median bubble as a timeline, in seconds.

    Parameters
    ----------
    schedule, times
        As of `bubble_rates`.
    like : Timeline
        The clock's, whose times of the steps it keeps.
    """
    rates = bubble_rates(times, schedule)
    middle = int(np.argsort(rates)[len(rates) // 2])
    found = stage_times(times, schedule.ranks)[middle]
    found = found - np.nanmin(found)
    starts, ends = (tuple(tuple(Fraction(float(found[rank, index, edge]))
                                for index in range(len(row)))
                          for rank, row in enumerate(schedule.rows)) for edge in (0, 1))
    causes = tuple((None,) * len(row) for row in schedule.rows)
    return MeasuredTimeline(schedule, like.times, starts, ends, causes)
