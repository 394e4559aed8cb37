"""Set up a pipeline to measure: real layers, or actions that only wait for their time."""

import time
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Iterator

import numpy as np

import mm3d
from bench.checks import against_serial
from bench.records.measurements import Check
from mm3d import ModelSizes
from mm3d.arrays.backend import Array
from mm3d.training.hops import Hops
from mm3d.training.mesh import Mesh
from mm3d.training.pipeline import divide_layers
from mm3d.training.schedules import Schedule, Times, build
from mm3d.training.schedules.schedule import Action
from mm3d.training.worker import Worker

STEP = 1024    # of the numbers of micro-batches; more than there are stages
ABOUT_WORK = {
    "compute": "layers of a Transformer",
    "wait": "WAITING in place of layers: every F, B and W waits for its time and gives the core "
            "away; messages and dependencies are real"}


@dataclass(frozen=True)
class PipelineCase:
    """What is measured: a schedule and the sizes of the model.

    Attributes
    ----------
    name : str
        The schedule's name, such as "1f1b" or "interleaved:2".
    schedule : Schedule
        The schedule.
    sizes : ModelSizes
        Sizes of the whole model; the batch is that of all micro-batches.
    seed : int
        Seed of parameters and activations.
    dtype : str
        Their type.
    recompute : str
        Policy of recomputation.
    waits : tuple of Fraction or None
        Seconds of F, B and W of all layers of a stage of the mesh, for one micro-batch, where
        waiting takes the place of layers; None with layers.
    """

    name: str
    schedule: Schedule
    sizes: ModelSizes
    seed: int = 0
    dtype: str = "float32"
    recompute: str = "none"
    waits: tuple[Fraction, Fraction, Fraction] | None = None

    @property
    def work(self) -> str:
        """Return the kind of work, one of `ABOUT_WORK`."""
        return "compute" if self.waits is None else "wait"


def make_case(name: str, stages: int, microbatches: int, sizes: ModelSizes,
              waits: tuple[Fraction, ...] | None = None, **more: Any) -> PipelineCase:
    """Build the schedule of a name, and make sure that the model can be divided.

    `sizes` has the sequences of one micro-batch.  A schedule that is searched for is that for
    `waits`, or for equal times where these are not given.

    Raises
    ------
    ValueError
        When there is no such schedule, or the layers cannot be divided among its stages.
    """
    whole = ModelSizes(**{**sizes, "batch": sizes.batch * microbatches})
    times = Times.equal(stages, *waits) if waits else None
    schedule = build(name, stages, microbatches, times=times)
    divide_layers(schedule, stages, whole, microbatches)
    return PipelineCase(name, schedule, whole, waits=waits, **more)


class ActionTimes:
    """Record when each action of this rank begins and ends.

    Attributes
    ----------
    times : list of (float, float)
        Seconds on the clock, in the order of the row.
    """

    def __init__(self, clock: Any, synchronize: Any) -> None:
        self.clock, self.synchronize, self.times = clock, synchronize, []

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Record the action that is executed in this context."""
        start = self.clock.now()
        yield
        self.synchronize()
        self.times.append((start, self.clock.now()))


class LayersSubject:
    """A pipeline of layers.

    Parameters
    ----------
    mesh : Mesh
        The ranks, all of which make it.
    case : PipelineCase
        What is measured.
    actions : ActionTimes
        Records the actions.
    asleep : bool
        Whether ranks that wait for a message sleep.
    """

    def __init__(self, mesh: Mesh, case: PipelineCase, actions: ActionTimes,
                 asleep: bool) -> None:
        self.mesh, self.case = mesh, case
        self.pipeline = mm3d.Pipeline(mesh, case.schedule, **case.sizes, around=actions.around,
                                      asleep=asleep, seed=case.seed, dtype=case.dtype,
                                      recompute=case.recompute)
        self.hops = self.pipeline.hops
        self.chunks = [chunk.spec for chunk in self.pipeline.chunks]

    def step(self) -> None:
        """Execute the schedule once, from gradients of zero."""
        draw = self.pipeline.chunks[0].random
        self.pipeline.zero_gradients()
        self.pipeline.step(lambda micro: draw(f"input {micro}"),
                           lambda micro, y: draw(f"output gradient {micro}"))

    def check(self) -> list[Check]:
        """Compare the gradients of a step with those of the whole model in one stage.

        Each stage computes it on its own ranks, micro-batch by micro-batch.  Where all stages have
        the same grid, gradients are equal to the bit: the tolerance is 0.
        """
        microbatches = self.case.schedule.microbatches
        sizes = ModelSizes(**{**self.case.sizes, "batch": self.case.sizes.batch // microbatches})
        model = mm3d.Transformer(self.mesh.scheme, **sizes, seed=self.case.seed,
                                 dtype=self.case.dtype)
        for micro in range(microbatches):
            _, saved = model.forward(model.random(f"input {micro}"))
            model.backward(model.random(f"output gradient {micro}"), saved)
        expected = {p.name: p.grad for p in model.parameters}
        same_grids = len(set(self.mesh.grids)) == 1
        found = {p.name: _difference(p, expected[p.name]) for p in self.pipeline.parameters}
        squares: dict[str, np.ndarray] = {}
        for one in self.mesh.comm.allgather(found):
            for name, pair in one.items():
                squares[name] = squares.get(name, np.zeros(2)) + pair
        # On different grids sums are rounded in other orders, and inputs of layers differ.
        tolerance = 0.0 if same_grids else against_serial.tolerances(
            self.case.dtype, self.case.sizes.layers)[1]
        return [Check(f"gradient of {name}", float(np.sqrt(error / norm)), tolerance)
                for name, (error, norm) in squares.items()]


def _difference(parameter: Any, expected: Array) -> np.ndarray:
    """Return the squares of the norms of a gradient's error and of what is expected, here."""
    to_host = parameter.grid.backend.to_host
    a, b = to_host(parameter.grad).astype(float), to_host(expected).astype(float)
    return np.array([np.sum((a - b) ** 2), np.sum(b ** 2)])


