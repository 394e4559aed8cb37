"""Bound how much meshes may differ because they round other sums, or sums in other orders.

In float64 the bounds are fixed.  In float32 what rounding does is measured: one rank trains the
same steps in float64 too, from the same parameters.  A mesh rounds otherwise, but not worse, so it
is about as far from one rank as one rank is from float64; `FACTOR` times as far is allowed.  This
holds whatever the sizes, the steps and the learning rate, which say how errors grow: with the
defaults of a comparison those of losses grow tenfold from 50 steps to 200, and a hundredfold at
a learning rate of 0.5.

By chance one rank may be nearer than usual.  Gradients and weights have many elements, which
average out, but the loss is a single number.  So it may always differ by `FACTOR` times what is
usual in one step: a sum of n products, in any order, has a relative error of about sqrt(n) u,
where u is the unit roundoff, since errors of single additions are independent (Higham and Mary,
SIAM J. Sci. Comput. 41, 2019).  The loss of a token is computed by products one after another, of
inner lengths n_1 to n_k, with an error of e = u sqrt(n_1 + ... + n_k), and the mean over t tokens
has e / sqrt(t).
"""

import math
from typing import Mapping

import numpy as np

from bench.experiments.training.plan import Plan
from bench.experiments.training.text import VOCAB

FACTOR = 4.0
# The aim in float64, whatever the sizes.
FLOAT64 = {"loss": 1e-12, "gradients": 1e-11, "weights": 1e-11}
LARGEST_BOUND = 1e-3    # rounding of one rank that hides no wrong sum


def forward_terms(plan: Plan) -> int:
    """Count the terms of the successive sums in the loss of a token.

    In a layer they belong to the products for queries, keys and values, for scores, for the
    context, back, up and down, and to two norms with two sums each.
    """
    h, head = plan.hidden, plan.hidden // plan.heads
    layer = h + head + plan.seq + h + h + 4 * h + 4 * h
    return plan.layers * layer + 2 * h + h + VOCAB


def rounding_bounds(plan: Plan, rounding: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return the relative differences of losses, gradients and weights that rounding may cause.

    Losses are those of any step, gradients and weights those at the end.

    Parameters
    ----------
    rounding : mapping, optional
        In float32, the same differences between one rank and float64.
    """
    if rounding is None:
        return FLOAT64
    unit = float(np.finfo(plan.dtype).eps) / 2
    usual = {"loss": unit * math.sqrt(forward_terms(plan) / (plan.batch * plan.seq))}
    return {name: FACTOR * max(found, usual.get(name, unit)) for name, found in rounding.items()}
