"""Run a training dry, to know what a rank holds at the peak of a step."""

from typing import Any

from bench.experiments.training.plan import Plan, make_optimizer
from mm3d.arrays.backend import Backend
from mm3d.config import Config, Division
from mm3d.tracing import dry_run
from mm3d.training.gpt import GPT


def expected_peak_bytes(plan: Plan, division: Division, ranks: int, rank: int) -> int:
    """Return the bytes of a rank's arrays at the peak of a step, where no memory is shared.

    Experts get equally many tokens, which those of a real training do not.
    """
    def step(model: Any, trace: dry_run.Trace) -> None:
        optimizer = make_optimizer(plan, model)
        model.rehearse()
        optimizer.step()
    return dry_run.trace(
        lambda comm, backend: GPT(Config(plan, division).on(backend), comm),
        ranks, rank, Backend.block, step).pool_peak
