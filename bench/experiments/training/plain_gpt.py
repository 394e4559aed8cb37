"""Compute a GPT in NumPy alone, from its parameters by name, to verify a model and to sample it.

It shares no computation with `mm3d`, so that it repeats no mistake.
"""

from dataclasses import replace
from typing import Mapping

import numpy as np

from bench.experiments.experts.plain import PlainExperts
from mm3d.config import Model
from mm3d.model.architecture import PLAIN, Architecture
from mm3d.model.experts.options import ExpertOptions

State = Mapping[str, np.ndarray]
START, TEMPERATURE = b"\n", 0.8    # of a sample: the text before it, and what divides logits


class PlainRouting:
    """Routing of micro-batches' tokens to experts, the same in each computation of a batch.

    Parameters
    ----------
    microbatches : int
        Number of parts of the batch whose tokens are routed together.

    Attributes
    ----------
    losses : float
        Losses of the routers since it was set to 0.
    """

    def __init__(self, experts: ExpertOptions, microbatches: int = 1) -> None:
        self.experts, self.microbatches, self.losses = experts, microbatches, 0.0
        self._chosen: dict[str, np.ndarray] = {}
        self.part = 0

    def compute(self, part: "PlainPart", x: np.ndarray) -> np.ndarray:
        """Compute a layer of experts, and add the losses of its router."""
        key = f"{self.part} {part.prefix}"
        begins = f"{part.prefix}experts."
        weights = {name.removeprefix(begins): a for name, a in part.state.items()
                   if name.startswith(begins)}
        layer = PlainExperts(self.experts, weights, x.reshape(-1, x.shape[-1]),
                             self._chosen.get(key),
                             sum(name.endswith("ln1.weight") for name in part.state))
        self._chosen[key] = layer.chosen
        self.losses += layer.balance_loss() + layer.z_loss()
        return layer.output().reshape(x.shape)


def logits(state: State, tokens: np.ndarray, model: Model,
           routing: PlainRouting | None = None) -> np.ndarray:
    """Compute the logits of every position, (batch, seq, vocab), in the type of the parameters.

    A model with experts needs a `routing`, and computes them in float64.
    """
    how, x = model.architecture, state["embedding.weight"][tokens]
    if how.positions == "learned":
        x = x + state["positions.weight"][:tokens.shape[1]]
    for number in range(model.layers):
        x = PlainPart(state, f"layers.{number}.", how).layer(x, model.heads, routing=routing)
    x = PlainPart(state, "", how).norm("norm", x)
    return x @ (state["head.weight"] if "head.weight" in state else state["embedding.weight"].T)


class PlainPart:
    """The linear layers and norms whose names begin with `prefix`, of an architecture."""

    def __init__(self, state: State, prefix: str, how: Architecture = PLAIN) -> None:
        self.state, self.prefix, self.how = state, prefix, how

    def layer(self, x: np.ndarray, heads: int, causal: bool = True,
              routing: PlainRouting | None = None) -> np.ndarray:
        """Compute a layer."""
        head = self.how.head or x.shape[-1] // heads
        x = x + self.linear("attention.proj", attention(
            self.linear("attention.qkv", self.norm("ln1", x)), heads, head, self.how, causal))
        wide = self.norm("ln2", x)
        if f"{self.prefix}experts.router.weight" in self.state:
            return x + routing.compute(self, wide)
        u = self.linear("mlp.up", wide)
        return x + self.linear("mlp.down", gelu(u) if self.how.perceptron == "gelu" else swiglu(u))

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """Compute x W + b; the dimensions of W after the first are joined."""
        weight, bias = self._pair(name)
        y = x @ weight.reshape(len(weight), -1)
        return y if bias is None else y + bias.reshape(-1)

    def _pair(self, name: str) -> list[np.ndarray | None]:
        return [self.state.get(f"{self.prefix}{name}.{part}") for part in ("weight", "bias")]

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """Normalize rows."""
        weight, bias = self._pair(name)
        if self.how.norm == "layer":
            x = x - x.mean(-1, keepdims=True)
        y = x / np.sqrt(np.mean(x ** 2, -1, keepdims=True) + self.how.epsilon) * weight
        return y if bias is None else y + bias


