"""Compute the logits of a router from activations whose rows and features are divided."""

from typing import Any

from mm3d.arrays.backend import Array, namespace
from mm3d.arrays.products import matmul, matmul_nt, matmul_tn
from mm3d.grid.split import Split
from mm3d.model.builder import Builder
from mm3d.model.functional import upcast
from mm3d.model.vectors import Vector


class Router:
    """Compute logits = x W^T, in float32 at least.

    Ranks that share rows sum their terms, block by block, so that all of them have the same bits
    and choose the same experts.  `build` makes W, called `name` in the block, without "weight"; x
    is in its outer space.  The global `shape` of W is (experts, hidden); it is stored like vectors
    along the features.
    """

    def __init__(self, build: Builder, name: str, shape: tuple[int, int]) -> None:
        self.vector, space = Vector(build.outer, shape), build.outer
        self.weight = build.create_parameter(f"{name}.weight", self.vector.layout, shape)
        self._axes = [space.grid[c] for c in space.features if space.grid[c].size > 1]

    def forward(self, x: Array) -> tuple[Array, Any]:
        """Compute the logits, (tokens, experts), of this rank's rows, (tokens, features).

        Returns them with the gathered W, for `backward`.
        """
        weight = self.vector.gather_features(self.weight.value)
        return self.sum_features(matmul_nt(upcast(x), upcast(weight))), weight

    def backward(self, dlogits: Array, x: Array, saved: Any) -> Array:
        """Compute dx, in the type of the logits; add dW to the gradient."""
        dW, xp = matmul_tn(dlogits, upcast(x)), namespace(dlogits)
        self.weight.accumulate(self.vector.reduce_gradient(
            xp.astype(dW, self.weight.grad.dtype, copy=False)))
        return matmul(dlogits, upcast(saved))

    def sum_features(self, a: Array) -> Array:
        """Sum `a`, one row for each token, over the ranks that have other features of the rows."""
        for axis in self._axes:
            split = Split(axis, 0, a.shape[0])
            a = split.all_gather(split.reduce_scatter(a))
        return a
