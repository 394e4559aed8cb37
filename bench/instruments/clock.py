"""Clocks that all ranks share, and makespans measured with them."""

import platform
from pathlib import Path
from time import perf_counter
from typing import Any, Callable

import numpy as np

ROUND_TRIPS = 100    # of messages by which an offset is measured


class Clock:
    """Rank 0's clock, read on every rank, in seconds; making one is collective.

    Ranks on one node share its monotonic clock; `kernel` is equal on ranks that share one, by
    default the kernel's identifier.  On other nodes the offset is measured once with messages to
    and from rank 0; the fastest round trip counts, and half of its time is the largest error.
    """

    def __init__(self, comm, kernel: Any = None,
                 read: Callable[[], float] = perf_counter) -> None:
        self.offset = self.offset_error = 0.0
        self._read = read
        kernels = comm.allgather(_kernel() if kernel is None else kernel)
        for rank in range(1, comm.size):
            if kernels[rank] != kernels[0] and comm.rank in (0, rank):
                self._synchronize(comm, rank)

    def now(self) -> float:
        """Return the time in seconds."""
        return self._read() + self.offset

    def _synchronize(self, comm, rank: int) -> None:
        best = np.inf
        for _ in range(ROUND_TRIPS):
            if comm.rank == 0:
                comm.recv(source=rank)
                comm.send(self._read(), dest=rank)
                continue
            sent = self._read()
            comm.send(None, dest=0)
            there = comm.recv(source=0)
            received = self._read()
            if received - sent < best:
                best = received - sent
                self.offset = there - (sent + received) / 2
                self.offset_error = best / 2

    @staticmethod
    def resolution() -> float:
        """Return the least nonzero difference of two readings of 1000, in seconds."""
        times = [perf_counter() for _ in range(1000)]
        steps = [b - a for a, b in zip(times, times[1:]) if b > a]
        return min(steps, default=np.inf)


def _kernel() -> str:
    """Return an identifier that is equal on ranks that share a clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def time_on_this_rank(step: Callable[[], Any], comm, synchronize: Callable[[], None],
                      clock: Clock) -> tuple[tuple[float, float], Any]:
    """Return when `step` began and ended on this rank, and its result."""
    synchronize()
    comm.Barrier()
    start = clock.now()
    result = step()
    synchronize()
    return (start, clock.now()), result


def time_on_all_ranks(step: Callable[[], Any], comm, synchronize: Callable[[], None],
                      clock: Clock) -> tuple[np.ndarray, Any]:
    """Return when `step` began and ended on each rank, and its result on this one.

    The times, (ranks, 2), are seconds from the first rank's start, the same on every rank; their
    greatest is the makespan.  Where ranks outnumber cores a rank may start when another has
    finished: the slowest rank's own time is then too short, the makespan is not.
    """
    mine, result = time_on_this_rank(step, comm, synchronize, clock)
    times = np.empty((comm.size, 2))
    comm.Allgather(np.array(mine), times)
    return times - times[:, 0].min(), result
