"""Imitate the roundings of a right program, whatever its order of sums, kernels and ranks.

A step is computed in float64, and what each operation of a straightforward program rounds is off
by random amounts of the size of that rounding (Monte Carlo arithmetic: Parker, UCLA CSD-970002,
1997).  Programs that fuse operations round less often.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Callable

import numpy as np

from mm3d.model.attention.windows import window_mask
from mm3d.model.functional import causal_mask
from mm3d.model.rotary import Turns, frequencies

# How many operations of a layer round one after another, if none is fused.  Forward, and each has
# a gradient: of a norm the mean, two differences, the square, the root, the factor and the bias;
# of GELU by tanh the cube, its factor and sum, another factor, tanh, a sum, and two factors.
OPERATIONS = {"LayerNorm": 7, "RMSNorm": 4, "Gelu": 8, "ErfGelu": 5, "SwiGLU": 4, "Rotary": 5,
              "Linear": 2, "Residual": 1, "Embedding": 2, "ExpertsLayer": 3}
SCORES, PROBABILITIES, GRADIENTS_OF_SCORES = 2, 2, 3    # of attention
GATES = 3    # of experts, before the chosen ones' gradients are those of all logits
LOSS = 3    # of the logits' gradient: the exponential, the one of the target, the factor
SEEDS = 1000    # from those of one kind of errors to those of another
# Layers that programs may compute in another type than products, with attention and the loss.
INSIDE = {"LayerNorm", "RMSNorm", "Rotary", "ExpertsLayer"}


@dataclass(frozen=True)
class Program:
    """State how a program computes, as far as its roundings depend on it.

    Attributes
    ----------
    dtype, kept, loss : str
        The types of computation, of weights and their gradients, and of the loss.
    ranks : mapping of str to int
        Among how many ranks it divides what, as it says.
    inside : str
        The type of norms, rotary angles, softmax, routers and the gradient of the loss, where it
        is narrower than `dtype`; else "".
    """

    dtype: str
    kept: str
    loss: str = "float32"
    ranks: Mapping[str, int] = field(default_factory=dict)
    inside: str = ""

    def added(self, *what: str) -> float:
        """Return how many roundings of the result a sum over ranks makes, one after another.

        Partial sums grow: half of their number are of the size of the result.
        """
        return sum(self.ranks.get(one, 1) - 1 for one in what) / 2


def epsilon(dtype: Any) -> float:
    """Return the distance of 1 and the next number of a type."""
    return 2.0 ** -7 if str(dtype) == "bfloat16" else float(np.finfo(dtype).eps)


def is_narrow(dtype: Any) -> bool:
    """Return whether a type has 16 bits; sums are then computed in float32."""
    return str(dtype) in ("float16", "bfloat16")


class Rounder:
    """Add random errors of the size of roundings.

    `inside` is the one of what is computed in a narrower type, see `Program`.
    """

    def __init__(self, dtype: str, seed: int, inside: "Rounder | None" = None) -> None:
        self.inside = inside or self
        self.unit = epsilon(dtype) / 2
        self.sums = epsilon("float32") / 2 if is_narrow(dtype) else self.unit
        self.least = 2.0 ** -25 if dtype == "float16" else 0.0    # half of its smallest number
        self.random = np.random.default_rng(seed)

    def __call__(self, a: np.ndarray, operations: float | np.ndarray,
                 terms: int = 0) -> np.ndarray:
        """Return `a`, in float64, changed in place; what is 0 stays.

        Elements are rounded `operations` times by the size of their rows at least: a sum of ranks'
        parts, or a difference, is rounded by the size of its parts.  Each is a sum of `terms`.
        Added one after another, partial sums grow: half of the roundings are of the size of the
        result.
        """
        rows = np.sqrt(np.mean(a * a, axis=-1, keepdims=True)) if a.ndim else abs(a)
        count = operations + terms / 2 * (self.sums / self.unit) ** 2
        size = np.maximum(np.maximum(np.abs(a), rows) * self.unit * np.sqrt(count), self.least)
        a += (a != 0) * size * self.random.uniform(-1, 1, a.shape)
        return a


def imitate(gpt: Any, program: Program, seed: int, documents: np.ndarray | None = None) -> None:
    """Let a model of float64 on one rank round like a program; its batch is one micro-batch.

    `documents` are those of `bench.experiments.dump.computation.Start`.
    """
    model = gpt.config.model
    rounder = Rounder(program.dtype, seed, Rounder(program.inside, seed + SEEDS) if (
        program.inside) else None)
    (chunk,), ends = gpt.chunks, gpt.chains[-1]
    tensor = program.added("tensor")
    for block in chunk.layers.layers:
        for layer in block.layers:
            if hasattr(layer, "pair"):
                layer.pair = straightforward_attention(rounder.inside, documents)
            _round(layer, rounder, tensor)
        _round(block, rounder)
    turns = next((layer.turns for layer in chunk.layers.layers[0].layers if hasattr(
        layer, "turns")), None)    # which all layers share
    if turns is not None:
        _round_angles(turns, model.architecture, Rounder("float32", seed + 2 * SEEDS) if (
            is_narrow(program.dtype)) else rounder.inside)
    _round(ends.embedding, rounder, tensor)
    _round(ends.output.norm, rounder)
    _wrap(ends.output.head, rounder, 1 + tensor, model.hidden, model.vocab)
    logs = math.log(model.vocab) ** 2 if is_narrow(program.loss) else 0    # a logarithm's size
    _wrap_backward(ends.output.loss, rounder.inside, LOSS + logs, 0)
    # Sequences may be as many micro-batches, or on as many replicas, whose gradients are added.
    more = model.batch / 2 if is_narrow(program.kept) else 0
    once, count = gpt.step, 2 + more + program.added("data", "sequence")

    def step(tokens: np.ndarray, targets: np.ndarray) -> float:
        loss = once(tokens, targets)
        for p in gpt.trained:
            own = rounder.inside if _of_norm(p) or "router" in p.name else rounder
            own(p.grad, count + _row_sums(p, tokens) * is_narrow(program.dtype), tokens.size)
        return loss
    gpt.step = step


def _round_angles(turns: Turns, architecture: Any, rounder: Rounder) -> None:
    """Turn by angles as programs compute them, in float32 at least.

    The errors of frequencies and angles are relative: they grow with the positions.  A power is
    off by its exponent's roundings, of two factors and their product, times its logarithm; the
    first one is 1 whatever the way.
    """
    own = frequencies(architecture, turns.head)[:, None]
    rounder(own, (own != 1) * (2 + 3 * np.log(own) ** 2))
    angles = np.arange(len(turns.cos))[:, None, None] * own
    rounder(angles, np.broadcast_to(own != 1, angles.shape))
    turns.cos[...], turns.sin[...] = np.cos(angles)[..., 0], np.sin(angles)[..., 0]


def _of_norm(p: Any) -> bool:
    """Return whether a parameter is that of a norm."""
    return "ln" in p.name or p.name.startswith("norm.")


def _row_sums(p: Any, tokens: np.ndarray) -> float | np.ndarray:
    """Return how often a gradient is rounded that is summed row by row in its own type.

    PyTorch does so on CPUs: for the vectors of layer norms, and for each token's row of the table.
    """
    if p.name == "embedding.weight":
        return np.bincount(tokens.ravel(), minlength=p.shape[0])[:, None] / 2
    return tokens.size / 2 if _of_norm(p) else 0.0


def _round(layer: Any, rounder: Rounder, tensor: float = 0.0) -> None:
    """Round what a layer puts out, forward and backward; `tensor` is of a sum over ranks."""
    kind = type(layer).__name__
    if hasattr(layer, "router"):
        _round_gates(layer, rounder.inside)
    for part in ("up", "down"):    # of experts
        if hasattr(layer, part):
            _wrap_product(getattr(layer, part).product, rounder, tensor)
    terms = (0, 0)
    if kind == "Linear":
        terms = layer.weight.shape[0], math.prod(layer.weight.shape[1:])
    _wrap(layer, rounder.inside if kind in INSIDE else rounder,
          OPERATIONS.get(kind, 1) + tensor * (kind == "Linear")
          + (getattr(layer, "dropout", None) is not None), *terms)


def _round_gates(layer: Any, rounder: Rounder) -> None:
    """Round the gradients of gates of experts before they are those of all logits.

    What follows may cancel them, as where one expert is chosen and its gate is 1: errors stay.
    """
    once, back = layer._route_backward, layer.router.backward

    def backward(routing: Any, dgates: np.ndarray, *given: Any) -> Any:
        choice = routing.choice
        p, sizes = np.float64(choice.probabilities), np.float64(dgates)
        dp = np.zeros_like(p)
        np.put_along_axis(dp, choice.chosen, (rounder(sizes.copy(), GATES) - sizes) / (
            np.take_along_axis(p, choice.chosen, 1).sum(1, keepdims=True)), 1)
        errors = p * (dp - (p * dp).sum(1, keepdims=True))
        layer.router.backward = lambda dlogits, *rest: back(dlogits + errors, *rest)
        return once(routing, dgates, *given)
    layer._route_backward = backward


def _wrap(layer: Any, rounder: Rounder, operations: float, terms: int = 0,
          terms_back: int = 0) -> None:
    """Round a layer's output, and the gradient of its input."""
    once = layer.forward

    def forward(*given: Any) -> Any:
        y, saved = once(*given)
        return rounder(y, operations, terms), saved
    layer.forward = forward
    _wrap_backward(layer, rounder, operations, terms_back)