def attention(qkv: np.ndarray, heads: int, head: int, how: Architecture = PLAIN,
              causal: bool = True) -> np.ndarray:
    """Compute attention of all heads from the queries of each group, K and V.

    Parameters
    ----------
    qkv : ndarray
        (batch, seq, (group + 2) x features of all keys).
    heads, head : int
        Heads of queries, and features of each.
    how : Architecture
        Says how many heads share a key, whether positions rotate, and the window.
    causal : bool
        Whether a position attends only to itself and those before it.

    Returns
    -------
    ndarray
        (batch, seq, heads x head).
    """
    batch, seq, _ = qkv.shape
    kv = how.kv_heads or heads
    parts = qkv.reshape(batch, seq, heads // kv + 2, kv, head).transpose(0, 2, 3, 1, 4)
    q, k = parts[:, :-2], parts[:, -2]
    if how.positions == "rotary":
        q, k = rotated(q, how), rotated(k, how)
    scores = q @ k[:, None].swapaxes(-1, -2) / np.sqrt(head).astype(q.dtype)
    back = np.arange(seq)[:, None] - np.arange(seq)
    if causal:
        scores = np.where((back < 0) | (back >= (how.window or seq)), -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = weights / weights.sum(-1, keepdims=True) @ parts[:, None, -1]
    return mixed.transpose(0, 3, 2, 1, 4).reshape(batch, seq, heads * head)


def rotated(a: np.ndarray, how: Architecture) -> np.ndarray:
    """Rotate (..., positions, features), as complex numbers."""
    half = a.shape[-1] // 2
    speed = how.rotary_base ** (-np.arange(half) / half)
    if how.rotary_scaling:
        factor, low, high, original = how.rotary_scaling
        for i, one in enumerate(speed):
            length = 2 * np.pi / one
            if length > original / low:
                speed[i] = one / factor
            elif length >= original / high:
                smooth = (original / length - low) / (high - low)
                speed[i] = (1 - smooth) * one / factor + smooth * one
    turned = (a[..., :half] + 1j * a[..., half:]) * np.exp(
        1j * np.arange(a.shape[-2])[:, None] * speed)
    return np.concatenate([turned.real, turned.imag], -1).astype(a.dtype)


def gelu(x: np.ndarray) -> np.ndarray:
    """Compute GELU in its tanh form."""
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi).astype(x.dtype) * (x + 0.044715 * x ** 3)))


def swiglu(x: np.ndarray) -> np.ndarray:
    """Compute SiLU of the first half of the features times the second half."""
    gate, u = np.split(x, 2, -1)
    return u * gate / (1 + np.exp(-gate))


def mean_loss(state: State, tokens: np.ndarray, targets: np.ndarray, model: Model,
              routing: PlainRouting | None = None) -> float:
    """Compute the mean cross entropy of all targets, sequence by sequence.

    With experts it is micro-batch by micro-batch, and the mean losses of the routers are added.
    """
    parts = routing.microbatches if routing else len(tokens)
    total, losses = 0.0, 0.0
    for number, (some, wanted) in enumerate(zip(np.split(tokens, parts),
                                                np.split(targets, parts))):
        if routing:
            routing.part, routing.losses = number, 0.0
        found = logits(state, some, model, routing).astype(np.float64)
        found -= found.max(-1, keepdims=True)
        chosen = np.take_along_axis(found, wanted[..., None], -1)[..., 0]
        total += float(np.sum(np.log(np.exp(found).sum(-1)) - chosen))
        losses += routing.losses / parts if routing else 0.0
    return total / targets.size + losses


def write_sample(state: State, model: Model, length: int) -> bytes:
    """Draw bytes that the model writes after a new line, one after another.

    Parameters
    ----------
    model : Model
        What it is of; its experts are never full.
    """
    state = {name: np.asarray(a, np.float32) for name, a in state.items()}
    draw, seq = np.random.default_rng(0), model.seq
    written = list(START)
    for _ in range(length):
        seen = np.array([written[-seq:]])
        routing = PlainRouting(replace(model.experts, capacity=None)) if model.experts else None
        last = logits(state, seen, model, routing)[0, -1].astype(np.float64) / TEMPERATURE
        weights = np.exp(last - last.max())
        written.append(int(draw.choice(len(weights), p=weights / weights.sum())))
    return bytes(written[len(START):])
