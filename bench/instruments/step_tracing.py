"""Trace repetitions of a step: where its time goes, on every rank.

Traced repetitions follow those whose times are reported.
"""

from typing import Sequence

import numpy as np

from bench.instruments import timing
from bench.instruments.clock import Clock
from bench.instruments.spans import Recorder, Span, breakdown, part_names
from bench.records.measurements import Group, Variable
from bench.records.model_run import directions_of
from mm3d.tracing.events import PHASES
from mm3d.tracing.observe import observed


def trace_steps(step: timing.Step, model, repetitions: int) -> tuple[list[Span], Group | None]:
    """Repeat a `step` of `model`, perhaps 0 times, and record its spans.

    Returns this rank's spans in the last repetition, on the step's clock, and the group ``parts``
    of a run on rank 0, None on the other ranks and without repetitions.
    """
    if not repetitions:
        return [], None
    grid = model.grid
    recorder, names = Recorder(grid.backend, step.clock.now), part_names(directions_of(grid.shape))
    seconds = np.empty((repetitions, len(PHASES), len(names)))
    with observed(grid, recorder, model):
        for repetition in range(repetitions):
            recorder.spans.clear()
            times = step()
            for p, phase in enumerate(PHASES):
                found = breakdown(spans_of_phase(recorder.spans, phase),
                                  times[p, 1] - times[p, 0], names)
                seconds[repetition, p] = list(found.values())
    counts = np.array([_tally_parts(spans_of_phase(recorder.spans, phase), names)
                       for phase in PHASES])
    everyone = step.comm.gather((seconds, counts))
    return recorder.spans, everyone and parts_group(*map(np.array, zip(*everyone)), names)


def trace_product(problem, phases: Sequence[str], clock: Clock) -> list[Span]:
    """Record this rank's spans in one call of each phase of a `products.problem.Problem`."""
    grid = problem.grid
    recorder = Recorder(grid.backend, clock.now)
    with observed(grid, recorder, problem):
        for phase in phases:
            grid.comm.Barrier()
            getattr(problem, phase)()
    return recorder.spans


def spans_of_phase(spans: list[Span], phase: str) -> list[Span]:
    """Return the spans of one phase."""
    return [span for span in spans if span.phase == phase]


def _tally_parts(spans: list[Span], names: Sequence[str]) -> list[list[int]]:
    """Count calls, bytes and operations of each part in `names` (`spans.part_names`)."""
    found = {part: [0, 0, 0] for part in names}
    for span in spans:
        for index, count in enumerate((1, span.bytes, span.flops)):
            found[span.part][index] += count
    return list(found.values())


def parts_group(seconds: np.ndarray, counts: np.ndarray, names: Sequence[str]) -> Group:
    """Make the group ``parts`` from seconds, (ranks, repetitions, phases, parts), and counts.

    These are of calls, bytes and operations, (ranks, phases, parts, 3).
    """
    ranks, repetitions = seconds.shape[:2]
    scales = {"repetition": range(repetitions), "phase": PHASES, "rank": range(ranks),
              "part": names}
    dims = ("phase", "rank", "part")
    calls, moved, flops = counts.transpose(3, 1, 0, 2).astype(np.int64)
    return Group(scales, {
        "seconds": Variable(seconds.transpose(1, 2, 0, 3), "s", ("repetition", *dims)),
        "calls": Variable(calls, "1", dims), "bytes": Variable(moved, "byte", dims),
        "flops": Variable(flops, "1", dims)})
