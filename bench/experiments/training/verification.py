"""Verify a model that is about to be trained, by a model in NumPy alone."""

import math
from typing import Any, Callable

import numpy as np

from bench.checks.passed import require_passed
from bench.experiments.training import plain_gpt
from bench.records.measurements import Check
from mm3d.config import Model
from mm3d.examples.train import Batch
from mm3d.launcher import wait_patiently

STEP = 1e-5    # of the central difference; its own error is below 1e-6
# Relative, of the loss and of the gradient.
TOLERANCES = {"float64": (1e-12, 1e-6), "float32": (1e-5, 1e-4), "float16": (1e-2, 5e-2),
              "bfloat16": (1e-2, 5e-2)}


def verify(model: Any, batch: Batch, plan: Model, comm: Any) -> list[Check]:
    """Compare loss and gradient of a batch with a model in NumPy, float64; every rank calls it.

    The length of the whole gradient is compared with the central difference of NumPy's loss along
    it, and its component along a random direction with the difference along that.  The first
    cannot see a missing part, which is then missing on both sides.  The second sees it, unless it
    is smaller than the tolerance beside the whole.

    Returns the checks, the same on every rank; WrongResult when one has not passed.
    """
    state = model.state()
    loss = model.step(*batch)
    gradients = {name: a / model.loss_scale for name, a in model.gradients().items()}
    model.zero_gradients()
    checks = None
    if comm.rank == 0:
        routing = plain_gpt.PlainRouting(
            plan.experts, model.schedule.microbatches) if plan.experts else None
        checks = _compare_with_plain(loss, state, gradients, batch, plan, routing)
    wait_patiently(comm)
    return require_passed(comm.bcast(checks))


def _compare_with_plain(loss: float, state: plain_gpt.State, gradients: plain_gpt.State,
                        batch: Batch, plan: Model,
                        routing: plain_gpt.PlainRouting | None) -> list[Check]:
    """Compare a loss and gradients with those of the model in NumPy.

    All computations send tokens to the same experts, as the choice has no derivative.
    """
    state = {name: np.asarray(a, np.float64) for name, a in state.items()}
    slopes = {name: np.asarray(a, np.float64) for name, a in gradients.items()}
    length = math.sqrt(_inner_product(slopes, slopes))

    def loss_of(state: plain_gpt.State) -> float:
        return plain_gpt.mean_loss(state, *batch, plan, routing)
    expected = loss_of(state)    # the first, which chooses the experts
    slope = _slope_along(slopes, length, state, loss_of)
    direction, size = _random_signs(state), math.sqrt(sum(a.size for a in state.values()))
    component = _inner_product(slopes, direction) / size
    apart = component - _slope_along(direction, size, state, loss_of)
    of_loss, of_gradient = TOLERANCES[plan.dtype]
    return [Check("loss", abs(loss - expected) / expected, of_loss),
            Check("gradient", abs(length - slope) / slope, of_gradient),
            # The component's own size is random: the error is taken relative to its usual size.
            Check("gradient along a random direction", abs(apart) * size / length, of_gradient)]


def _slope_along(direction: plain_gpt.State, length: float, state: plain_gpt.State,
                 loss_of: Callable[[plain_gpt.State], float]) -> float:
    """Compute the central difference of the loss along a direction of this length."""
    ahead, behind = (loss_of({name: a + way * STEP / length * direction[name]
                              for name, a in state.items()}) for way in (1, -1))
    return (ahead - behind) / (2 * STEP)


def _inner_product(a: plain_gpt.State, b: plain_gpt.State) -> float:
    """Compute the sum of the products of all elements."""
    return sum(float(np.vdot(a[name], b[name])) for name in b)


def _random_signs(state: plain_gpt.State) -> plain_gpt.State:
    """Draw 1 or -1 for each element, always the same."""
    draw = np.random.default_rng(0)
    return {name: draw.choice((-1.0, 1.0), a.shape) for name, a in state.items()}
