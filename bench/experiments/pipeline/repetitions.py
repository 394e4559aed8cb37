"""Repeat the step of a pipeline, and in turns with it that of PyTorch's own."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.experiments.pipeline.subject import ActionTimes
from bench.experiments.pipeline.torch_pipeline import RankStep, STEPS, TorchPipeline
from bench.experiments.products.matmul import SETTLE
from bench.instruments import timing
from bench.instruments.clock import Clock, time_on_all_ranks, wait_patiently
from bench.instruments.timing import Limits
from bench.records.kinds import pipeline as derived
from bench.statistics import Interval, median_interval

SIDES = ("mm3d", "PyTorch")
WARMUP = 1


@dataclass(frozen=True)
class Samples:
    """What all ranks did in the repetitions, of one side or of both.

    Attributes
    ----------
    times : ndarray
        Seconds, (side, repetition, rank, action, begin and end), of each repetition from its
        first begin; NaN beyond the actions of a rank.
    processor : ndarray
        Seconds of the processor that a rank has used, (side, repetition, rank).
    slept : ndarray
        Mean seconds of its waits, (side, repetition, rank, F, B and W); NaN with layers.
    ended_by : str
        The limit that was reached.
    """

    times: np.ndarray
    processor: np.ndarray
    slept: np.ndarray
    ended_by: str


class Sampler:
    """Take samples of a pipeline, and of PyTorch's.

    Parameters
    ----------
    subject : LayersSubject or WaitingSubject
        The pipeline.
    actions : ActionTimes
        Records its actions.
    clock : Clock
        The clock of all ranks.
    reference : TorchPipeline or None
        PyTorch's.
    """

    def __init__(self, subject: Any, actions: ActionTimes, clock: Clock,
                 reference: TorchPipeline | None) -> None:
        self.subject, self.actions, self.clock, self.reference = subject, actions, clock, reference
        self.most = max(map(len, subject.case.schedule.rows))
        self.processor = 0.0

    def sample(self, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Execute a step of one of `SIDES`; return a repetition of `Samples`, of all ranks."""
        comm = self.subject.mesh.comm
        wait_patiently(comm)
        mine = self._reference() if side else self._own()
        wait_patiently(comm)
        packed = np.full((self.most + 2, 2), np.nan)
        packed[:len(mine.times)] = mine.times
        packed[-2:] = (mine.processor, mine.slept[0]), mine.slept[1:]
        every = np.empty((comm.size, *packed.shape))
        comm.Allgather(packed, every)
        times = every[:, :-2] - np.nanmin(every[:, :-2])
        return times, every[:, -2, 0], every[:, -2:].reshape(comm.size, -1)[:, 1:]

    def _own(self) -> RankStep:
        mesh = self.subject.mesh
        self.actions.times.clear()
        time_on_all_ranks(self._step, mesh.comm, mesh.scheme.grid.backend.synchronize, self.clock)
        slept = self.subject.slept
        return RankStep(np.array(self.actions.times), self.processor,
                        np.full(len(STEPS), np.nan) if slept is None else slept)

    def _step(self) -> None:
        begin = time.process_time()
        self.subject.step()
        self.processor = time.process_time() - begin

    def _reference(self) -> RankStep:
        found = self.reference.step()
        time.sleep(SETTLE)
        return found


def take_samples(subject: Any, actions: ActionTimes, limits: Limits, clock: Clock,
                 reference: TorchPipeline | None = None) -> Samples:
    """Repeat the step, of both sides in random order where there is a reference."""
    comm, order = subject.mesh.comm, np.random.default_rng(subject.case.seed)
    sampler = Sampler(subject, actions, clock, reference)
    sides = len(SIDES) if reference else 1
    kept: list[list[tuple[np.ndarray, ...]]] = []

    def intervals() -> list[Interval]:
        seconds = [derived.step_seconds(np.array([both[side][0] for both in kept]))
                   for side in range(sides)]
        return [median_interval(seconds[0]), *(median_interval(each / seconds[0])
                                               for each in seconds[1:])]

    repetitions = timing.Repetitions(limits, comm, intervals, warmup=WARMUP)
    for counts in repetitions:
        found: list[Any] = [None] * sides
        for side in order.permutation(sides):
            found[side] = sampler.sample(side)
        if counts:
            kept.append(found)
    times, processor, slept = (np.array([[both[side][part] for both in kept]
                                         for side in range(sides)]) for part in range(3))
    return Samples(times, processor, slept, repetitions.ended_by)
