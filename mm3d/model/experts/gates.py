"""Choose the experts of each token, and compute gates and their gradients, on one rank's arrays.

A router's logits z are float32 at least.  Each expert has a *log score*: the logit itself, or with
the gate "sigmoid-bias" the logarithm of its sigmoid.  The softmax of all log scores then gives the
probabilities, and the softmax of the chosen experts' log scores gives gates that add up to 1; for
sigmoids these are s_i / sum_j s_j, without a division by 0.

Each loss that keeps the experts in balance is a sum over tokens, divided by the global number of
tokens; a rank computes its tokens' part.  The share of tokens that an expert gets is global and a
constant to the gradient, so the sum of all ranks' parts is the loss of the batch on every mesh.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mm3d.arrays.backend import Array, backend_of, host_dtype, namespace
from mm3d.model.experts.options import BEST_OF_GROUP, ExpertDesign, ExpertOptions
from mm3d.model.functional import upcast


@dataclass(frozen=True)
class ChosenExperts:
    """Hold the experts that the router has chosen for this rank's tokens."""

    # Int64 (tokens, k), in host memory: the experts of each token, the one that it prefers first.
    chosen: np.ndarray
    gates: Array    # (tokens, k): what the outputs of these experts are multiplied by
    # (tokens, E): softmax of all log scores, whose means enter the balance loss.
    probabilities: Array
    # (tokens, E): derivative of each log score by its logit; None where it is 1.
    slope: Array | None
    experts: ExpertOptions    # of which these are chosen


def choose(logits: Array, experts: ExpertOptions, bias: Array | None = None,
           assumed: np.ndarray | None = None) -> ChosenExperts:
    """Choose the experts with the largest logits; among equals the lowest number.

    The logits are (tokens, E), of this rank's tokens.  Numbers of 16 bits are converted to
    float32; a NaN counts as the smallest number.  With the gate "sigmoid-bias" the experts with
    the largest sum of sigmoid and `bias`, (E,), are chosen.  Where logits have no contents, the
    choice is what is `assumed`, int64 (tokens, k).
    """
    library, xp, z = backend_of(logits), namespace(logits), upcast(logits)
    scores, slope, sought = z, None, z
    if experts.gate == "sigmoid-bias":
        scores = xp.minimum(z, 0) - xp.log1p(xp.exp(-xp.abs(z)))    # log(1 / (1 + exp(-z)))
        slope = xp.exp(scores - z)
        sought = xp.exp(scores)
        if bias is not None:
            sought = sought + bias
    design = experts.design
    if design.groups > design.top_groups:
        sought = _in_best_groups(library, sought, design)
    chosen = _largest(library, sought, experts.top)
    probabilities = _softmax(xp, scores)
    if experts.gate == "switch":
        gates = _gather(library, probabilities, chosen)
    else:
        gates = _softmax(xp, _gather(library, scores, chosen))
    if design.factor != 1:
        gates *= design.factor
    # A copy, so that the pool gets the memory back, as where the choice is assumed.
    host = np.array(library.to_host(chosen)) if assumed is None else assumed
    return ChosenExperts(host, gates, probabilities, slope, experts)


def gates_backward(choice: ChosenExperts, dgates: Array) -> Array:
    """Compute the gradient of the logits, (tokens, E), from that of ``choice.gates``, (tokens, k).

    The choice is fixed.
    """
    library, xp = backend_of(dgates), namespace(dgates)
    factor = choice.experts.design.factor
    if choice.experts.gate == "switch":
        dp = _scatter(library, dgates, choice)
        if factor != 1:
            dp *= factor
        return scores_backward(dp, choice.probabilities, choice.slope)
    inner = scores_backward(dgates, choice.gates, None, factor)
    dz = _scatter(library, inner, choice)
    return dz if choice.slope is None else xp.multiply(dz, choice.slope)


