"""Whether a step of the measured model is right where no serial model of its size can be had.

One forward and one backward are checked layer by layer while they go on, each layer's output and
gradients against its own input, so that no matrix is brought together:

- every distributed product, C = AB and both of its gradients, by a random vector in float64
  (Freivalds 1979), held against a multiple of eps |A||B| as in `bench.checks.freivalds`;
- every gradient of a bias or of a norm's weight by its inner product with a random vector;
- layer norms, GELU and the sums of residual blocks in some rows, against NumPy in float64;
- attention as `bench.checks.attention_identities` says.

Of what several ranks hold copies of, every copy is checked.
"""

import math
from typing import Any

import numpy as np

from bench.checks import attention_identities
from bench.checks.freivalds import EPS
from bench.checks.layer_errors import Look, SUMS, residual_blocks
from bench.checks.sharded_matrices import greatest
from bench.records.measurements import Check
from mm3d.tracing.observe import observed

# Multiples of eps that pass: of |A||B| in products, and of what rounding can do to each number of
# a layer that works by rows, or to each term of a sum over all rows.  TensorFloat-32 rounds the
# factors of products alone, and so only products and attention have its eps.
PRODUCT, ROW = 8, 32
PREFIX = "residual of "


def step(model: Any, x: Any, dy: Any, seed: int) -> list[Check]:
    """Do one step of `model` and check it.

    Parameters
    ----------
    model : Transformer
        In float32 or float64; its gradients are cleared first.
    x, dy : array
        This rank's blocks of the input and of the output's gradient.
    seed : int
        Of the random vectors and of what is sampled.

    Returns
    -------
    list of Check
        The same on every rank: of each quantity the worst of all ranks and copies.
    """
    look = Look(model, seed)
    model.zero_gradients()
    with observed(model.grid, look, model):
        _, saved = model.forward(x)
        model.backward(dy, saved)
    worst = greatest(np.array(list(look.errors.values())), model.grid.comm)
    limits = tolerances(len(residual_blocks(model.layers)) // 2, look.rounding)
    return [Check(PREFIX + name, float(error), limits[PREFIX + name])
            for name, error in zip(look.errors, worst)]


def failure(checks: list[Check]) -> str | None:
    """What to say of checks of a step that did not pass; None when all did."""
    failed = [check for check in checks if not check.passed]
    if not failed:
        return None
    worst = max(failed, key=lambda check: check.error / check.tolerance)
    return (f"the measured model's own step is wrong: {worst.quantity}, is off by "
            f"{worst.error:.2g} of its bound, tolerance {worst.tolerance:.2g} ({len(failed)} of "
            f"{len(checks)} residuals fail); no times were written")


def apart(checks: list[Check]) -> tuple[list[Check], list[Check]]:
    """The checks beside the serial scheme, and the residuals."""
    residuals = [check for check in checks if check.quantity.startswith(PREFIX)]
    return [check for check in checks if check not in residuals], residuals


def tolerances(layers: int, rounding: str) -> dict[str, float]:
    """The checks of a model of so many layers: by name the error that passes.

    Parameters
    ----------
    layers : int
        Their number.
    rounding : str
        What products are rounded to: the model's dtype, or "tf32".  NaN, which nothing passes,
        for one that is unknown.
    """
    eps = EPS.get(rounding, math.nan)
    row = ROW * (EPS["float32"] if rounding == "tf32" else eps)
    bias, sums = {"dbias": row}, dict.fromkeys(SUMS, row)
    norm, product = sums | bias | {"dweight": row}, dict.fromkeys(("C", "dA", "dB"), PRODUCT * eps)
    attention = {name: multiple * eps
                 for name, multiple in attention_identities.multiples(rounding).items()}
    parts = {"ln1": norm, "attention.qkv": product | bias, "attention.attention": attention,
             "attention.proj": product | bias, "attention": sums, "ln2": norm,
             "mlp.up": product, "mlp.gelu": sums | bias, "mlp.down": product | bias, "mlp": sums}
    return {f"{PREFIX}layers.{n}.{part}, {what}": limit for n in range(layers)
            for part, kinds in parts.items() for what, limit in kinds.items()}
