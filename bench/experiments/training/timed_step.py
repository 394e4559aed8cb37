"""A training step to be measured: a GPT with tied weights and AdamW, on random tokens."""

import time
from typing import Any

import numpy as np

import mm3d
from bench.errors import as_usage_error
from bench.experiments.torch.equal_kernels import observe_products
from bench.experiments.torch.serve import Product
from bench.instruments.clock import Clock
from bench.instruments.spans import Recorder
from mm3d.config import Config, Division, Model
from mm3d.tracing.events import Collective, Gemm
from mm3d.tracing.observe import observed

PARTS = ("products", "collectives", "waiting", "optimizer", "rest")
PART_OF_SPAN = {"gemm": 0, "collective": 1, "wait": 2}
TRACED = 3    # steps whose parts are timed
OPTIMIZER = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def draw_batch(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Draw tokens and targets, the same on every rank; each step has this batch."""
    drawn = np.random.default_rng(model.seed).integers(model.vocab,
                                                       size=(model.batch, model.seq + 1))
    return drawn[:, :-1], drawn[:, 1:]


class MeasuredTraining:
    """A model and its optimizer on the ranks of a communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks; each creates it.
    case, division : Model, Division
        The model to train, and its mesh.

    Raises
    ------
    UsageError
        On every rank alike, for what cannot be trained so.
    """

    def __init__(self, comm: Any, case: Model, division: Division) -> None:
        self.comm, self.case = comm, case
        with as_usage_error():
            self.model = mm3d.GPT(Config(case, division), comm)
            self.mesh, self.division = self.model.mesh, self.model.config.division
            self.optimizer = mm3d.AdamW(self.model, **OPTIMIZER)
        self.batch = draw_batch(case)
        self.optimizer_seconds = 0.0    # of the last step

    def step(self) -> float:
        """Take a step; return the loss before it."""
        loss = self.model.step(*self.batch)
        start = time.perf_counter()
        self.optimizer.step()
        self.optimizer_seconds = time.perf_counter() - start
        return loss

    def products(self) -> list[Product]:
        """Return this rank's local products of a step, which changes nothing."""
        found = observe_products(lambda: self.model.step(*self.batch), self.mesh.scheme.grid)
        self.model.zero_gradients()
        return found

    def trace(self, clock: Clock) -> np.ndarray:
        """Take steps and time their parts; return seconds, (steps, `PARTS`), here."""
        grid, found = self.mesh.scheme.grid, np.zeros((TRACED, len(PARTS)))
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

    def free(self) -> None:
        """Free the communicators; every rank must call it."""
        self.model.free()