def scores_backward(dp: Array, p: Array, slope: Array | None, factor: float = 1.0) -> Array:
    """Compute p (dp - sum(p dp) / factor) row by row, times the slopes of the log scores if given.

    p is `factor` times the softmax.
    """
    xp = namespace(p)
    mean = xp.sum(p * dp, axis=-1, keepdims=True)
    if factor != 1:
        mean /= factor
    dz = p * (dp - mean)
    return dz if slope is None else dz * slope


def _in_best_groups(library: Any, sought: Array, design: ExpertDesign) -> Array:
    """Return what is sought, (rows, E), with -inf outside the best groups of each row.

    A group is as good as the sum of its best two experts; among equals the lowest is taken.
    """
    xp, (rows, count) = library.xp, sought.shape
    size = count // design.groups
    members = xp.reshape(sought, (rows * design.groups, size))
    best = _gather(library, members, _largest(library, members, min(BEST_OF_GROUP, size)))
    sums = xp.reshape(xp.sum(best, axis=-1), (rows, design.groups))
    chosen = _largest(library, sums, design.top_groups)
    group = library.asarray(np.arange(count)[None, :] // size)
    hidden = group != chosen[:, :1]
    for n in range(1, design.top_groups):
        hidden = hidden & (group != chosen[:, n:n + 1])
    return xp.where(hidden, -math.inf, sought)


def _softmax(xp: Any, scores: Array) -> Array:
    """Compute the softmax of each row."""
    p = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    p /= xp.sum(p, axis=-1, keepdims=True)
    return p


def _largest(library: Any, values: Array, top: int) -> Array:
    """Return the columns of the `top` largest values of each row, (rows, top), the largest first.

    No library's promise about equal values is needed: the lowest column is asked for.
    """
    xp, (rows, count) = library.xp, values.shape
    values = xp.where(values == values, values, -math.inf)    # a NaN is not equal to itself
    columns = library.arange(0, count)[None, :]
    chosen = library.empty((rows, top), xp.int64)
    free = values == values
    for n in range(top):
        most = xp.max(xp.where(free, values, -math.inf), axis=-1, keepdims=True)
        column = xp.min(xp.where(free & (values == most), columns, count), axis=-1, keepdims=True)
        chosen[:, n:n + 1] = column
        free = free & (columns != column)
    return chosen


def _gather(library: Any, a: Array, chosen: Array) -> Array:
    """Return the values of `a`, (rows, E), in the chosen columns, (rows, k)."""
    xp, columns = library.xp, library.arange(0, a.shape[1])[None, :]
    out = library.empty(chosen.shape, a.dtype)
    for n in range(chosen.shape[1]):
        found = xp.where(columns == chosen[:, n:n + 1], a, 0)
        out[:, n:n + 1] = xp.sum(found, axis=-1, keepdims=True)
    return out


def _scatter(library: Any, values: Array, choice: ChosenExperts) -> Array:
    """Return (rows, E) with `values`, (rows, k), in the chosen columns and 0 elsewhere."""
    xp, count = library.xp, choice.probabilities.shape[1]
    columns = library.arange(0, count)[None, :]
    chosen = library.asarray(choice.chosen)
    out = library.empty((values.shape[0], count), values.dtype)
    out[...] = 0
    for n in range(values.shape[1]):
        out += xp.where(columns == chosen[:, n:n + 1], values[:, n:n + 1], 0)
    return out


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


def balance_loss(choice: ChosenExperts, totals: np.ndarray, tokens: int,
                 layers: int = 1) -> tuple[Array, Array]:
    """Compute this rank's part of the balance loss, and the gradient of the logits.

    The loss is alpha E sum_i f_i P_i, with the coefficient alpha = ``experts.balance``, the global
    shares f of `shares`, and the mean probability P over all tokens.  With p the probabilities of
    a token t, its gradient is dL/dz_tj = (alpha E / T) p_tj (f_j - sum_i f_i p_ti).  Source:
    Fedus, Zoph and Shazeer, arXiv 2101.03961, equations 4 to 6.

    Parameters as in `shares`.  The part has the shape (1,), in float64; the gradient is (tokens of
    this rank, E).
    """
    p, experts = choice.probabilities, choice.experts
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
