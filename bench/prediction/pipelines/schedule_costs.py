"""Time pipeline schedules whose ranks have equal layers, by name or from a file."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Sequence

from bench.errors import UsageError, as_usage_error
from bench.text_files import read_text
from mm3d.training.schedules import Schedule, Times, build, check, parse_schedule, time_actions
from mm3d.training.schedules.builders import check_size
from mm3d.training.schedules.clock import Timeline, peak_in_flight


@dataclass(frozen=True)
class ComparedPipeline:
    """The pipeline for which schedules are compared.

    Its times are F, B and W of all layers of a rank, for one micro-batch; each chunk has an equal
    part.  The memory is the limit of `auto`, in activations of one micro-batch in all layers of a
    rank, None for as many as there are ranks; W still needs a share of them after B, `kept`.
    """

    ranks: int
    microbatches: int
    times: Sequence[Fraction] = (Fraction(1),) * 3
    hop: Fraction = Fraction(0)
    memory: Fraction | None = None
    kept: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        with as_usage_error():
            check_size(self.ranks, self.microbatches)

    def stage_times(self, stages: int) -> Times:
        """Return the times of each of `stages` stages."""
        share = Fraction(self.ranks, stages)
        return Times.equal(stages, *(time * share for time in self.times), hop=self.hop)


def timed(name: str, pipeline: ComparedPipeline) -> Timeline:
    """Build, check and time a schedule; UsageError if unknown, or not for such a pipeline."""
    with as_usage_error():
        schedule = build(name, pipeline.ranks, pipeline.microbatches, kept=pipeline.kept,
                         times=pipeline.stage_times(pipeline.ranks), memory=pipeline.memory)
    return timed_schedule(schedule, pipeline)


def timed_schedule(schedule: Schedule, pipeline: ComparedPipeline) -> Timeline:
    """Check a schedule and time it; ScheduleError when it breaks a rule."""
    check(schedule)
    return time_actions(schedule, pipeline.stage_times(schedule.stage_count))


def read_schedule(path: str | Path) -> Schedule:
    """Read and check the schedule in a file; UsageError with the rule, the rank and the action."""
    text = read_text(path, str(path), "a schedule as python -m bench draw schedule --schedule "
                                      "1f1b --stages 4 --microbatches 8 prints it")
    try:
        schedule = parse_schedule(text)
        check(schedule)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    return schedule


def over_memory(timeline: Timeline, pipeline: ComparedPipeline) -> str:
    """Return a warning where a schedule holds more than the given memory; otherwise ""."""
    if pipeline.memory is None:
        return ""
    schedule = timeline.schedule
    held = max(peak_in_flight(schedule, pipeline.kept)) / schedule.chunks
    return "" if held <= pipeline.memory else (
        f"holds the activations of {float(held):.4g} micro-batches, more than "
        f"{float(pipeline.memory):.4g}")
