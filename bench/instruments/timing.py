"""Timing: seconds of forward and backward, on every rank, for every repetition."""

from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Callable, Iterator

import numpy as np

from bench.instruments.clock import Clock, _timed
from bench.instruments.statistics import Interval, median_interval
from mm3d.tracing.events import PHASES


@dataclass(frozen=True)
class Limits:
    """When to stop repeating.

    Attributes
    ----------
    repetitions, max_repetitions : int
        The least and the greatest number of repetitions that count.
    max_seconds : float
        After the least number no repetition begins when so many seconds have passed since the
        first that counts.
    width : float
        Enough is known when the 95 % confidence intervals of the medians are no wider than this
        fraction of the median.

    Raises
    ------
    ValueError
        When a limit cannot be meant.
    """

    repetitions: int
    max_repetitions: int
    max_seconds: float = np.inf
    width: float = 0.05

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise ValueError(f"repetitions {self.repetitions}: must be at least 1")
        if self.max_repetitions < self.repetitions:
            raise ValueError(f"at most {self.max_repetitions} repetitions: must be at least the "
                             f"{self.repetitions} that are asked for")
        if not self.width > 0 or not self.max_seconds > 0:
            raise ValueError(f"width {self.width:g} and {self.max_seconds:g} seconds: both must "
                             f"be greater than 0")

    def reached(self, done: int, seconds: float,
                intervals: Callable[[], list[Interval]]) -> str:
        """What ends the repetitions after `done` of them: "width", "repetitions", "seconds", or
        "" when more are due."""
        if done < self.repetitions:
            return ""
        if all(interval.within(self.width) for interval in intervals()):
            return "width"
        if done >= self.max_repetitions:
            return "repetitions"
        return "seconds" if seconds >= self.max_seconds else ""


class Repetitions:
    """Repetitions until limits are reached: iterate, and do one in each turn.

    Every rank iterates.  Rank 0 decides after each repetition whether another follows, and tells
    the others, so that all end after the same one.

    Parameters
    ----------
    limits : Limits
        When to stop.
    comm : mpi4py.MPI.Intracomm
        The ranks.
    intervals : callable
        Computes the confidence intervals to which ``limits.width`` applies, from all repetitions
        that count; called on rank 0 alone.
    warmup : int, optional
        Repetitions before the first that counts.
    stop : callable, optional
        Asked on rank 0 after each repetition, those of the warm-up included; if it is true none
        follows.

    Attributes
    ----------
    ended_by : str
        The limit that ended them, as `Limits.reached` names it; "stopped" where `stop` did; ""
        before.

    Examples
    --------
    >>> found = []
    >>> repetitions = Repetitions(limits, comm, lambda: [median_interval(found)], warmup=1)
    >>> for counts in repetitions:
    ...     seconds = sample()
    ...     if counts:
    ...         found.append(seconds)
    """

    def __init__(self, limits: Limits, comm, intervals: Callable[[], list[Interval]],
                 warmup: int = 0, stop: Callable[[], bool] = lambda: False) -> None:
        self.limits, self.comm, self.intervals = limits, comm, intervals
        self.warmup, self.stop, self.ended_by = warmup, stop, ""

    def __iter__(self) -> Iterator[bool]:
        """Begin the next repetition: whether it counts."""
        done, begun = -self.warmup, perf_counter()
        while not self.ended_by:
            if not done:
                begun = perf_counter()
            yield done >= 0
            done += 1
            reason = ""
            if self.comm.rank == 0:
                if done > 0:
                    reason = self.limits.reached(done, perf_counter() - begun, self.intervals)
                if not reason and self.stop():
                    reason = "stopped"
            self.ended_by = self.comm.bcast(reason)


@dataclass(frozen=True)
class Measured:
    """What `measure` found, on rank 0.

    Attributes
    ----------
    samples : dict of str to ndarray
        "forward" and "backward": seconds, (repetitions, ranks), float64.
    late : dict of str to ndarray
        For the same phases, repetitions and ranks: seconds by which the rank began after the
        first of them, the skew that the barrier leaves.
    ended_by : str
        "width", "repetitions" or "seconds": which of `Limits` ended it; "stopped" when it was
        told to stop.
    clock_resolution, clock_offset_error : float
        Of the worst rank, seconds.
    """

    samples: dict[str, np.ndarray]
    late: dict[str, np.ndarray]
    ended_by: str
    clock_resolution: float
    clock_offset_error: float


