"""Take samples of repeated calls, and describe the machine that they were taken on."""

import math
import sys
from typing import Callable, Sequence

import numpy as np
from mpi4py import MPI

from bench.instruments import host, timing
from bench.instruments.clock import Clock, time_on_all_ranks
from bench.records.measurements import Setting
from bench.statistics import median_interval
from mm3d.transport.nodes import node_numbers

BOUNDS = ("median", "low", "high", "confidence")
# A sample has as many calls as take SAMPLE seconds, unless told otherwise, but at most CALLS.
SAMPLE = 2e-3
CALLS = 1000


def measured_environment(backend: str, comm) -> dict[str, Setting]:
    """Describe the machine and the job, with the greatest clock errors of all ranks."""
    clock = comm.allreduce(Clock.resolution(), MPI.MAX)
    error = comm.allreduce(Clock(comm).offset_error, MPI.MAX)
    nodes = " ".join(map(str, node_numbers(comm)))
    return host.describe_host(backend, comm.size, MPI.Get_library_version(),
                              host.command_line(sys.argv[1:])) | {
        "node_of_rank": nodes, "clock_resolution_s": clock, "clock_offset_error_s": error}


def take_samples(sample: Callable[[], float], limits: timing.Limits,
                 comm) -> tuple[list[float], str]:
    """Take samples until the limits are reached; return them and the limit that ended them."""
    found, ended_by = take_samples_in_turns([sample], limits, 0, comm)
    return [*found[0]], ended_by


def take_samples_in_turns(samples: Sequence[Callable[[], float]], limits: timing.Limits, seed: int,
                          comm) -> tuple[np.ndarray, str]:
    """Take one sample of each in every round, in random order, until the limits are reached.

    Every rank calls this.  The rounds end when the intervals of all are narrow enough.

    Returns
    -------
    samples : ndarray
        The samples, (functions, rounds).
    ended_by : str
        The limit that ended the rounds.
    """
    found: list[np.ndarray] = []
    order = np.random.default_rng(seed)
    repetitions = timing.Repetitions(
        limits, comm, lambda: [median_interval(column) for column in np.transpose(found)])
    for _ in repetitions:
        row = np.empty(len(samples))
        for index in order.permutation(len(samples)):
            row[index] = samples[index]()
        found.append(row)
    return np.transpose(found).copy(), repetitions.ended_by


def repeat_calls(step: Callable[[], object], calls: int) -> Callable[[], None]:
    """Return a function that calls `step` as many times as `calls` says."""
    def repeat() -> None:
        for _ in range(calls):
            step()
    return repeat


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
              clock: Clock, least: float = SAMPLE, calls: int | None = None
              ) -> Callable[[], float]:
    """Return a function that takes a sample of `step` on all ranks at once: the makespan of many
    calls over their number; the same on every rank.  There are as many `calls` as given, or as
    take `least` seconds."""
    def span(calls: int) -> float:
        times, _ = time_on_all_ranks(repeat_calls(step, calls), comm, synchronize, clock)
        return float(times.max())

    many = calls or calls_needed(span, least)
    return lambda: span(many) / many


def pad_samples(samples: Sequence[Sequence[float]], shape: tuple[int, ...]) -> np.ndarray:
    """Join samples of points, in row-major order, in one array padded with NaN."""
    most = max(map(len, samples))
    rows = [[*found, *[math.nan] * (most - len(found))] for found in samples]
    return np.array(rows).reshape(*shape, most)


def measure_in_random_order(points: list, seed: int, measure: Callable,
                            progress: Callable[[str], None] = lambda line: None) -> list:
    """Measure the points in random order, and return the results in the given order.

    After each tenth of them `progress` is given a line.
    """
    found = [None] * len(points)
    for done, index in enumerate(np.random.default_rng(seed).permutation(len(points)), start=1):
        found[index] = measure(*points[index])
        if done % max(1, len(points) // 10) == 0:
            progress(f"measured {done} of {len(points)}")
    return found
