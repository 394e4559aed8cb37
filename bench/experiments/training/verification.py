"""Verify a model that is about to be trained, by a model in NumPy alone."""

import math
from typing import Any

import numpy as np

from bench.errors import WrongResult
from bench.experiments.training import plain_gpt
from bench.experiments.training.text import Batch
from bench.instruments.clock import wait_patiently
from bench.records.measurements import Check

STEP = 1e-5    # of the central difference; its own error is below 1e-6
# Relative, of the loss and of the gradient's length.
TOLERANCES = {"float64": (1e-12, 1e-6), "float32": (1e-5, 1e-3), "float16": (1e-2, 5e-2),
              "bfloat16": (1e-2, 5e-2)}


def verify(model: Any, batch: Batch, heads: int, dtype: str, comm: Any) -> list[Check]:
    """Compare loss and gradient of a batch with a model in NumPy, float64; every rank calls it.

    The length of the whole gradient is compared with the central difference of the other model's
    loss along it, which no wrong gradient equals: along it the loss would rise by less.

    Returns
    -------
    list of Check
        The same on every rank.

    Raises
    ------
    WrongResult
        On every rank, when one differs by more than its tolerance.
    """
    loss = model.step(*batch)
    state, gradients = model.state(), model.gradients()
    model.zero_gradients()
    checks = None
    if comm.rank == 0:
        checks = compare_with_plain(loss, state, gradients, batch, heads, dtype)
    wait_patiently(comm)
    checks = comm.bcast(checks)
    wrong = [one for one in checks if not one.passed]
    if wrong:
        raise WrongResult("; ".join(
            f"{one.quantity}: relative error {one.error:.3g}, at most {one.tolerance:g} would do"
            for one in wrong))
    return checks


def compare_with_plain(loss: float, state: plain_gpt.State, gradients: plain_gpt.State,
                       batch: Batch, heads: int, dtype: str) -> list[Check]:
    """Compare a loss and gradients with those of the model in NumPy."""
    state = {name: np.asarray(a, np.float64) for name, a in state.items()}
    slopes = {name: np.asarray(a, np.float64) for name, a in gradients.items()}
    length = math.sqrt(sum(float(np.vdot(a, a)) for a in slopes.values()))
    ahead, behind = (plain_gpt.mean_loss(
        {name: a + way * STEP / length * slopes[name] for name, a in state.items()}, *batch, heads)
        for way in (1, -1))
    slope = (ahead - behind) / (2 * STEP)
    expected = plain_gpt.mean_loss(state, *batch, heads)
    of_loss, of_gradient = TOLERANCES[dtype]
    return [Check("loss", abs(loss - expected) / expected, of_loss),
            Check("gradient", abs(length - slope) / slope, of_gradient)]
