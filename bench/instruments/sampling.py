"""Take samples of repeated calls, and describe the machine that they were taken on."""

import math
import sys
from dataclasses import dataclass, replace
from typing import Any, Callable, Hashable, Mapping, Sequence, TypeVar

import numpy as np
from mpi4py import MPI

from bench.agreement import broadcast_from_rank_0, make_on_rank_0
from bench.instruments import host, timing
from bench.instruments.clock import Clock, time_on_all_ranks
from bench.records.measurements import Setting, Variable
from bench.statistics import Interval, elapsed, median_interval
from mm3d.launcher import wait_patiently
from mm3d.transport.nodes import number_nodes

# A sample has as many calls as take SAMPLE seconds, unless told otherwise, but at most CALLS.
SAMPLE = 2e-3
CALLS = 1000
# Seconds that the threads of another process' BLAS may spin after their last product.
SETTLE = 0.05
Taken = TypeVar("Taken")


def measured_environment(backend: str, comm) -> dict[str, Setting]:
    """Describe the machine and the job, with the greatest clock errors of all ranks."""
    clock = comm.allreduce(Clock.resolution(), MPI.MAX)
    error = comm.allreduce(Clock(comm).offset_error, MPI.MAX)
    nodes = " ".join(map(str, number_nodes(comm)))
    return broadcast_from_rank_0(lambda: host.describe_host(
        backend, comm.size, MPI.Get_library_version(), host.command_line(sys.argv[1:])), comm) | {
        "node_of_rank": nodes, "clock_resolution_s": clock, "clock_offset_error_s": error}


def take_samples(sample: Callable[[], float], limits: timing.Limits,
                 comm) -> tuple[list[float], str]:
    """Take samples until the limits are reached; return them and the limit that ended them."""
    found, ended_by = take_samples_in_turns([sample], limits, 0, comm)
    return found[0], ended_by


def take_samples_in_turns(samples: Sequence[Callable[[], Taken]], limits: timing.Limits, seed: int,
                          comm, intervals: Callable[[list[list[Taken]]], list[Interval]]
                          = lambda found: [median_interval(each) for each in found],
                          warmup: int = 0, now: Callable[[], float] = timing.perf_counter
                          ) -> tuple[list[list[Taken]], str]:
    """Take one sample of each in every round, in random order, until the limits are reached.

    Every rank calls this; the first `warmup` rounds do not count.  `intervals`, by default those
    of the medians, are to be narrow.
    """
    found: list[list[Taken]] = [[] for _ in samples]
    order = np.random.default_rng(seed)
    repetitions = timing.Repetitions(limits, comm, lambda: intervals(found), warmup, now=now)
    for counts in repetitions:
        for index in order.permutation(len(samples)):
            one = samples[index]()
            if counts:
                found[index].append(one)
    return found, repetitions.ended_by


@dataclass(frozen=True)
class Sample:
    """One sample of a side of a comparison.

    Its times are seconds, (ranks, ..., begin and end); NaN without a part.
    """

    times: np.ndarray
    result: Any = None

    @property
    def seconds(self) -> float:
        """The last end minus the first begin."""
        return float(elapsed(self.times.reshape(-1, 2)))


def time_side(step: Callable[[], Any], comm, synchronize: Callable[[], None],
              clock: Clock) -> Sample:
    """Take a sample of a step of all ranks, when the other side is asleep."""
    wait_patiently(comm)
    return Sample(*time_on_all_ranks(step, comm, synchronize, clock))


def time_alone(measure: Callable[[], float], comm) -> Sample:
    """Take a sample on rank 0 by `measure`, in seconds, while the others sleep."""
    wait_patiently(comm)
    times = np.full((comm.size, 2), np.nan)
    seconds = make_on_rank_0(measure, comm, wait=wait_patiently)
    if comm.rank == 0:
        times[0] = 0, seconds
    return Sample(times)


