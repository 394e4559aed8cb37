"""Compute the losses that keep the experts in balance, and the logits' gradients.

Each loss is a sum over tokens, divided by the global number of tokens; a rank computes its tokens'
part of the sum.  The share of tokens that an expert gets is global and a constant to the gradient,
so the sum of all ranks' parts and gradients is the loss of the global batch on every mesh.
"""

import numpy as np

from mm3d.arrays.backend import Array, backend_of, host_dtype, namespace
from mm3d.model.experts.gates import ChosenExperts, scores_backward
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.functional import upcast


def shares(experts: ExpertOptions, totals: np.ndarray, tokens: int, layers: int = 1) -> np.ndarray:
    """Compute the share f of each expert in the balance loss, as the convention defines it.

    `totals`, int64 (k, E), says how many of all `tokens` have each expert as their first, second
    ... choice, dropped or not; the convention "megablocks" divides by the `layers` of the model.
    The result is float64, (E,).
    """
    if experts.convention == "huggingface":
        return totals.sum(0) / tokens
    if experts.convention == "deepspeed" and experts.top <= 2:
        return totals[0] / tokens
    divisor = layers if experts.convention == "megablocks" else 1
    return totals.sum(0) / (tokens * experts.top * divisor)


def balance_loss(choice: ChosenExperts, experts: ExpertOptions, totals: np.ndarray, tokens: int,
                 layers: int = 1) -> tuple[Array, Array]:
    """Compute this rank's part of the balance loss, and the gradient of the logits.

    The loss is alpha E sum_i f_i P_i, with the coefficient alpha = ``experts.balance``, the global
    shares f of `shares`, and the mean probability P over all tokens.  With p the probabilities of
    a token t, its gradient is dL/dz_tj = (alpha E / T) p_tj (f_j - sum_i f_i p_ti).  Source:
    Fedus, Zoph and Shazeer, arXiv 2101.03961, equations 4 to 6.

    Parameters as in `shares`.  The part has the shape (1,), in float64; the gradient is (tokens of
    this rank, E).
    """
    p = choice.probabilities
    library, xp = backend_of(p), namespace(p)
    factor = experts.balance * experts.count / tokens
    weights = factor * shares(experts, totals, tokens, layers)
    of_token = library.asarray(weights.astype(host_dtype(p))[None, :])
    sums = xp.sum(p, axis=0, dtype=xp.float64)
    value = xp.sum(sums * library.asarray(weights), axis=0, keepdims=True)
    return value, scores_backward(of_token, p, choice.slope)


def z_loss(logits: Array, coefficient: float, tokens: int) -> tuple[Array, Array]:
    """Compute this rank's part of the z-loss, and the gradient of the logits.

    The loss is (c / T) sum_t lse_t^2, where lse is the logarithm of the sum of exponentials of a
    token's logits; its gradient is (2 c / T) lse_t softmax(z_t)_j.  Source: Zoph et al., arXiv
    2202.08906, equation 5.  The logits, and both results, have the shapes of `balance_loss`; T is
    the global number of tokens, c the coefficient.
    """
    xp, z = namespace(logits), upcast(logits)
    most = xp.max(z, axis=-1, keepdims=True)
    p = xp.exp(z - most)
    total = xp.sum(p, axis=-1, keepdims=True)
    lse = xp.log(total) + most
    scale = coefficient / tokens
    value = scale * xp.sum(xp.astype(lse * lse, xp.float64, copy=False), axis=0)
    return value, p * (2 * scale * lse / total)
