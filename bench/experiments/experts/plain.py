"""Compute a layer of experts in NumPy, token by token and expert by expert, in float64.

It shares no computation with `mm3d.model.experts`, whose results it verifies.
"""

import math
from typing import Mapping

import numpy as np

from mm3d.model.experts.options import ExpertOptions

WEIGHTS = ("up.weight", "up.bias", "down.weight", "down.bias")


class PlainExperts:
    """The layer as its formulas say.

    Parameters
    ----------
    parameters : mapping of str to ndarray
        "router.weight" and so on, as in `mm3d`; with "router.bias" where the gate has one.
    x : ndarray
        (tokens, hidden).
    chosen : ndarray, optional
        (tokens, k): the experts that a router of other precision, or other parameters, chose; by
        default those with the largest scores.
    layers : int
        Layers of the model, which the convention "megablocks" divides the balance loss by.

    Attributes
    ----------
    logits, probabilities, gates : ndarray
        (tokens, E) twice, and (tokens, k).
    kept : ndarray of bool
        (tokens, k): which pairs the experts take.
    counts : ndarray of int64
        (k, E): how many tokens have each expert as their first, second ... choice.
    """

    def __init__(self, experts: ExpertOptions, parameters: Mapping[str, np.ndarray], x: np.ndarray,
                 chosen: np.ndarray | None = None, layers: int = 1) -> None:
        self.experts, self.x, self.layers = experts, x.astype(np.float64), layers
        self.a = {name: a.astype(np.float64) for name, a in parameters.items()}
        self.logits = self.x @ self.a["router.weight"].T
        scores = np.exp(self.logits - self.logits.max(1, keepdims=True))
        if experts.gate == "sigmoid-bias":
            scores = 1 / (1 + np.exp(-self.logits))
        self.scores = scores
        if chosen is None:
            sought = self._in_groups(scores + self.a.get("router.bias", 0.0))
            chosen = np.argsort(-sought, axis=1, kind="stable")[:, :experts.top]
        self.chosen = chosen
        self.probabilities = scores / scores.sum(1, keepdims=True)
        of_chosen = np.take_along_axis(scores, chosen, 1)
        whole = scores if experts.gate == "switch" else of_chosen
        self.gates = experts.design.factor * of_chosen / whole.sum(1, keepdims=True)
        self.counts = np.zeros(chosen.shape[1:] + (experts.count,), np.int64)
        for n, column in enumerate(chosen.T):
            np.add.at(self.counts[n], column, 1)
        self.kept = self._keep()

    def _in_groups(self, sought: np.ndarray) -> np.ndarray:
        """Return what is sought, with -inf in groups of experts that a token does not go to."""
        design, found = self.experts.design, np.full_like(sought, -np.inf)
        size = self.experts.count // design.groups
        for row, scores in zip(found, sought):
            sums = [np.sort(part)[::-1][:2].sum() for part in np.split(scores, design.groups)]
            for group in np.argsort(-np.array(sums), kind="stable")[:design.top_groups]:
                own = slice(group * size, (group + 1) * size)
                row[own] = scores[own]
        return found

    def choice_error(self) -> float:
        """Return by how much a logit that was passed over exceeds one that was chosen.

        It is relative to the largest logit, or with "sigmoid-bias" score; 0 for exact choices.
        """
        sought = self.scores if self.experts.gate == "sigmoid-bias" else self.logits
        picked = np.take_along_axis(sought, self.chosen, 1)
        rest = sought.copy()
        np.put_along_axis(rest, self.chosen, -np.inf, 1)
        gaps = [rest.max(1) - picked.min(1), *(b - a for a, b in zip(picked.T, picked.T[1:]))]
        return float(np.max([0.0, *(gap.max() for gap in gaps)]) / np.abs(sought).max())

    def _keep(self) -> np.ndarray:
        """Return which pairs experts take, one after the other, until they are full."""
        experts, (tokens, top) = self.experts, self.chosen.shape
        kept = np.ones((tokens, top), bool)
        if experts.capacity is None:
            return kept
        full = capacity(experts, tokens)
        taken = [0] * experts.count
        pairs = [(t, n) for t in range(tokens) for n in range(top)]
        if experts.dropping_order == "choice":
            pairs = [(t, n) for n in range(top) for t in range(tokens)]
        for t, n in pairs:
            expert = self.chosen[t, n]
            kept[t, n] = taken[expert] < full
            taken[expert] += 1
        return kept

    def output(self) -> np.ndarray:
        """Compute the output, (tokens, hidden)."""
        y = np.zeros_like(self.x)
        for e in range(self.experts.count):
            tokens, gate, _, (_, _, r) = self._expert(e)
            y[tokens] += gate * r
        if self.experts.design.shared is not None:
            y += self._shared()
        return y

    def _shared(self) -> np.ndarray:
        """Compute the output of the shared expert, (tokens, hidden)."""
        a = {name.removeprefix("shared."): one for name, one in self.a.items()}
        g, _ = gelu_and_slope(self.x @ a["up.weight"] + a["up.bias"])
        y = g @ a["down.weight"] + a["down.bias"]
        return y / (1 + np.exp(-self.x @ a["gate.weight"].T)) if "gate.weight" in a else y

    def _expert(self, e: int) -> tuple:
        """Compute an expert: its tokens, their gates and choices; slope, activation and result.

        With SwiGLU the slope is None: `gradients` are those of GELU.
        """
        a = self.a
        tokens, choice = np.nonzero((self.chosen == e) & self.kept)
        gate = self.gates[tokens, choice][:, None]
        up = a["up.weight"][e]
        u = self.x[tokens] @ up.reshape(len(up), -1) + self._bias("up", e)
        if up.ndim == 3:    # (hidden, 2, features)
            opened, u = np.split(u, 2, -1)
            g, slope = opened / (1 + np.exp(-opened)) * u, None
        else:
            g, slope = gelu_and_slope(u)
        return tokens, gate, choice, (slope, g, g @ a["down.weight"][e] + self._bias("down", e))

    def _bias(self, name: str, e: int) -> np.ndarray | float:
        """Return the bias of a product of an expert, as a vector; 0 where it has none."""
        return self.a[f"{name}.bias"][e].reshape(-1) if f"{name}.bias" in self.a else 0.0

    def gradients(self, dy: np.ndarray) -> dict[str, np.ndarray]:
        """Compute the gradients of x, as "input", and of all parameters from the output's."""
        a, dx, dgates = self.a, np.zeros_like(self.x), np.zeros(self.chosen.shape)
        found = {name: np.zeros_like(a[name]) for name in WEIGHTS}
        for e in range(self.experts.count):
            tokens, gate, choice, (slope, g, r) = self._expert(e)
            dr = gate * dy[tokens]
            dgates[tokens, choice] = (dy[tokens] * r).sum(1)
            du = (dr @ a["down.weight"][e].T) * slope
            found["down.weight"][e], found["down.bias"][e] = g.T @ dr, dr.sum(0)
            found["up.weight"][e], found["up.bias"][e] = self.x[tokens].T @ du, du.sum(0)
            dx[tokens] += du @ a["up.weight"][e].T
        dlogits = self._logits_gradient(dgates)
        dx += dlogits @ a["router.weight"]
        return {**found, "input": dx, "router.weight": dlogits.T @ self.x}

    def _logits_gradient(self, dgates: np.ndarray) -> np.ndarray:
        """Compute the gradient of the logits, through the gates, balance loss and z-loss."""
        experts, tokens, p = self.experts, len(self.x), self.probabilities
        wide = np.zeros_like(p)
        np.put_along_axis(wide, self.chosen, dgates, 1)
        slope = 1 - self.scores if experts.gate == "sigmoid-bias" else 1.0
        weights = p
        if experts.gate != "switch":
            weights = np.zeros_like(p)
            np.put_along_axis(weights, self.chosen, self.gates, 1)
        dz = weights * (wide - (weights * wide).sum(1, keepdims=True)) * slope
        share = self._share()
        factor = experts.balance * experts.count / tokens
        dz += factor * p * (share - (p * share).sum(1, keepdims=True)) * slope
        top = self.logits.max(1, keepdims=True)
        terms = np.exp(self.logits - top)
        lse = top + np.log(terms.sum(1, keepdims=True))
        return dz + 2 * experts.z / tokens * lse * terms / terms.sum(1, keepdims=True)

    def _share(self) -> np.ndarray:
        """Return each expert's share of the tokens, (E,), as the balance loss counts it."""
        pairs, every = self.counts.sum(0), self.chosen.size
        whose = self.experts.convention
        if whose == "huggingface":
            return pairs / len(self.x)
        if whose == "deepspeed" and len(self.counts) < 3:
            return self.counts[0] / len(self.x)
        return pairs / (every * self.layers if whose == "megablocks" else every)

    def balance_loss(self) -> float:
        """Return the balance loss."""
        scale = self.experts.balance * self.experts.count
        return float(scale * (self._share() * self.probabilities.mean(0)).sum())

    def z_loss(self) -> float:
        """Return the z-loss."""
        top = self.logits.max(1)
        lse = top + np.log(np.exp(self.logits - top[:, None]).sum(1))
        return float(self.experts.z * (lse ** 2).mean())


def capacity(experts: ExpertOptions, tokens: int) -> int:
    """Return how many tokens an expert takes, by the formulas of the convention's project."""
    whose, least = experts.convention, experts.min_capacity
    share = experts.top * tokens / experts.count
    if whose == "deepspeed":
        of_one = np.float32(tokens / experts.count)
        taken, usual = int(np.ceil(of_one * np.float32(experts.capacity * experts.top))), 4
    elif whose == "megablocks":
        taken, usual = int(experts.capacity * share), 0
    else:
        exact = experts.capacity * share
        taken, usual = math.ceil(round(exact, 9) if whose == "mm3d" else exact), 0
    return max(taken, usual if least is None else least)


def gelu_and_slope(u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute the tanh form of GELU, and its derivative."""
    c = math.sqrt(2 / math.pi)
    t = np.tanh(c * (u + 0.044715 * u ** 3))
    return u / 2 * (1 + t), (1 + t) / 2 + u / 2 * (1 - t * t) * c * (1 + 3 * 0.044715 * u * u)
