"""Reorder a model so that it computes the same with other orders of summation.

Features of the residual stream, features inside perceptrons and sequences of the batch may be in
any order: results are those of the model in that order.  In exact arithmetic nothing changes; all
long sums run over the same terms in another order.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.experiments.dump.places import TensorId


@dataclass(frozen=True)
class Reordering:
    """State which feature of the residual stream, feature inside a perceptron, and sequence stands
    at each place.
    """

    hidden: np.ndarray
    inner: np.ndarray
    batch: np.ndarray

    @classmethod
    def draw(cls, model: Any, seed: int) -> "Reordering":
        """Draw an order; with seed 0 nothing changes its place."""
        random = np.random.default_rng(seed)
        inner = model.architecture.inner or 4 * model.hidden
        return cls(*(random.permutation(n) if seed else np.arange(n)
                     for n in (model.hidden, inner, model.batch)))

    def back(self) -> "Reordering":
        """Return the order that undoes this one."""
        return Reordering(*map(np.argsort, (self.hidden, self.inner, self.batch)))

    def parameter(self, name: str, a: np.ndarray) -> np.ndarray:
        """Return a parameter, of the public shape, in this order."""
        part = name.removeprefix("layers.").partition(".")[2] if (
            name.startswith("layers.")) else name
        if part.startswith("experts"):    # routing is discrete: it stays as it is
            return a[:, self.hidden] if part == "experts.up.weight" else a[..., self.hidden]
        if part in ("attention.qkv.weight", "head.weight"):
            return a[self.hidden]
        if part == "mlp.up.weight":
            return self._inner(a[self.hidden])
        if part == "mlp.up.bias":
            return self._inner(a)
        if part == "mlp.down.weight":
            return a[self.inner][:, self.hidden]
        return a if part == "attention.qkv.bias" else a[..., self.hidden]

    def _inner(self, a: np.ndarray) -> np.ndarray:
        """Reorder the last dimension: features inside, of one product or two side by side."""
        gates = a.reshape(*a.shape[:-1], -1, len(self.inner))
        return gates[..., self.inner].reshape(a.shape)

    def sequences(self, a: np.ndarray) -> np.ndarray:
        """Return tokens or targets in this order."""
        return a[self.batch]

    def output(self, place: TensorId, a: np.ndarray) -> np.ndarray:
        """Return a module's output, its gradient or its mask in this order."""
        a = a[self.batch]
        return a if place.name == "lm_head" else a[..., self.hidden]