def compare_in_turns(sides: Mapping[Hashable, Callable[[], Sample]], limits: timing.Limits,
                     seed: int, comm, warmup: int = 1,
                     ratios: Sequence[tuple[Hashable, Hashable]] = ()
                     ) -> tuple[dict[Hashable, list[Sample]], str]:
    """Take samples of several sides in turns, so that a slow machine slows all of them.

    The rounds end when the intervals of all ratios are narrow enough.

    Parameters
    ----------
    sides : mapping of callable
        Take a sample of each side, on all ranks.
    ratios : sequence of pairs
        Pairs of sides: the seconds of the first are divided by the second's.  By default each side
        is divided by the first one.  A side alone, or paired with itself, counts in seconds.

    Returns
    -------
    dict, str
        The samples of each side, by round; the limit that ended the rounds.
    """
    names = list(sides)
    pairs = list(ratios) or [(name, names[0]) for name in names[1:]] or [(names[0], names[0])]

    def intervals(found: list[list[Sample]]) -> list[Interval]:
        seconds = {name: np.array([one.seconds for one in each])
                   for name, each in zip(names, found)}
        return [median_interval(seconds[above] / (1 if above == below else seconds[below]))
                for above, below in pairs]
    found, ended_by = take_samples_in_turns(list(sides.values()), limits, seed, comm, intervals,
                                            warmup)
    return dict(zip(names, found)), ended_by


def repeat_calls(step: Callable[[], Any], calls: int) -> Callable[[], Any]:
    """Return a function that calls `step` `calls` times, and returns the last result alone."""
    def repeat() -> Any:
        result = None
        for _ in range(calls):
            del result
            result = step()
        return result
    return repeat


def makespan_of(step: Callable[[], object], comm, synchronize: Callable[[], None],
                clock: Clock) -> Callable[[int], float]:
    """Return a function that measures the seconds of a number of calls of all ranks at once."""
    def span(calls: int) -> float:
        times, _ = time_on_all_ranks(repeat_calls(step, calls), comm, synchronize, clock)
        return float(times.max())
    return span


def calls_needed(span: Callable[[int], float], least: float = SAMPLE) -> int:
    """Find how many calls take `least` seconds, at most `CALLS`.

    `span` measures the seconds of a number of calls.  The number is increased step by step, since
    the first calls may wait until all ranks have begun.
    """
    span(1)
    calls, took = 1, span(1)
    while took < least and calls < CALLS:
        calls = min(CALLS, max(2 * calls, math.ceil(0.9 * calls * least / took)))
        took = span(calls)
    return calls


def makespans(step: Callable[[], object], comm, synchronize: Callable[[], None],
              clock: Clock, least: float = SAMPLE) -> Callable[[], float]:
    """Return a function that takes a sample of `step` on all ranks at once.

    It returns the makespan of as many calls as take `least` seconds, over their number; the same
    on every rank.
    """
    span = makespan_of(step, comm, synchronize, clock)
    many = calls_needed(span, least)
    return lambda: span(many) / many


def makespans_in_turns(steps: Sequence[Callable[[], object]], limits: timing.Limits, seed: int,
                       comm, synchronize: Callable[[], None],
                       clock: Clock) -> tuple[list[list[float]], str]:
    """Take samples of steps in turns as `take_samples_in_turns`, each as `makespans` does.

    All rounds may take the seconds of `limits` times the number of steps.
    """
    samples = [makespans(step, comm, synchronize, clock) for step in steps]
    together = replace(limits, max_seconds=limits.max_seconds * len(steps))
    return take_samples_in_turns(samples, together, seed, comm, now=clock.now)


def pad_samples(samples: Sequence[Sequence[float]], shape: tuple[int, ...]) -> np.ndarray:
    """Join samples of points, in row-major order, in one array padded with NaN."""
    most = max(map(len, samples))
    rows = [[*found, *[math.nan] * (most - len(found))] for found in samples]
    return np.array(rows).reshape(*shape, most)


def samples_along(scales: dict[str, Sequence], found: Sequence[tuple[Sequence[float], str]]
                  ) -> tuple[dict[str, Sequence], dict[str, Variable]]:
    """Return scales and variables of a record of the samples of all points, in row-major order.

    Each point has the limit that ended its samples.
    """
    dims, shape = tuple(scales), tuple(map(len, scales.values()))
    samples = pad_samples([seconds for seconds, _ in found], shape)
    by_width = np.array([int(ended_by == "width") for _, ended_by in found]).reshape(shape)
    return ({**scales, "repetition": range(samples.shape[-1])},
            {"samples": Variable(samples, "s", (*dims, "repetition")),
             "ended_by_width": Variable(by_width, "1", dims)})


def measure_in_random_order(points: list, seed: int, measure: Callable,
                            progress: Callable[[str], None] = lambda line: None) -> list:
    """Measure points in random order; return results in theirs; tell progress by tenths."""
    found = [None] * len(points)
    for done, index in enumerate(np.random.default_rng(seed).permutation(len(points)), start=1):
        found[index] = measure(*points[index])
        if done % max(1, len(points) // 10) == 0:
            progress(f"measured {done} of {len(points)}")
    return found
