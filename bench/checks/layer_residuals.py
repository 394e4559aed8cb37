"""Check a step of the measured model where a serial model of its size is too large.

One forward and one backward are checked layer by layer while they run.  The output and gradients
of each layer are compared with those computed from its own input, so that no matrix is gathered:

- every distributed product, C = AB and both of its gradients, by a random vector in float64
  (Freivalds 1979), against a multiple of eps |A||B| as in `bench.checks.freivalds`;
- every gradient of a bias or of a norm's weight by its inner product with a random vector;
- layer norms, GELU and the sums of residual blocks in some rows, against NumPy in float64;
- attention as in `bench.checks.attention_identities`.

Where several ranks hold copies of an array, every copy is checked.
"""

import math
from typing import Any

import numpy as np

from bench.checks import attention_identities
from bench.checks.freivalds import EPS
from bench.checks.layer_errors import LayerErrors, SUMS
from bench.checks.sharded_matrices import max_over_ranks
from bench.records.measurements import Check
from bench.records.notes import RESIDUAL
from mm3d.tracing.observe import observed

# Multiples of eps that pass: of |A||B| in products; of the rounding errors of each number in
# layers that work by rows, or of each term of a sum over all rows.  TensorFloat-32 rounds only
# the factors of products, so only products and attention have its eps.
PRODUCT, ROW = 8, 32


def check_step(model: Any, x: Any, dy: Any, seed: int) -> list[Check]:
    """Do one step of `model` and check it.

    Parameters
    ----------
    model : Transformer
        In float32 or float64; its gradients are cleared first.
    x, dy : array
        This rank's blocks of the input and of the output's gradient.

    Returns
    -------
    list of Check
        The worst error of all ranks and copies for each quantity, the same on every rank.
    """
    model.stack.architecture.require_plain("a check layer by layer")
    found = LayerErrors(model, seed)
    model.zero_gradients()
    with observed(model.grid, found, model):
        _, saved = model.forward(x)
        model.backward(dy, saved)
    worst = max_over_ranks(np.array(list(found.errors.values())), model.grid.comm)
    limits = tolerances(model.sizes.layers, found.rounding)
    return [Check(RESIDUAL + name, float(error), limits[RESIDUAL + name])
            for name, error in zip(found.errors, worst)]


def tolerances(layers: int, rounding: str) -> dict[str, float]:
    """Return the errors that pass, by the names of the checks of a step of a Transformer.

    Parameters
    ----------
    rounding : str
        Precision of the products: the model's dtype, or "tf32".  Tolerances of an unknown one
        are NaN, which no error passes.
    """
    eps = EPS.get(rounding, math.nan)
    row = ROW * (EPS["float32"] if rounding == "tf32" else eps)
    bias, sums = {"dbias": row}, dict.fromkeys(SUMS, row)
    norm, product = sums | bias | {"dweight": row}, dict.fromkeys(("C", "dA", "dB"), PRODUCT * eps)
    attention = {name: multiple * eps
                 for name, multiple in attention_identities.multiples(rounding).items()}
    of_layer = {"attention": sums, "ln1": norm, "attention.qkv": product | bias,
                "attention.attention": attention, "attention.proj": product | bias,
                "mlp": sums, "ln2": norm, "mlp.up": product,    # its bias is added by GELU
                "mlp.gelu": sums | bias, "mlp.down": product | bias}
    return {f"{RESIDUAL}layers.{number}.{name}, {what}": limit for number in range(layers)
            for name, passing in of_layer.items() for what, limit in passing.items()}
