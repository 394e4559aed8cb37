"""Compute the logits of a router from activations whose rows and features are divided."""

from typing import Any

import numpy as np

from mm3d.arrays.backend import Array, accumulation_dtype, namespace
from mm3d.arrays.products import matmul, matmul_nt, matmul_tn
from mm3d.grid.activations import Space
from mm3d.grid.split import Split
from mm3d.model.experts.jitter import draw_factors
from mm3d.model.masks import MaskKey
from mm3d.model.parameters import Parameter
from mm3d.model.vectors import Vector


class Router:
    """Compute logits = (x * jitter) W^T, in float32 at least.

    Ranks that share rows sum their terms, block by block, so that all of them have the same bits
    and choose the same experts.

    Parameters
    ----------
    space : Space
        Space of x, the outer one.
    vector : Vector
        Storage of W along the features of the space.
    weight : Parameter
        W, of global shape (experts, hidden), in the layout ``vector.layout``.
    jitter : float
        See `mm3d.Experts`.
    name : str
        Name of the router in the model; another name has other factors.
    key : MaskKey
        Seed, step and place in the batch of the factors; with the place None there are none.
    """

    def __init__(self, space: Space, vector: Vector, weight: Parameter, jitter: float, name: str,
                 key: MaskKey) -> None:
        self.space, self.vector, self.weight = space, vector, weight
        self.jitter, self.name, self.key = jitter, name, key
        self._axes = [space.grid[c] for c in space.features if space.grid[c].size > 1]

    def forward(self, x: Array) -> tuple[Array, Any]:
        """Compute the logits, (tokens, experts), of this rank's rows, (tokens, features).

        Returns
        -------
        logits, saved : Array, Any
            The logits, and the gathered W for `backward`.
        """
        weight = self.vector.gather_features(self.weight.value)
        return self.sum_features(matmul_nt(self._inputs(x), _upcast(weight))), weight

    def backward(self, dlogits: Array, x: Array, saved: Any) -> Array:
        """Compute dx, in the type of the logits; add dW to the gradient."""
        dW, xp = matmul_tn(dlogits, self._inputs(x)), namespace(dlogits)
        self.weight.accumulate(self.vector.reduce_gradient(
            xp.astype(dW, self.weight.grad.dtype, copy=False)))
        dx = matmul(dlogits, _upcast(saved))
        factors = self._draw_factors(x, dx.dtype)
        if factors is not None:
            dx *= factors
        return dx

    def sum_features(self, a: Array) -> Array:
        """Sum `a`, one row for each token, over the ranks that have other features of the rows."""
        for axis in self._axes:
            split = Split(axis, 0, a.shape[0])
            a = split.all_gather(split.reduce_scatter(a))
        return a

    def _inputs(self, x: Array) -> Array:
        """Return x in the type of the logits, times the factors."""
        x = _upcast(x)
        factors = self._draw_factors(x, x.dtype)
        return x if factors is None else x * factors

    def _draw_factors(self, x: Array, dtype: Any) -> Array | None:
        """Draw this rank's factors, in the shape of x; None where there are none."""
        if not self.jitter or self.key.place is None:
            return None
        grid, (step, first) = self.space.grid, self.key.place
        features = self.vector.shape[1]
        rows, *rest = self.space.layout().slices(
            grid, (self.space.batch, self.space.seq, features))
        place = (slice(first + rows.start, first + rows.stop), *rest)
        name = str(dtype).rpartition(".")[2]
        return grid.backend.from_host(tuple(x.shape), name, lambda: draw_factors(
            self.key.seed, step, self.name, self.space.seq, place, self.jitter,
            np.dtype(name)).reshape(tuple(x.shape)))


def _upcast(a: Array) -> Array:
    """Convert `a` to float32 if it has 16 bits."""
    return namespace(a).astype(a, accumulation_dtype(a), copy=False)
