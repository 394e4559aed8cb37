"""Normalize rows by the root of their mean square."""

from typing import Any, Callable

from mm3d.arrays.backend import Array, accumulation_dtype, backend_of, namespace
from mm3d.arrays.elementwise import row_blocks
from mm3d.model.architecture import Architecture
from mm3d.model.builder import Builder
from mm3d.model.functional import sum_row, upcast
from mm3d.model.layers import LayerNorm
from mm3d.model.vectors import Vector, scale_backward, scale_forward
from mm3d.schemes.passes import ALONE, Pass


def rms_forward(x: Array, features: int, eps: float, total: Callable[[Array], Array],
                out: Array) -> tuple[Array, Array]:
    """Divide rows by sqrt(mean(x^2) + eps).

    Source: Zhang and Sennrich, arXiv 1910.07467.  Parameters and results as in
    `mm3d.model.functional.normalize_forward`, with the mean square for the variance.
    """
    library, xp = backend_of(x), namespace(x)
    squares = library.empty((*x.shape[:-1], 1), accumulation_dtype(x))
    for u, s in row_blocks(library, x, squares):
        u = upcast(u)
        s[...] = sum_row(xp, u * u)
    rstd = 1 / xp.sqrt(total(squares) / features + eps)
    for u, y, r in row_blocks(library, x, out, rstd):
        y[...] = xp.astype(upcast(u) * r, y.dtype, copy=False)
    return out, rstd


def rms_backward(dy: Array, xhat: Array, rstd: Array, features: int,
                 total: Callable[[Array], Array], out: Array) -> Array:
    """Compute dx = rstd (dy - xhat mean(dy xhat)) in `out`, for `rms_forward`."""
    library, xp = backend_of(dy), namespace(dy)
    sums = library.empty(rstd.shape, rstd.dtype)
    for g, h, s in row_blocks(library, dy, xhat, sums):
        s[...] = sum_row(xp, upcast(g) * upcast(h))
    means = total(sums) / features
    for g, h, r, m, dx in row_blocks(library, dy, xhat, rstd, means, out):
        dx[...] = xp.astype((upcast(g) - upcast(h) * m) * r, dx.dtype, copy=False)
    return out


class RMSNorm:
    """Compute y = gamma * x / sqrt(mean(x^2) + eps) over the features.

    Ranks that share rows sum their squares: half of what `LayerNorm` moves for them.

    Parameters
    ----------
    build : Builder
        Makes gamma; x and y are in its outer space.
    name : str
        Name of the layer in its block.
    hidden : int
        Global number of features.
    eps : float
        Added to the mean square.
    """

    def __init__(self, build: Builder, name: str, hidden: int, eps: float) -> None:
        build.named(self, name, name)
        self.space, self.hidden, self.eps = build.outer, hidden, eps
        self.vector, self.empty = Vector(self.space, (hidden,)), self.space.allocator(hidden)
        self.weight = build.create_parameter(f"{name}.weight", self.vector.layout, (hidden,))
        self.parameters, self.vectors = [self.weight], [(self.weight, self.vector)]

    def forward(self, x: Array, within: Pass | None = None) -> tuple[Array, Any]:
        """Compute the normalized rows times gamma."""
        own = self.space.grid.backend.empty(x.shape, x.dtype)    # never gathered
        xhat, rstd = rms_forward(x, self.hidden, self.eps, self.space.sum_features, own)
        y, gamma_l = scale_forward(xhat, (within or ALONE).vector_of(self.weight), self.vector,
                                   out=self.empty(x.dtype))
        return y, (xhat, rstd, gamma_l)

    def backward(self, dy: Array, saved: Any, within: Pass | None = None) -> Array:
        """Compute dx; add the gradient of gamma."""
        xhat, rstd, gamma_l = saved
        dxhat, dgamma = scale_backward(dy, xhat, gamma_l, self.empty(dy.dtype),
                                       self.weight.has_master)
        (within or ALONE).accumulate_terms(self.weight, self.vector, dgamma)
        return rms_backward(dxhat, xhat, rstd, self.hidden, self.space.sum_features, out=dxhat)


def make_norm(build: Builder, name: str, hidden: int,
              architecture: Architecture) -> LayerNorm | RMSNorm:
    """Make the norm of an architecture; parameters as in `LayerNorm`."""
    kind = RMSNorm if architecture.norm == "rms" else LayerNorm
    return kind(build, name, hidden, architecture.epsilon)