def _wrap_backward(layer: Any, rounder: Rounder, operations: float, terms: int) -> None:
    """Round the gradient of a layer's input, if it has one."""
    back = layer.backward

    def backward(*given: Any) -> Any:
        dx = back(*given)
        return dx if dx is None else rounder(dx, operations, terms)
    layer.backward = backward


def _wrap_product(product: Any, rounder: Rounder, tensor: float) -> None:
    """Round a product of experts, and the gradient of its input, with what follows at once."""
    once, back, count = product.forward, product.backward, OPERATIONS["SwiGLU"] + tensor

    def forward(A: np.ndarray, B: np.ndarray, *given: Any) -> np.ndarray:
        return rounder(once(A, B, *given), count, A.shape[-1])

    def backward(dC: np.ndarray, *given: Any) -> tuple[np.ndarray, np.ndarray]:
        dA, dB = back(dC, *given)
        return rounder(dA, count, dC.shape[-1]), dB
    product.forward, product.backward = forward, backward


def straightforward_attention(rounder: Callable = lambda a, *counts: a,
                              documents: np.ndarray | None = None) -> tuple[Callable, Callable]:
    """Return `mm3d.model.functional.attention_forward` and its backward, with roundings if any.

    Each backward pass follows its forward pass, in the same order.  With `documents`, a number
    for each position of the batch, positions see only those of the same number.
    """
    kept: list[np.ndarray] = []
    other = None if documents is None else (documents[:, :, None] != documents[:, None])[:, None]

    def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, limit: Any,
                out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        S = np.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        rounder(S, SCORES, q.shape[-1])
        if limit:
            S += (causal_mask(q, k, first) if limit is True else
                  window_mask(q, k, first, limit))
        if other is not None:
            S = np.where(other, -np.inf, S)
        top = S.max(-1, keepdims=True)
        P = np.exp(S - top)
        total = P.sum(-1, keepdims=True)
        kept.append(rounder(P / total, PROBABILITIES))
        out[...] = np.einsum("bhqk,bkhd->bqhd", kept[-1], v)
        return out, (top + np.log(total))[..., 0]

    def backward(do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, lse: np.ndarray,
                 first: int, limit: Any, *gradients: np.ndarray) -> None:
        P, (dq, dk, dv) = kept.pop(0), gradients
        dP = rounder(np.einsum("bqhd,bkhd->bhqk", do, v), 1, q.shape[-1])
        sums = (rounder(P.copy(), 1) * dP).sum(-1, keepdims=True)    # also of output times do
        dS = rounder(P * (dP - sums) / math.sqrt(q.shape[-1]), GRADIENTS_OF_SCORES)
        dv[...] = np.einsum("bhqk,bqhd->bkhd", P, do)
        dq[...] = np.einsum("bhqk,bkhd->bqhd", dS, k)
        dk[...] = np.einsum("bhqk,bqhd->bkhd", dS, q)
    return forward, backward
