"""Predict the peak memory of a rank in a training step by a dry run."""

from typing import Any

from bench.experiments.training.plan import Plan, make_optimizer
from mm3d.arrays.backend import Backend
from mm3d.config import Config, Division
from mm3d.tracing import dry_run
from mm3d.training.gpt import GPT


def expected_peak_bytes(plan: Plan, division: Division, ranks: int, rank: int) -> int:
    """Return the peak bytes of a rank's arrays in a step, without shared memory.

    Experts get equally many tokens, unlike in a real training.
    """
    def step(model: Any, trace: dry_run.Trace) -> None:
        optimizer = make_optimizer(plan, model)
        model.rehearse()
        optimizer.step()
    return dry_run.trace(
        lambda comm, backend: GPT(Config(plan, division).on(backend), comm),
        ranks, rank, Backend.block, step).pool_peak
