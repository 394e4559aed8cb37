"""Check attention and its gradients on the blocks of one rank.

Some heads of one sequence are computed again by NumPy in float64, forward and backward.  All
heads of all sequences are checked by two identities that need no scores: with O = P V,
<dV, V> = <dO, O>, since both are the sum of P_ij dO_i V_j; and with dS the gradient of the scores
S = Q K^T, <dK, K> = <dQ, Q>, since both are the sum of dS_ij Q_i K_j.
"""

import math
from typing import Any

import numpy as np

HEADS = 4
SAMPLED = ("O of a sequence", "dQ of a sequence", "dK of a sequence", "dV of a sequence")
IDENTITIES = ("<dV, V>", "<dK, K>")
# Multiples of eps in sums of absolute values; they include errors of the exponentials.
EXACT, IDENTITY = 64, 256
# TensorFloat-32's eps is that of the factors; exponentials and sums are in float32, so that errors
# hardly reach one eps: at most 0.5 and 0.23 were seen with factors rounded, 1 and 0.34
# with factors cut off.
TF32_EXACT, TF32_IDENTITY = 4, 2


def multiples(rounding: str) -> dict[str, int]:
    """Return the multiple of eps that passes for each quantity, by the precision of products."""
    exact, identity = ((TF32_EXACT, TF32_IDENTITY) if rounding == "tf32" else
                       (EXACT, IDENTITY))
    return dict.fromkeys(SAMPLED, exact) | dict.fromkeys(IDENTITIES, identity)


def check_forward(errors: Any, layer: Any, x: np.ndarray, y: np.ndarray) -> None:
    """Check the output `y` of queries, keys and values `x`, blocks of this rank.

    x is (batch, seq, 3, features) and y (batch, seq, features); `errors`, the
    `bench.checks.layer_residuals.LayerErrors`, keeps the errors and draws the samples.
    """
    sequence, heads = _sample(errors, layer, y)
    if sequence is None:
        errors.note(layer, "O of a sequence", 0.0, 1.0)
        return
    Q, K, V, out = _gather_sequence(layer, sequence, heads, *_by_head(layer, x, y))
    P, size = _probabilities(Q, K, layer.causal)
    errors.note(layer, "O of a sequence", out - P @ V, (P @ np.abs(V)) * size)


def check_backward(errors: Any, layer: Any, x: np.ndarray, y: np.ndarray, dy: np.ndarray,
                   dx: np.ndarray) -> None:
    """Check the gradient `dx` of queries, keys and values, given the output's gradient `dy`."""
    arrays = _by_head(layer, x, y) + _by_head(layer, dx, dy)
    _check_identities(errors, layer, *arrays)
    sequence, heads = _sample(errors, layer, y)
    if sequence is None:
        for name in SAMPLED[1:]:
            errors.note(layer, name, 0.0, 1.0)
        return
    Q, K, V, _, dQ, dK, dV, dO = _gather_sequence(layer, sequence, heads, *arrays)
    P, size = _probabilities(Q, K, layer.causal)
    scale = 1 / math.sqrt(layer.head)

    def swapped(a: np.ndarray) -> np.ndarray:
        return a.swapaxes(-1, -2)
    dP, most = dO @ swapped(V), np.abs(dO) @ swapped(np.abs(V))
    dS = P * (dP - (P * dP).sum(-1, keepdims=True)) * scale
    terms = P * (most + (P * most).sum(-1, keepdims=True)) * scale * size
    for name, found, expected, bound in (
            ("dQ", dQ, dS @ K, terms @ np.abs(K)),
            ("dK", dK, swapped(dS) @ Q, swapped(terms) @ np.abs(Q)),
            ("dV", dV, swapped(P) @ dO, swapped(P * size) @ np.abs(dO))):
        errors.note(layer, f"{name} of a sequence", found - expected, bound)


def _by_head(layer: Any, qkv: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Return Q, K, V and O as (batch, seq, heads, d)."""
    split = [a.reshape(*a.shape[:-1], a.shape[-1] // layer.head, layer.head) for a in (qkv, y)]
    return [*(split[0][:, :, k] for k in range(3)), split[1]]


def _sample(errors: Any, layer: Any, y: np.ndarray) -> tuple[int | None, np.ndarray]:
    """Draw one of this rank's sequences and some of its heads, alike on ranks that share them."""
    draw = errors.random.random(1 + HEADS)
    count = y.shape[-1] // layer.head
    if not y.shape[0] or not count:
        return None, np.empty(0, int)
    return int(draw[0] * y.shape[0]), np.unique((draw[1:] * count).astype(int))


def _gather_sequence(layer: Any, sequence: int, heads: np.ndarray,
                     *arrays: np.ndarray) -> list[np.ndarray]:
    """Gather all positions of one sequence of each array: (heads, seq, d) in float64."""
    mine = [a[sequence][:, heads] for a in arrays]
    if layer.split is not None:
        everyone = layer.space.sequence_axis.comm.allgather(mine)
        mine = [np.concatenate(parts) for parts in zip(*everyone)]
    return [a.transpose(1, 0, 2).astype(np.float64) for a in mine]


def _probabilities(Q: np.ndarray, K: np.ndarray, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return softmax(Q K^T / sqrt(d)), and 1 + the largest |Q| |K|^T / sqrt(d) of each row.

    Errors of the scores grow by this factor.
    """
    scale = 1 / math.sqrt(Q.shape[-1])
    S = Q @ K.swapaxes(-1, -2) * scale
    size = 1 + (np.abs(Q) @ np.abs(K).swapaxes(-1, -2) * scale).max(-1, keepdims=True)
    if causal:
        S = np.where(np.tri(*S.shape[-2:], dtype=bool), S, -np.inf)
    P = np.exp(S - S.max(-1, keepdims=True))
    return P / P.sum(-1, keepdims=True), size


def _check_identities(errors: Any, layer: Any, Q: np.ndarray, K: np.ndarray, V: np.ndarray,
                      out: np.ndarray, dQ: np.ndarray, dK: np.ndarray, dV: np.ndarray,
                      dO: np.ndarray) -> None:
    def inner(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return <a, b> of each head of each sequence, and that of the absolute values."""
        terms = a.astype(np.float64) * b
        return terms.sum((1, 3)), np.abs(terms).sum((1, 3))
    sums = np.array([inner(dV, V), inner(dO, out), inner(dK, K), inner(dQ, Q)])
    if layer.split is not None:
        sums = layer.space.sequence_axis.comm.allreduce(sums)
    for name, (a, b) in (("<dV, V>", sums[:2]), ("<dK, K>", sums[2:])):
        errors.note(layer, name, a[0] - b[0], a[1] + b[1])
