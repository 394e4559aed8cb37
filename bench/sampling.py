"""Take samples: how many calls make one, in which order, and what they were taken on."""

import math
import sys
from typing import Callable

import numpy as np
from mpi4py import MPI

from bench import machine, placement
from bench.output import say
from mm3d import store, timing
from mm3d.statistics import median_interval

BOUNDS = ("median", "low", "high", "confidence")
# A sample is as many calls as take at least so long, at most `CALLS` of them.
SAMPLE = 2e-3
CALLS = 1000


def measured_environment(backend: str, comm) -> dict[str, store.Setting]:
    """What the job runs on, with the clock of its worst rank."""
    clock = comm.allreduce(timing.Clock.resolution(), MPI.MAX)
    error = comm.allreduce(timing.Clock(comm).offset_error, MPI.MAX)
    nodes = " ".join(map(str, placement.numbers(comm)))
    return machine.describe(backend, comm.size, MPI.Get_library_version(),
                            machine.command_line(sys.argv[1:])) | {
        "node_of_rank": nodes, "clock_resolution_s": clock, "clock_offset_error_s": error}


def failed(name: str, why: str, comm) -> int:
    """Say that a measurement came to nothing; 1."""
    if comm.rank == 0:
        say(f"failed: {name}: {why}")
    return 1


def repeated(sample: Callable[[], float], limits: timing.Limits,
             comm) -> tuple[list[float], str]:
    """Samples until they are enough, and what ended them; rank 0 decides."""
    found: list[float] = []
    repetitions = timing.Repetitions(limits, comm, lambda: [median_interval(found)])
    for _ in repetitions:
        found.append(sample())
    return found, repetitions.ended_by


def several(step: Callable[[], object], calls: int) -> Callable[[], None]:
    """What calls `step` so many times."""
    def repeat() -> None:
        for _ in range(calls):
            step()
    return repeat


def enough(span: Callable[[int], float]) -> int:
    """How many calls take `SAMPLE` seconds, `span` being those of so many; `CALLS` at most.

    It is found with ever more calls, since the first of some may wait for all ranks to begin.
    """
    span(1)
    calls, took = 1, span(1)
    while took < SAMPLE and calls < CALLS:
        calls = min(CALLS, max(2 * calls, math.ceil(0.9 * calls * SAMPLE / took)))
        took = span(calls)
    return calls


def makespans(step: Callable[[], object], comm, synchronize: Callable[[], None],
              clock: timing.Clock) -> Callable[[], float]:
    """What measures the makespan of `step` on all ranks at once, of many in a row over their
    number; the same on every rank."""
    def span(calls: int) -> float:
        return float(timing.spans(several(step, calls), comm, synchronize, clock)[0].max())

    calls = enough(span)
    return lambda: span(calls) / calls


def padded(samples: list[list[float]], shape: tuple[int, ...]) -> np.ndarray:
    """Samples of points in row-major order as one array, NaN where a point has fewer."""
    most = max(map(len, samples))
    rows = [found + [math.nan] * (most - len(found)) for found in samples]
    return np.array(rows).reshape(*shape, most)


def in_random_order(points: list, seed: int, measure: Callable) -> list:
    """What `measure` gives for each point, in their order, measured in another."""
    found = [None] * len(points)
    for index in np.random.default_rng(seed).permutation(len(points)):
        found[index] = measure(*points[index])
    return found
