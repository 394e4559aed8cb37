"""State by how much meshes may differ because they round other sums, or the same in other orders.

A sum of n products, in any order, has a relative error of about sqrt(n) u, where u is the unit
roundoff: errors of single additions are independent (Higham and Mary, SIAM J. Sci. Comput. 41,
2019; the worst case would be n u).  The loss of a token is computed by products one after another,
of inner lengths n_1 to n_k, and independent errors add in squares, which gives
e = u sqrt(n_1 + ... + n_k).  The mean over t tokens has e / sqrt(t).  A gradient goes through the
same products, and through two for each of them in backward, and ends in a sum over all tokens:
u sqrt(3 (n_1 + ... + n_k) + t).  A step hands its errors on in the weights: after T steps there
are T times as many, so errors are sqrt(T) times as large.

`DEVIATIONS` of these are allowed.  What the derivation leaves out are condition numbers: it takes
layers, whose norms keep activations near 1, to hand errors on as large as they get them.  It holds
for a short training that does not diverge, of the sizes of a comparison.
"""

import math

import numpy as np

from bench.experiments.training.plan import Plan
from bench.experiments.training.text import VOCAB

DEVIATIONS = 4.0
# The aim in float64, whatever the sizes.
FLOAT64 = {"loss": 1e-12, "gradients": 1e-11, "weights": 1e-11}


def forward_terms(plan: Plan) -> int:
    """Count the terms of the sums that the loss of a token goes through, one after another.

    In a layer they are those of the products for queries, keys and values, for scores, for the
    context, back, up and down, and of two norms with two sums each.
    """
    h, head = plan.hidden, plan.hidden // plan.heads
    layer = h + head + plan.seq + h + h + 4 * h + 4 * h
    return plan.layers * layer + 2 * h + h + VOCAB


def rounding_bounds(plan: Plan) -> dict[str, float]:
    """Return the relative differences of losses, gradients and weights that rounding may cause.

    Of losses in any of the plan's steps, and of gradients and weights at the end.
    """
    if plan.dtype == "float64":
        return FLOAT64
    terms, tokens = forward_terms(plan), plan.batch * plan.seq
    allowed = DEVIATIONS * float(np.finfo(plan.dtype).eps) / 2 * math.sqrt(plan.steps)
    backward = allowed * math.sqrt(3 * terms + tokens)
    return {"loss": allowed * math.sqrt(terms / tokens), "gradients": backward,
            "weights": backward}
