"""Set up a pipeline to measure, of layers or of actions that wait for their time."""

import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Iterator

import numpy as np

import mm3d
from bench.checks import tolerances
from bench.experiments.torch.pipeline import STEP, Waits
from bench.records.measurements import Check
from mm3d import ModelSizes
from mm3d.arrays.backend import Array
from mm3d.model.stack import Stack
from mm3d.training.batches import divide_layers
from mm3d.training.hops import Hops
from mm3d.training.mesh import Mesh
from mm3d.training.schedules import Schedule, Times, build
from mm3d.training.schedules.schedule import Action
from mm3d.training.worker import Worker

ABOUT_WORK = {
    "compute": "layers of a Transformer",
    "wait": "WAITING in place of layers: every F, B and W waits for its time and gives the core "
            "away; messages and dependencies are real"}


@dataclass(frozen=True)
class PipelineCase:
    """A pipeline to measure: a schedule and the layers of the model.

    Attributes
    ----------
    name : str
        The schedule's name, such as "1f1b" or "interleaved:2".
    stack : Stack
        The layers of the whole model; the batch is that of all micro-batches.
    waits : tuple of Fraction or None
        Seconds that replace F, B and W of all layers of a mesh stage, for one micro-batch, where
        actions only wait; None with layers.
    """

    name: str
    schedule: Schedule
    stack: Stack
    waits: tuple[Fraction, Fraction, Fraction] | None = None

    @property
    def work(self) -> str:
        """Return the kind of work, one of `ABOUT_WORK`."""
        return "compute" if self.waits is None else "wait"

    @property
    def sizes(self) -> ModelSizes:
        """Return the sizes of the whole model."""
        return self.stack.sizes

    @property
    def parts(self) -> list[range]:
        """Return the layers of each stage of the schedule."""
        return divide_layers(self.schedule, self.schedule.ranks, self.sizes)

    @property
    def chunk_seconds(self) -> tuple[float, ...] | None:
        """Return the seconds of F, B and W of each chunk; None with layers."""
        share = Fraction(self.schedule.ranks, self.schedule.stage_count)
        return self.waits and tuple(float(wait * share) for wait in self.waits)


