"""Compute elementwise functions and attention with NumPy: in place, in blocks that stay in cache.

`Kernels` has the functions of `mm3d.model.functional` that NumPy computes faster in this way,
under the same names and with the same arguments; the tests compare the two.  A first touch of new
memory costs more than most of the arithmetic, so no intermediate array is as large as an
activation: results go to arrays of the caller, intermediate values to a few blocks of memory.
"""

import math
import sys
from types import ModuleType
from typing import Any, Callable, Iterator

import numpy as np

from mm3d.arrays.blocks import GELU_CUBIC, GELU_SCALE, by_head, head_blocks, row_blocks

Array = Any


class Kernels:
    """NumPy's versions of functions of `mm3d.model.functional`, which document them.

    Parameters
    ----------
    library : Backend
        Its `empty` allocates memory, and its `xp` has NumPy's functions with their ``out``.

    Attributes
    ----------
    dtypes : tuple of dtype
        The types of arrays that the kernels take.
    """

    dtypes = (np.dtype(np.float32), np.dtype(np.float64))

    def __init__(self, library: Any) -> None:
        self.library = library

    @property
    def np(self) -> ModuleType | Any:
        """NumPy, or its substitute in a dry run or while a step is observed."""
        return self.library.xp

    def _blocks(self, *arrays: Array, spare: int = 0) -> Iterator[tuple[Array, ...]]:
        """Iterate over `row_blocks`, each with `spare` new blocks like the first view."""
        more: list[Array] = []
        for views in row_blocks(self.library, *arrays):
            rows = views[0].shape[0]
            if not more:
                more = [self.library.empty(views[0].shape, views[0].dtype) for _ in range(spare)]
            yield *views, *(a[:rows, :] for a in more)

    def bias_gelu_forward(self, x: Array, b: Array, out: Array) -> Array:
        np = self.np
        for v, y, u in self._blocks(x, out, spare=1):
            np.add(v, b, out=u)
            np.multiply(u, u, out=y)
            np.multiply(y, GELU_SCALE * GELU_CUBIC, out=y)
            np.add(y, GELU_SCALE, out=y)
            np.multiply(y, u, out=y)
            np.tanh(y, out=y)
            np.add(y, 1, out=y)
            np.multiply(y, u, out=y)
            np.multiply(y, 0.5, out=y)
        return out

    def bias_gelu_backward(self, dy: Array, x: Array, b: Array, out: Array,
                           keep_float32: bool = False) -> tuple[Array, Array]:
        """Compute dx and db; with u = x + b, z the argument of tanh and t = tanh z:
        dx = dy (1 + t) (1/2 + u z'/2 (1 - t))."""
        np = self.np
        for g, v, dx, u, t, rest in self._blocks(dy, x, out, spare=3):
            np.add(v, b, out=u)
            np.multiply(u, u, out=dx)
            np.multiply(dx, GELU_SCALE * GELU_CUBIC, out=t)
            np.add(t, GELU_SCALE, out=t)
            np.multiply(t, u, out=t)
            np.tanh(t, out=t)
            np.multiply(dx, 1.5 * GELU_SCALE * GELU_CUBIC, out=dx)
            np.add(dx, GELU_SCALE / 2, out=dx)
            np.multiply(dx, u, out=dx)
            np.subtract(1, t, out=rest)
            np.multiply(dx, rest, out=dx)
            np.add(dx, 0.5, out=dx)
            np.add(t, 1, out=t)
            np.multiply(dx, t, out=dx)
            np.multiply(dx, g, out=dx)
        return out, self.sum_rows(out)

    def add_rows(self, a: Array, b: Array, out: Array) -> Array:
        return self.np.add(a, b, out=out)

    def scale_rows(self, a: Array, b: Array, out: Array) -> Array:
        return self.np.multiply(a, b, out=out)

    def sum_rows(self, a: Array, keep_float32: bool = False) -> Array:
        return self._sum_rows(lambda u, out: self.np.sum(u, axis=0, out=out), a)

    def sum_products(self, a: Array, b: Array, keep_float32: bool = False) -> Array:
        return self._sum_rows(lambda u, v, out: self.np.einsum("ij,ij->j", u, v, out=out), a, b)

    def _sum_rows(self, add: Callable[..., Array], *arrays: Array) -> Array:
        """Sum `add` over all rows, part by part where the rows are not contiguous."""
        first = arrays[0]
        total, part = (self.library.empty(first.shape[-1:], first.dtype) for _ in range(2))
        total[...] = 0
        for rows in row_blocks(self.library, *arrays, block=sys.maxsize):
            self.np.add(total, add(*rows, out=part), out=total)
        return total

    def normalize_forward(self, x: Array, features: int, eps: float,
                          total: Callable[[Array], Array], out: Array) -> tuple[Array, Array]:
        np, empty = self.np, self.library.empty
        sums, squares = empty((*x.shape[:-1], 1), x.dtype), empty((*x.shape[:-1], 1), x.dtype)
        ones = self._ones(x.shape[-1], x.dtype)
        for u, s in self._blocks(x, sums):
            np.vecdot(u, ones, out=s[:, 0])
        mean = total(sums)
        np.multiply(mean, 1 / features, out=mean)
        for u, m, y, s in self._blocks(x, mean, out, squares):
            np.subtract(u, m, out=y)
            np.vecdot(y, y, out=s[:, 0])
        variance = total(squares)
        rstd = empty(variance.shape, x.dtype)
        np.multiply(variance, 1 / features, out=rstd)
        np.add(rstd, eps, out=rstd)
        np.sqrt(rstd, out=rstd)
        np.divide(1, rstd, out=rstd)
        return self._scale_rows(out, rstd), rstd

    def _ones(self, length: int, dtype: Any) -> Array:
        """Allocate a row of ones: a dot product with it sums a row at twice the speed of `sum`."""
        ones = self.library.empty((length,), dtype)
        ones[...] = 1
        return ones

    def _scale_rows(self, a: Array, by: Array) -> Array:
        """Multiply each row of `a` by its own factor, in place."""
        for u, r in self._blocks(a, by):
            self.np.multiply(u, r, out=u)
        return a

    def normalize_backward(self, dy: Array, xhat: Array, rstd: Array, features: int,
                           total: Callable[[Array], Array], out: Array) -> Array:
        np = self.np
        sums = self.library.empty((*rstd.shape[:-1], 2), rstd.dtype)
        ones = self._ones(dy.shape[-1], dy.dtype)
        for g, h, s in self._blocks(dy, xhat, sums):
            np.vecdot(g, ones, out=s[:, 0])
            np.vecdot(g, h, out=s[:, 1])
        means = total(sums)
        np.multiply(means, 1 / features, out=means)
        for g, h, r, m, dx, t in self._blocks(dy, xhat, rstd, means, out, spare=1):
            np.multiply(h, m[:, 1:2], out=t)
            np.subtract(g, t, out=dx)
            np.subtract(dx, m[:, 0:1], out=dx)
            np.multiply(dx, r, out=dx)
        return out

    def softmax_statistics(self, logits: Array, sums: bool) -> Array:
        np, out = self.np, self.library.empty((logits.shape[0], 4), logits.dtype)
        out[...] = 0
        if not logits.shape[1]:
            out[:, 0] = -math.inf
            return out
        ones = self._ones(logits.shape[1], logits.dtype)
        for u, s, t in self._blocks(logits, out, spare=1):
            np.max(u, axis=-1, out=s[:, 0])
            np.subtract(u, s[:, 0:1], out=t)
            np.exp(t, out=t)
            np.vecdot(t, ones, out=s[:, 1])
            if sums:
                np.vecdot(u, ones, out=s[:, 3])
        return out

    def softmax_gradient(self, logits: Array, lse: Array, scale: Array, shift: Array,
                         out: Array) -> Array:
        np = self.np
        for u, m, a, b, y in self._blocks(logits, lse, scale, shift, out):
            np.subtract(u, m, out=y)
            np.exp(y, out=y)
            np.multiply(y, a, out=y)
            np.subtract(y, b, out=y)
        return out

    def attention_forward(self, q: Array, k: Array, v: Array, first: int, causal: bool,
                          out: Array) -> tuple[Array, Array]:
        np, (batch, queries, heads, _) = self.np, q.shape
        lse = self.library.empty((batch, heads, queries), q.dtype)
        mask = self._causal_mask(q, k, first) if causal else None
        ones = self._ones(k.shape[1], q.dtype)
        for b, some, (P, Q, sums) in self._head_blocks(q, k, "qk", "qd", "q"):
            K, V, y = (by_head(np, a[b, :, some, :]) for a in (k, v, out))
            top = lse[b, some, :]
            np.multiply(by_head(np, q[b, :, some, :]), 1 / math.sqrt(q.shape[-1]), out=Q)
            self._scores(Q, K, mask, P)
            np.max(P, axis=-1, out=top)
            np.subtract(P, top[:, :, None], out=P)
            np.exp(P, out=P)
            np.vecdot(P, ones, out=sums)
            np.matmul(P, V, out=y)
            np.divide(y, sums[:, :, None], out=y)
            np.log(sums, out=sums)
            np.add(top, sums, out=top)
        return out, lse

    def attention_backward(self, do: Array, q: Array, k: Array, v: Array, lse: Array, first: int,
                           causal: bool, dq: Array, dk: Array, dv: Array) -> None:
        """Compute dq, dk and dv; one product gives Q K^T - lse, as [Q, -lse] [K, 1]^T."""
        np, scale, d = self.np, 1 / math.sqrt(q.shape[-1]), q.shape[-1]
        mask = self._causal_mask(q, k, first) if causal else None
        blocks = self._head_blocks(q, k, "qk", "qk", "qe", "ke", "q")
        for b, some, (P, dS, Q, K, sums) in blocks:
            V, dO, dQ, dK, dV = (by_head(np, a[b, :, some, :]) for a in (v, do, dq, dk, dv))
            np.multiply(by_head(np, q[b, :, some, :]), scale, out=Q[:, :, :d])
            np.multiply(lse[b, some, :], -1, out=Q[:, :, d])
            K[:, :, :d] = by_head(np, k[b, :, some, :])
            K[:, :, d] = 1
            self._scores(Q, K, mask, P)
            np.exp(P, out=P)
            np.matmul(np.matrix_transpose(P), dO, out=dV)
            np.matmul(dO, np.matrix_transpose(V), out=dS)
            np.vecdot(P, dS, out=sums)
            np.subtract(dS, sums[:, :, None], out=dS)
            np.multiply(dS, P, out=dS)
            np.matmul(dS, K[:, :, :d], out=dQ)
            np.multiply(dQ, scale, out=dQ)
            np.matmul(np.matrix_transpose(dS), Q[:, :, :d], out=dK)    # Q is scaled already

    def _head_blocks(self, q: Array, k: Array,
                     *spare: str) -> Iterator[tuple[int, slice, list[Array]]]:
        """Iterate over `head_blocks`, each with memory of (heads, ...) in the given dimensions.

        Dimensions are q for queries, k for positions, d for features of a head, e for d + 1.
        """
        d = q.shape[-1]
        lengths, made = dict(q=q.shape[1], k=k.shape[1], d=d, e=d + 1), None
        for b, some in head_blocks(self.library, q, k):
            heads = some.stop - some.start
            if made is None:
                made = [self.library.empty((heads, *(lengths[c] for c in dims)), q.dtype)
                        for dims in spare]
            yield b, some, [a[:heads, ...] for a in made]

    def _scores(self, Q: Array, K: Array, mask: Array | None, out: Array) -> None:
        """Compute Q K^T plus the mask."""
        self.np.matmul(Q, self.np.matrix_transpose(K), out=out)
        if mask is not None:
            self.np.add(out, mask, out=out)

    def _causal_mask(self, q: Array, k: Array, first: int) -> Array:
        """Return the causal mask: 0 up to a query's own position, -inf beyond it."""
        queries, positions, library = q.shape[1], k.shape[1], self.library
        later = (library.arange(0, positions)[None, :]
                 > library.arange(first, first + queries)[:, None])
        mask = library.empty((queries, positions), q.dtype)
        mask[...] = 0
        self.np.copyto(mask, -math.inf, where=later)
        return mask
