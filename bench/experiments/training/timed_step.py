"""A training step to be measured: a GPT with tied weights and AdamW, on random tokens."""

import time

import numpy as np

import mm3d
from bench.experiments.products.operands import observe_products
from bench.experiments.torch.serve import TimedProduct
from bench.instruments.clock import Clock
from bench.instruments.spans import Recorder
from mm3d.config import Model
from mm3d.tracing.events import Collective, Gemm
from mm3d.tracing.observe import observed

STEP_PARTS = ("products", "collectives", "waiting", "optimizer", "rest")
PART_OF_SPAN = {"gemm": 0, "collective": 1, "wait": 2}
TRACED = 3    # steps whose parts are timed
ADAMW_OPTIONS = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def draw_batch(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Draw tokens and targets, the same on every rank; each step has this batch."""
    drawn = np.random.default_rng(model.seed).integers(model.vocab,
                                                       size=(model.batch, model.seq + 1))
    return drawn[:, :-1], drawn[:, 1:]


class TimedTraining:
    """A model and its optimizer, on ranks that compute or wait."""

    def __init__(self, model: mm3d.GPT) -> None:
        self.model, self.optimizer = model, mm3d.AdamW(model, **ADAMW_OPTIONS)
        self.comm, self.mesh = model.comm, model.mesh
        self.case, self.division = model.config.model, model.config.division
        self.batch = draw_batch(self.case)
        self.optimizer_seconds = 0.0    # of the last step

    def step(self) -> float:
        """Take a step; return the loss before it."""
        loss = self.model.step(*self.batch)
        start = time.perf_counter()
        self.optimizer.step()
        self.optimizer_seconds = time.perf_counter() - start
        return loss

    def products(self) -> list[TimedProduct]:
        """Return this rank's local products of a step, which changes nothing."""
        found = observe_products(lambda: self.model.step(*self.batch), self.mesh.scheme.grid)
        self.model.zero_gradients()
        return found

    def trace(self, clock: Clock) -> np.ndarray:
        """Take steps and time their parts; return seconds, (steps, `STEP_PARTS`), here."""
        grid, found = self.mesh.scheme.grid, np.zeros((TRACED, len(STEP_PARTS)))
        recorder = Recorder(grid.backend, clock.now)
        recorder.kinds = (Gemm, Collective)
        with observed(grid, recorder):
            for parts in found:
                recorder.spans.clear()
                self.comm.Barrier()
                start = time.perf_counter()
                self.step()
                whole = time.perf_counter() - start
                for span in recorder.spans:
                    parts[PART_OF_SPAN[span.kind]] += span.own
                parts[3] = self.optimizer_seconds
                parts[4] = whole - parts.sum()
        return found