class Step:
    """A repetition that is timed: forward, then backward.

    Before each of the two all ranks meet at a barrier and the device is idle; a phase ends when
    the device is idle again.  `prepare` and the barriers are not timed.

    Parameters
    ----------
    forward : callable
        One forward pass; what it returns is handed to `backward`.
    backward : callable
        One backward pass.
    comm : mpi4py.MPI.Intracomm
        The ranks that take part; every one of them must make it.
    synchronize : callable
        Waits until the device has finished.
    prepare : callable, optional
        Called before each repetition, such as to clear gradients.

    Attributes
    ----------
    clock : Clock
        What it is timed with.
    """

    def __init__(self, forward: Callable[[], Any], backward: Callable[[Any], Any], comm,
                 synchronize: Callable[[], None],
                 prepare: Callable[[], None] = lambda: None) -> None:
        self.forward, self.backward, self.comm = forward, backward, comm
        self.synchronize, self.prepare, self.clock = synchronize, prepare, Clock(comm)

    def __call__(self) -> np.ndarray:
        """Do it: when each phase began and ended on this rank, (phases, 2), in seconds."""
        self.prepare()
        times = np.empty((2, 2))
        times[0], saved = _timed(self.forward, self.comm, self.synchronize, self.clock)
        # Nothing of one repetition stays in memory in the next.
        times[1], _ = _timed(partial(self.backward, saved), self.comm, self.synchronize,
                             self.clock)
        return times


def measure(step: Step, warmup: int, limits: Limits,
            stop: Callable[[], bool] = lambda: False) -> Measured | None:
    """Repeat `step` until the medians are known well enough; rank 0 decides, off the clock.

    Parameters
    ----------
    step : Step
        What is repeated.
    warmup : int
        Repetitions before the first that counts.
    limits : Limits
        When to stop.
    stop : callable, optional
        Asked on rank 0 after each repetition; when it says so none follows, be there as few as
        there are, or none that counts.

    Returns
    -------
    Measured or None
        On rank 0; None on the other ranks.

    Raises
    ------
    ValueError
        When `warmup` is less than 0.
    """
    if warmup < 0:
        raise ValueError(f"warm-up {warmup}: must not be negative")
    comm, clock = step.comm, step.clock
    errors = np.array(comm.allgather((clock.resolution(), clock.offset_error))).max(axis=0)
    kept: list[np.ndarray] = []
    repetitions = Repetitions(limits, comm, lambda: [
        median_interval(slowest(samples)) for samples in _samples(kept)], warmup, stop)
    for counts in repetitions:
        everyone = np.empty((comm.size, 2, 2)) if comm.rank == 0 else None
        comm.Gather(step(), everyone)
        if everyone is not None and counts:
            kept.append(everyone)
    return None if comm.rank else _measured(kept, comm.size, repetitions.ended_by, errors)


def _measured(kept: list[np.ndarray], ranks: int, ended_by: str, errors: np.ndarray) -> Measured:
    """Durations and lateness of the repetitions that count."""
    times = np.array(kept).reshape(-1, ranks, 2, 2)
    starts = times[..., 0].transpose(2, 0, 1)
    late = starts - starts.min(axis=2, keepdims=True)
    return Measured(dict(zip(PHASES, _samples(times))), dict(zip(PHASES, late)), ended_by,
                    *map(float, errors))


def _samples(kept: list[np.ndarray] | np.ndarray) -> np.ndarray:
    """Seconds (phases, repetitions, ranks) of (ranks, phases, start and end) a repetition."""
    times = np.asarray(kept)
    return np.ascontiguousarray((times[..., 1] - times[..., 0]).transpose(2, 0, 1))


def slowest(samples: np.ndarray) -> np.ndarray:
    """Of samples (repetitions, ranks) the maximum over ranks: a step is done when all are."""
    return samples.max(axis=1)


def typical(samples: np.ndarray) -> float:
    """The median over repetitions of the maximum over ranks."""
    return median(slowest(samples).tolist())


def step_times(samples: dict[str, np.ndarray], batch: int) -> np.ndarray:
    """Seconds a sequence of every repetition: (forward + backward) / batch."""
    return (slowest(samples["forward"]) + slowest(samples["backward"])) / batch


def average_step_time(samples: dict[str, np.ndarray], batch: int) -> float:
    """Seconds a sequence: (forward + backward) / batch, the paper's equation 6, of medians."""
    return (typical(samples["forward"]) + typical(samples["backward"])) / batch