class WaitingChunk:
    """Wait in place of the layers of a chunk: a stand-in whose messages are checked.

    Parameters
    ----------
    stage : int
        The stage of the schedule.
    seconds : tuple of float
        Times of F, B and W.
    empty : callable
        Allocates a block of activations.
    """

    def __init__(self, stage: int, seconds: tuple[float, float, float], empty: Any) -> None:
        self.stage, self.seconds, self.empty = stage, seconds, empty
        self.wrong = self.arrived = 0

    def _result(self, arrived: Array, number: float, seconds: float) -> Array:
        """Wait; return a block of 1 more than `number`, which should have arrived."""
        end = time.perf_counter() + seconds
        self.arrived += 1
        self.wrong += not (arrived == number).all()
        out = self.empty()
        out[...] = number + 1
        _sleep_until(end)
        return out

    def forward(self, x: Array) -> tuple[Array, float]:
        """Wait for the time of F; x should hold ``STEP * micro + stage``."""
        first = STEP * (float(x.ravel()[0]) // STEP) if x.size else 0.0
        return self._result(x, first + self.stage, self.seconds[0]), first

    def backward(self, dy: Array, saved: float) -> Array:
        """Wait for the times of B and W."""
        dx = self.backward_input(dy, saved)[0]
        self.backward_weights(saved)
        return dx

    def backward_input(self, dy: Array, saved: float) -> tuple[Array, float]:
        """Wait for the time of B; dy should hold ``STEP * micro - 1 - stage``."""
        return self._result(dy, saved - 1 - self.stage, self.seconds[1]), saved

    def backward_weights(self, saved: float) -> None:
        """Wait for the time of W."""
        time.sleep(self.seconds[2])


def _sleep_until(end: float) -> None:
    """Give the core away until a time of `time.perf_counter`."""
    left = end - time.perf_counter()
    if left > 0:
        time.sleep(left)


class WaitingSubject:
    """A pipeline in which waiting takes the place of layers; parameters as `LayersSubject`."""

    def __init__(self, mesh: Mesh, case: PipelineCase, actions: ActionTimes,
                 asleep: bool) -> None:
        self.mesh, self.case = mesh, case
        schedule, sizes = case.schedule, case.sizes
        shape = (sizes.batch // schedule.microbatches, sizes.seq, sizes.hidden)
        self.hops = Hops(mesh, schedule, shape, np.dtype(case.dtype), asleep=asleep)
        backend, outer = mesh.scheme.grid.backend, mesh.scheme.spaces(*shape[:2])[0]
        self.block = outer.local_shape(sizes.hidden)
        self.empty = lambda: backend.empty(self.block, self.hops.dtype)
        assert case.waits is not None
        share = Fraction(schedule.ranks, schedule.stage_count)
        seconds = tuple(float(wait * share) for wait in case.waits)
        self.stages = [WaitingChunk(stage, seconds, self.empty)
                       for stage in schedule.stages[mesh.stage]]
        self.chunks: list[Any] = []
        self.worker = Worker(self.hops, self.stages, actions.around)

    def step(self) -> None:
        """Execute the schedule once, with numbers by which each result is known."""
        last = self.case.schedule.stage_count - 1

        def filled(value: float) -> Array:
            a = self.empty()
            a[...] = value
            return a
        self.worker.step(lambda micro: filled(STEP * micro),
                         lambda micro, y: filled(STEP * micro - 1 - last))

    def check(self) -> list[Check]:
        """Check that every result which arrived was the right one, so far."""
        found = np.array([[chunk.wrong, chunk.arrived] for chunk in self.stages]).sum(axis=0)
        wrong, arrived = self.mesh.comm.allreduce(found)
        return [Check("results that arrived", wrong / arrived, 0.0)]
