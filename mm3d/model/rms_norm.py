"""Normalize rows by the root of their mean square."""

from typing import Callable

from mm3d.arrays.backend import Array, accumulation_dtype, backend_of, namespace
from mm3d.arrays.elementwise import row_blocks
from mm3d.model.architecture import Architecture
from mm3d.model.builder import Builder
from mm3d.model.functional import prefer_backend_kernel, sum_row, upcast
from mm3d.model.layers import LayerNorm


@prefer_backend_kernel
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


@prefer_backend_kernel
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


class RMSNorm(LayerNorm):
    """Compute y = gamma * x / sqrt(mean(x^2) + eps) over the features; parameters as there.

    Ranks that share rows sum their squares: half of what `LayerNorm` moves for them.
    """

    normalize = rms_forward, rms_backward
    parts = ("weight",)


def make_norm(build: Builder, name: str, hidden: int,
              architecture: Architecture) -> LayerNorm:
    """Make the norm of an architecture; parameters as in `LayerNorm`."""
    kind = RMSNorm if architecture.norm == "rms" else LayerNorm
    return kind(build, name, hidden, architecture.epsilon)
