"""Read the timelines of a measured pipeline from its record, for a picture."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from bench.records.kinds.pipeline import bubble_rates, clock_timeline, stage_times
from bench.records.measurements import Measurements
from bench.records.notes import describe_cluster
from bench.reports.figures import schedules
from mm3d.training.schedules import Schedule, parse_schedule
from mm3d.training.schedules.clock import Timeline


def timelines(record: Measurements) -> dict[str, Timeline]:
    """Return the measured timeline and the clock's, in seconds, by the title of a picture."""
    chosen = record.configuration
    schedule = parse_schedule(str(chosen["schedule_text"]))
    clocked = clock_timeline(schedule, record.values("durations"), float(record.values("hop")))
    title = f"{chosen['schedule']}, {chosen['microbatches']} micro-batches"
    about = [*["WAITS stand in for layers"] * (chosen["work"] == "wait"),
             *filter(None, [describe_cluster(record.environment)])]
    if record.environment["oversubscribed"] and chosen["work"] != "wait":
        about.append(f"{record.environment['ranks']} RANKS TAKE TURNS on "
                     f"{record.environment['cores']} cores")
    work = f" ({'; '.join(about)})" if about else ""
    measured = measured_timeline(schedule, record.values("times"), clocked)
    return {f"{title}, measured in one repetition{work}": measured,
            f"{title}, the clock's with measured F, B, W and hop{work}": clocked}


def draw(record: Measurements):
    """Draw the measured timeline above the clock's."""
    return schedules.draw_timelines(timelines(record), "s", "group of ranks")


@dataclass(frozen=True)
class MeasuredTimeline(Timeline):
    """A timeline of a run, with the measured begins and ends of actions."""

    @property
    def work(self) -> tuple[Fraction, ...]:
        """Return the time of each rank in actions, as measured."""
        return tuple(sum((end - start for start, end in zip(starts, ends)), Fraction(0))
                     for starts, ends in zip(self.starts, self.ends))


def measured_timeline(schedule: Schedule, times: np.ndarray, like: Timeline) -> MeasuredTimeline:
    """Return the repetition with the median bubble, with the clock's, `like`, times of steps."""
    rates = bubble_rates(times, schedule)
    middle = int(np.argsort(rates)[len(rates) // 2])
    found = stage_times(times, schedule.ranks)[middle]
    found = found - np.nanmin(found)
    starts, ends = (tuple(tuple(Fraction(float(found[rank, index, edge]))
                                for index in range(len(row)))
                          for rank, row in enumerate(schedule.rows)) for edge in (0, 1))
    causes = tuple((None,) * len(row) for row in schedule.rows)
    return MeasuredTimeline(schedule, like.times, starts, ends, causes)
