"""Set up a pipeline whose actions wait for their time instead of computing layers."""

import time

import numpy as np

from bench.experiments.pipeline.subject import ActionTimes, PipelineCase
from bench.experiments.torch.pipeline import STEP, Waits
from bench.records.measurements import Check
from mm3d.arrays.backend import Array
from mm3d.training.hops import Hops
from mm3d.training.mesh import Mesh
from mm3d.training.worker import Worker


class WaitingChunk:
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
    """A pipeline of `WaitingChunk` instead of layers; parameters as in `LayersSubject`."""

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
        self.stages = [WaitingChunk(stage, self.waits) for stage in schedule.stages[mesh.stage]]
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
