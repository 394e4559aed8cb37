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

from typing import Any

import numpy as np

from bench.checks import tolerances
from bench.checks.layer_errors import LayerErrors
from bench.checks.sharded_matrices import max_over_ranks
from bench.records.measurements import Check
from bench.records.notes import RESIDUAL
from mm3d.tracing.observe import observed


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
    limits = tolerances.layer_by_layer(found.rounding, model.sizes.layers)
    return [Check(RESIDUAL + name, float(error), limits[RESIDUAL + name])
            for name, error in zip(found.errors, worst)]
