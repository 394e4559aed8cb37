"""Measure the seconds of forward and backward, of every repetition on every rank."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Callable, ContextManager, Iterator

import numpy as np

from bench.instruments.clock import Clock, time_on_all_ranks, time_on_this_rank
from bench.records.model_run import slowest
from bench.statistics import Interval, median_interval
from mm3d.arrays import backend as backends
from mm3d.arrays.plain_numbers import said
from mm3d.tracing.events import PHASES


@dataclass(frozen=True)
class Limits:
    """Limits of the repetitions that count; ValueError when one is invalid.

    Once the least number is done, none begins later than `max_seconds` after the first.
    """

    repetitions: int = said("repeat at least this often", least=1)
    max_repetitions: int = said("repeat at most this often", least=1)
    max_seconds: float = said("begin no repetition beyond --repetitions after this time", np.inf,
                              above=True, letter="SECONDS")
    width: float = said("repeat until the 95 %% confidence intervals are no wider than this "
                        "fraction of the medians", 0.05, above=True, letter="FRACTION")

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise ValueError(f"repetitions {self.repetitions}: must be at least 1")
        if self.max_repetitions < self.repetitions:
            raise ValueError(f"at most {self.max_repetitions} repetition"
                             f"{'s' * (self.max_repetitions != 1)}: must be at least the "
                             f"{self.repetitions} that are asked for")
        if not self.width > 0 or not self.max_seconds > 0:
            raise ValueError(f"width {self.width:g} and {self.max_seconds:g} seconds: both must "
                             f"be greater than 0")

    def reached(self, done: int, seconds: float,
                intervals: Callable[[], list[Interval]]) -> str:
        """Return the limit reached: "width", "repetitions", "seconds"; "" if none is yet."""
        if done < self.repetitions:
            return ""
        if all(interval.within(self.width) for interval in intervals()):
            return "width"
        if done >= self.max_repetitions:
            return "repetitions"
        return "seconds" if seconds >= self.max_seconds else ""


class Repetitions:
    """Iterate over repetitions until limits are reached; the caller does one in each turn.

    Every rank iterates.  Rank 0 decides after each repetition whether another follows, and
    broadcasts it, so that all ranks end after the same one.

    Parameters
    ----------
    intervals : callable
        Computes the confidence intervals to which ``limits.width`` applies, from all repetitions
        that count; called on rank 0 alone.
    stop : callable, optional
        Called on rank 0 after each repetition, also of the warm-up; if it returns true, none
        follows, however few there were.

    Attributes
    ----------
    ended_by : str
        The limit that ended them, as `Limits.reached` names it; "stopped" where `stop` did; ""
        before the end.
    """

    def __init__(self, limits: Limits, comm, intervals: Callable[[], list[Interval]],
                 warmup: int = 0, stop: Callable[[], bool] = lambda: False,
                 now: Callable[[], float] = perf_counter) -> None:
        self.limits, self.comm, self.intervals, self.now = limits, comm, intervals, now
        self.warmup, self.stop, self.ended_by = warmup, stop, ""

    def __iter__(self) -> Iterator[bool]:
        """Yield for each repetition whether it counts."""
        done, begun = -self.warmup, self.now()
        while not self.ended_by:
            if not done:
                begun = self.now()
            yield done >= 0
            done += 1
            reason = ""
            if self.comm.rank == 0:
                if done > 0:
                    reason = self.limits.reached(done, self.now() - begun, self.intervals)
                if not reason and self.stop():
                    reason = "stopped"
            self.ended_by = self.comm.bcast(reason)


@dataclass(frozen=True)
class TimedSteps:
    """The samples that `measure` has taken, on rank 0; seconds.

    Attributes
    ----------
    samples, late : dict of str to ndarray
        By phase, (repetitions, ranks), float64: what each rank took, and by how much it began
        after the first one, the skew that the barrier leaves.
    ended_by : str
        See `Repetitions`.
    clock_resolution, clock_offset_error : float
        Of the worst rank.
    """

    samples: dict[str, np.ndarray]
    late: dict[str, np.ndarray]
    ended_by: str
    clock_resolution: float
    clock_offset_error: float


class Step:
    """One timed repetition: forward, then backward.

    Before each of the two all ranks meet at a barrier and the device is idle, for which
    `synchronize` waits; a phase ends when it is idle again.  The barriers, and `prepare`, which
    may clear gradients before each repetition, are not timed.
    """

    def __init__(self, forward: Callable[[], Any], backward: Callable[[Any], Any], comm,
                 synchronize: Callable[[], None],
                 prepare: Callable[[], None] = lambda: None) -> None:
        self.forward, self.backward, self.comm = forward, backward, comm
        self.synchronize, self.prepare, self.clock = synchronize, prepare, Clock(comm)

    def __call__(self) -> np.ndarray:
        """Do the step; return when each phase began and ended here, (phases, 2), in seconds."""
        self.prepare()
        times = np.empty((2, 2))
        times[0], saved = time_on_this_rank(self.forward, self.comm, self.synchronize, self.clock)
        # Nothing of one repetition stays in memory in the next.
        times[1], _ = time_on_this_rank(partial(self.backward, saved), self.comm,
                                        self.synchronize, self.clock)
        return times


def measure(step: Step, warmup: int, limits: Limits,
            stop: Callable[[], bool] = lambda: False) -> TimedSteps | None:
    """Repeat `step` until the limits are reached; rank 0 decides, outside of the timed phases."""
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


def time_phases(model: Any, x: Any, dy: Any, clock: Clock) -> list[float]:
    """Time forward and backward of one step; return their makespans, the same on every rank."""
    backends.get(model.grid.backend)    # in place of that of another model
    model.zero_gradients()
    comm, settle = model.grid.comm, model.grid.backend.synchronize
    forward, (_, saved) = time_on_all_ranks(partial(model.forward, x), comm, settle, clock)
    backward, _ = time_on_all_ranks(partial(model.backward, dy, saved), comm, settle, clock)
    return [float(forward.max()), float(backward.max())]


def _measured(kept: list[np.ndarray], ranks: int, ended_by: str, errors: np.ndarray) -> TimedSteps:
    """Compute durations and lateness of the repetitions that count."""
    times = np.array(kept).reshape(-1, ranks, 2, 2)
    starts = times[..., 0].transpose(2, 0, 1)
    late = starts - starts.min(axis=2, keepdims=True)
    return TimedSteps(dict(zip(PHASES, _samples(times))), dict(zip(PHASES, late)), ended_by,
                      *map(float, errors))


def _samples(kept: list[np.ndarray] | np.ndarray) -> np.ndarray:
    """Compute seconds (phases, repetitions, ranks) of times (ranks, phases, 2) a repetition."""
    times = np.asarray(kept)
    return np.ascontiguousarray((times[..., 1] - times[..., 0]).transpose(2, 0, 1))


def unwatched(grid: Any, model: Any = None) -> ContextManager:
    """Return a context in which no watchdog observes this rank."""
    return nullcontext()
