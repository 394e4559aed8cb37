"""Whole steps on every grid: how they are timed, and what they take beyond their parts."""

from typing import Callable, Iterable, Sequence

import msgspec
import numpy as np

import mm3d
from bench import fits, model, plan, replay, sampling
from bench.products import DIRECTIONS, Problem
from bench.replay import Work
from mm3d import dry, timing

Trial = Callable[[], list[float]]    # seconds of forward and of backward
# Short and long, so that what a meeting adds is told from what work does.
MODELS = ((96, 8, 8, 32, 2), (448, 8, 8, 96, 1))    # hidden, heads, batch, seq, layers
ROUNDS = 5


def everywhere(ranks: int, products: Iterable[tuple[int, ...]],
               layers: Iterable[tuple[int, ...]]) -> list[Work]:
    """Products C = AB and Transformers of these sizes, on every grid of every scheme."""
    grids = [("3d", (1, 1, 1))] if ranks == 1 else list(plan.candidates(ranks))
    works = [Work("matmul", scheme, grid, sizes, "ab") for sizes in products
             for scheme, grid in grids if scheme in DIRECTIONS]
    return works + [Work("layer", scheme, grid, sizes) for sizes in layers
                    for scheme, grid in grids]


def product(problem: Problem, comm, clock: timing.Clock) -> Trial:
    """C, and then dA and dB."""
    samplers = [sampling.makespans(getattr(problem, phase), comm, lambda: None, clock)
                for phase in dry.PHASES]
    return lambda: [sample() for sample in samplers]


def layers(network: mm3d.Transformer, comm, clock: timing.Clock) -> Trial:
    """A forward and a backward pass."""
    x, dy = network.random("input"), network.random("output gradient")

    def step() -> list[float]:
        network.zero_gradients()
        there, (_, saved) = timing.spans(lambda: network.forward(x), comm, lambda: None, clock)
        again, _ = timing.spans(lambda: network.backward(dy, saved), comm, lambda: None, clock)
        return [float(there.max()), float(again.max())]
    return step


def rounds(trials: Sequence[Trial], count: int, seed: int) -> np.ndarray:
    """Seconds by round, trial and phase.

    In rounds, each in an order of its own, so that what slows the machine for a while slows no
    work for good.
    """
    return np.array([sampling.in_random_order([(trial,) for trial in trials], seed + turn,
                                              lambda trial: trial()) for turn in range(count)])


def steps(works: Sequence[Work], comm, seed: int) -> np.ndarray:
    """Seconds of forward and backward together by round and Transformer."""
    clock = timing.Clock(comm)
    schemes = [mm3d.scheme(work.scheme, comm, work.grid, "numpy") for work in works]
    networks = [mm3d.Transformer(scheme, **dict(zip(replay.NAMES["layer"], work.sizes)))
                for scheme, work in zip(schemes, works)]
    found = rounds([layers(network, comm, clock) for network in networks], ROUNDS, seed * ROUNDS)
    for scheme in schemes:
        scheme.grid.free()
    return found.sum(axis=-1)


def together(machine: model.Machine, works: Sequence[Work],
             took: np.ndarray) -> model.Machine:
    """`machine` with what operations lose in a step, where they follow each other and not
    themselves: data and code are in no cache, and ranks wait for each other.

    All of them get a part of what they get alone, the same part, and every meeting takes some
    time more, by the number of ranks that meet: what makes up best, in relative squares, for the
    seconds that `works` took.
    """
    traces = [replay.trace(work, "float32", machine.granule) for work in works]
    sizes = sorted({event.size for trace in traces for event in trace.of(dry.Collective)})
    rows = []
    for trace in traces:
        meetings = dict.fromkeys(sizes, 0)
        for event, times in trace.of(dry.Collective).items():
            meetings[event.size] += times * model.meetings(event)
        rows.append([sum(model.step_seconds(machine, trace).values()), *meetings.values()])
    terms = np.array(rows) / took[:, None]
    more, *each = fits.nonnegative(terms, 1 - terms[:, 0]).tolist()
    share = 1 / (1 + more)
    return msgspec.structs.replace(
        machine, achieved=model.Achieved(*[share] * len(model.TERMS)),
        waiting={size: share * seconds for size, seconds in zip(sizes, each)})
