"""Compute a GPT in NumPy alone, from its parameters by name, to verify a model and to sample it.

It shares no computation with `mm3d`, so that it repeats no mistake.
"""

from dataclasses import replace
from typing import Mapping

import numpy as np

from bench.experiments.experts.plain import PlainExperts
from mm3d.model.experts.options import ExpertOptions

State = Mapping[str, np.ndarray]
EPS = 1e-5


class Routing:
    """Routing of micro-batches' tokens to experts, the same in each computation of a batch.

    Parameters
    ----------
    experts : ExpertOptions
        The options.
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

    def compute(self, part: "_Part", x: np.ndarray) -> np.ndarray:
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


def logits(state: State, tokens: np.ndarray, heads: int,
           routing: Routing | None = None) -> np.ndarray:
    """Compute the logits of every position, (batch, seq, vocab), in the type of the parameters.

    A model with experts needs a `routing`, and computes them in float64.
    """
    x = state["embedding.weight"][tokens] + state["positions.weight"][:tokens.shape[1]]
    layer = 0
    while f"layers.{layer}.ln1.weight" in state:
        p = _Part(state, f"layers.{layer}.")
        x = x + p.linear("attention.proj", attention(
            p.linear("attention.qkv", p.norm("ln1", x)), heads))
        wide = p.norm("ln2", x)
        if f"layers.{layer}.experts.router.weight" in state:
            x = x + routing.compute(p, wide)
        else:
            x = x + p.linear("mlp.down", gelu(p.linear("mlp.up", wide)))
        layer += 1
    x = _Part(state, "").norm("norm", x)
    return x @ (state["head.weight"] if "head.weight" in state else state["embedding.weight"].T)


class _Part:
    """The linear layers and norms whose names begin with `prefix`."""

    def __init__(self, state: State, prefix: str) -> None:
        self.state, self.prefix = state, prefix

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        weight, bias = (self.state[f"{self.prefix}{name}.{part}"] for part in ("weight", "bias"))
        return x @ weight + bias

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        weight, bias = (self.state[f"{self.prefix}{name}.{part}"] for part in ("weight", "bias"))
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt(np.mean(centred ** 2, -1, keepdims=True) + EPS) * weight + bias


def attention(qkv: np.ndarray, heads: int) -> np.ndarray:
    """Compute causal attention of all heads from Q | K | V, (batch, seq, 3 hidden)."""
    batch, seq, width = qkv.shape
    q, k, v = qkv.reshape(batch, seq, 3, heads, -1).transpose(2, 0, 3, 1, 4)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]).astype(q.dtype)
    scores = np.where(np.tri(seq, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = weights / weights.sum(-1, keepdims=True) @ v
    return mixed.swapaxes(1, 2).reshape(batch, seq, width // 3)


def gelu(x: np.ndarray) -> np.ndarray:
    """Compute GELU in its tanh form."""
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi).astype(x.dtype) * (x + 0.044715 * x ** 3)))


def mean_loss(state: State, tokens: np.ndarray, targets: np.ndarray, heads: int,
              routing: Routing | None = None) -> float:
    """Compute the mean cross entropy of all targets, sequence by sequence.

    With experts it is micro-batch by micro-batch, and the mean losses of the routers are added.
    """
    parts = routing.microbatches if routing else len(tokens)
    total, losses = 0.0, 0.0
    for number, (some, wanted) in enumerate(zip(np.split(tokens, parts),
                                                np.split(targets, parts))):
        if routing:
            routing.part, routing.losses = number, 0.0
        found = logits(state, some, heads, routing).astype(np.float64)
        found -= found.max(-1, keepdims=True)
        chosen = np.take_along_axis(found, wanted[..., None], -1)[..., 0]
        total += float(np.sum(np.log(np.exp(found).sum(-1)) - chosen))
        losses += routing.losses / parts if routing else 0.0
    return total / targets.size + losses


def write_sample(state: State, heads: int, length: int, seed: int = 0, start: bytes = b"\n",
                 temperature: float = 0.8, experts: ExpertOptions | None = None) -> bytes:
    """Draw bytes that the model writes after `start`, one after another.

    Parameters
    ----------
    state : mapping
        Global parameters by name.
    heads : int
        Attention heads.
    length : int
        Number of bytes.
    seed : int
        Seed of the draws.
    start : bytes
        The text before the sample, not returned; at least one byte.
    temperature : float
        Logits are divided by it.
    experts : ExpertOptions, optional
        Those of a model that has some; none is full.
    """
    state = {name: np.asarray(a, np.float32) for name, a in state.items()}
    draw, seq = np.random.default_rng(seed), len(state["positions.weight"])
    written = list(start)
    for _ in range(length):
        seen = np.array([written[-seq:]])
        routing = Routing(replace(experts, capacity=None)) if experts else None
        last = logits(state, seen, heads, routing)[0, -1].astype(np.float64) / temperature
        weights = np.exp(last - last.max())
        written.append(int(draw.choice(len(weights), p=weights / weights.sum())))
    return bytes(written[len(start):])