def make_pipeline_case(name: str, stages: int, microbatches: int, sizes: ModelSizes,
                       waits: tuple[Fraction, ...] | None = None, **more: Any) -> PipelineCase:
    """Build the schedule of a name, and make sure that the model can be divided.

    `sizes` has the sequences of one micro-batch, `more` are further fields of the stack.  A
    searched schedule is found for the times `waits`, or for equal times by default.

    Raises ValueError when there is no such schedule, or the layers cannot be divided among its
    stages.
    """
    stack = Stack(**{**sizes, "batch": sizes.batch * microbatches}, **more)
    times = Times.equal(stages, *waits) if waits else None
    schedule = build(name, stages, microbatches, times=times)
    divide_layers(schedule, stages, stack.sizes, microbatches)
    return PipelineCase(name, schedule, stack, waits)


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
    asleep : bool
        Whether ranks that wait for a message sleep.
    """

    def __init__(self, mesh: Mesh, case: PipelineCase, actions: ActionTimes,
                 asleep: bool) -> None:
        self.mesh, self.case = mesh, case
        self.pipeline = mm3d.Pipeline(mesh, case.schedule, **case.stack.fields(),
                                      around=actions.around, asleep=asleep)
        self.hops = self.pipeline.hops
        self.slept = np.full(len("FBW"), np.nan)
        self._drawn: dict[str, Array] = {}

    def step(self) -> None:
        """Execute the schedule once, from gradients of zero."""
        self.pipeline.zero_gradients()
        self.pipeline.step(lambda micro: self._draw(f"input {micro}"),
                           lambda micro, y: self._draw(f"output gradient {micro}"))

    def _draw(self, name: str) -> Array:
        """Return this rank's block of a random activation."""
        return self._drawn[name] if name in self._drawn else self.pipeline.chunks[0].random(name)

    def draw_ahead(self) -> None:
        """Draw inputs and output gradients before steps, whose time then excludes drawing."""
        own, last = self.case.schedule.stages[self.mesh.stage], len(self.case.parts) - 1
        for stage, name in ((0, "input"), (last, "output gradient")):
            self._drawn |= {f"{name} {micro}": self._draw(f"{name} {micro}")
                            for micro in range(self.case.schedule.microbatches) if stage in own}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return parameters by name, "inputs" in the first stage, "output gradients" in the last.

        Stages have one rank, so that blocks are whole.
        """
        to_host = self.mesh.scheme.grid.backend.to_host
        micros = range(self.case.schedule.microbatches)
        return {**{p.name: to_host(p.value).reshape(p.public_shape)
                   for p in self.pipeline.parameters},
                **{f"{name}s": np.concatenate([to_host(self._drawn[f"{name} {m}"])
                                               for m in micros])
                   for name in ("input", "output gradient") if f"{name} 0" in self._drawn}}

    def check(self) -> list[Check]:
        """Compare the gradients of a step with those of the whole model in one stage.

        Each stage computes that model on its own ranks, micro-batch by micro-batch.  Where all
        stages have the same grid, gradients are equal to the bit: the tolerance is 0.
        """
        microbatches = self.case.schedule.microbatches
        stack = self.case.stack
        model = mm3d.Transformer(self.mesh.scheme, replace(
            stack, batch=stack.batch // microbatches, recompute="none"))
        for micro in range(microbatches):
            _, saved = model.forward(model.random(f"input {micro}"))
            model.backward(model.random(f"output gradient {micro}"), saved)
        expected = {p.name: p.grad for p in model.parameters}
        same_grids = len(set(self.mesh.grids)) == 1
        to_host = self.mesh.scheme.grid.backend.to_host
        found = {p.name: squared_error(to_host(p.grad), to_host(expected[p.name]))
                 for p in self.pipeline.parameters}
        squares: dict[str, np.ndarray] = {}
        for one in self.mesh.comm.allgather(found):
            for name, pair in one.items():
                squares[name] = squares.get(name, np.zeros(2)) + pair
        # On different grids sums are rounded in other orders, and inputs of layers differ.
        tolerance = 0.0 if same_grids else tolerances.beside_serial(
            stack.dtype, stack.layers)[1]
        return [Check(f"gradient of {name}", float(np.sqrt(error / norm)), tolerance)
                for name, (error, norm) in squares.items()]


class _WaitingChunk:
    """A chunk of layers that only waits, and checks its messages, by the `waits` of its rank."""

    def __init__(self, stage: int, waits: Waits) -> None:
        self.stage, self.waits = stage, waits

    def forward(self, x: Array) -> tuple[Array, float]:
        """Wait for the time of F; x should hold ``STEP * micro + stage``."""
        first = STEP * (float(x.ravel()[0]) // STEP) if x.size else 0.0
        return self.waits.result("F", x, first + self.stage), first

    def backward(self, dy: Array, saved: float) -> Array:
        """Wait for the times of B and W."""
        dx = self.backward_input(dy, saved)[0]
        self.backward_weights(saved)
        return dx

    def backward_input(self, dy: Array, saved: float) -> tuple[Array, float]:
        """Wait for the time of B; dy should hold ``STEP * micro - 1 - stage``."""
        return self.waits.result("B", dy, saved - 1 - self.stage), saved

    def backward_weights(self, saved: float) -> None:
        """Wait for the time of W."""
        self.waits.wait("W", time.perf_counter())


class WaitingSubject:
    """A pipeline of `_WaitingChunk` instead of layers; parameters as in `LayersSubject`."""

    def __init__(self, mesh: Mesh, case: PipelineCase, actions: ActionTimes,
                 asleep: bool) -> None:
        self.mesh, self.case = mesh, case
        schedule, sizes = case.schedule, case.sizes
        shape = (sizes.batch // schedule.microbatches, sizes.seq, sizes.hidden)
        self.hops = Hops(mesh, schedule, shape, np.dtype(case.stack.dtype), asleep=asleep)
        self.block = mesh.scheme.spaces(*shape[:2])[0].local_shape(sizes.hidden)
        assert case.chunk_seconds is not None
        self.waits = Waits(dict(zip("FBW", case.chunk_seconds)),
                           lambda like, number: self._filled(number))
        self.stages = [_WaitingChunk(stage, self.waits) for stage in schedule.stages[mesh.stage]]
        self.worker = Worker(self.hops, self.stages, actions.around)

    def step(self) -> None:
        """Execute the schedule once, with blocks whose numbers identify them."""
        self.waits.forget()
        self.worker.step(lambda micro: self._filled(self._begins["input"] + STEP * micro),
                         lambda micro, y: self._filled(
                             self._begins["output gradient"] + STEP * micro))

    @property
    def _begins(self) -> dict[str, float]:
        """Return the first numbers of micro-batch 0 in forward and in backward."""
        return {"input": 0, "output gradient": -self.case.schedule.stage_count}

    def _filled(self, value: float) -> Array:
        """Return a block that holds one number."""
        a = self.mesh.scheme.grid.backend.empty(self.block, self.hops.dtype)
        a[...] = value
        return a

    def draw_ahead(self) -> None:
        """Do nothing: what steps begin with costs little."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Return whole "inputs" in the first stage, and "output gradients" in the last."""
        own, last = self.case.schedule.stages[self.mesh.stage], self.case.schedule.stage_count - 1
        rows, micros = self.block[0], np.arange(self.case.schedule.microbatches)
        shape = (len(micros) * rows, *self.block[1:])
        found = {}
        for name, stage in (("input", 0), ("output gradient", last)):
            if stage in own:
                numbers = np.repeat(self._begins[name] + STEP * micros, rows)
                found[f"{name}s"] = np.full(
                    shape, numbers.reshape(-1, *[1] * (len(shape) - 1)), self.hops.dtype)
        return found

    @property
    def slept(self) -> np.ndarray:
        """Return the mean seconds that F, B and W of this rank have taken in the last step."""
        return np.array([*self.waits.means().values()])

    def check(self) -> list[Check]:
        """Check that every result which arrived was the right one, so far."""
        wrong, arrived = self.mesh.comm.allreduce(np.array([self.waits.wrong,
                                                            self.waits.arrived]))
        return [Check("results that arrived", wrong / arrived, 0.0)]


def squared_error(found: Any, expected: Any) -> np.ndarray:
    """Return the squared norms of the error `found` - `expected` and of `expected`."""
    a, b = np.asarray(found, float), np.asarray(expected, float)
    return np.array([np.sum((a - b) ** 2), np.sum(b ** 2)])
