"""Compute elementwise functions and attention with NumPy: in place, in blocks that stay in cache.

`Kernels` has the functions of `mm3d.model.functional` that NumPy computes faster in this way,
under the same names and with the same arguments; the tests compare the two.  A first touch of new
memory costs more than most of the arithmetic, so no intermediate array is as large as an
activation: results go to arrays of the caller, intermediate values to a few blocks of memory.
"""

import math
import sys
from typing import Any, Callable, Iterator

import numpy as np

from mm3d.arrays.backend import Array, reshape
from mm3d.arrays.elementwise import GELU_CUBIC, GELU_SCALE, by_head, head_blocks, row_blocks

MAX_EXPONENT = 87.0    # exp of it, and the reciprocal, have full precision in float32


class Kernels:
    """Compute functions of `mm3d.model.functional`, which documents them, with NumPy.

    `mm3d.arrays.compiled` replaces methods that take blocks.  The backend `library` allocates
    memory; its `xp` is NumPy, or a substitute in a dry run or while a step is observed.
    """

    dtypes = (np.dtype(np.float32), np.dtype(np.float64))    # of arrays that the kernels take
    query_block = 64    # least number of queries in a block of scores under a causal mask

    def __init__(self, library: Any) -> None:
        self.library = library

    def _blocks(self, *arrays: Array, spare: int = 0) -> Iterator[tuple[Array, ...]]:
        """Iterate over `row_blocks`, each with `spare` new blocks like the first view."""
        more: list[Array] = []
        for views in row_blocks(self.library, *arrays):
            rows = views[0].shape[0]
            if not more:
                more = [self.library.empty(views[0].shape, views[0].dtype) for _ in range(spare)]
            yield *views, *(a[:rows, :] for a in more)

    def bias_gelu_forward(self, x: Array, b: Array, out: Array) -> Array:
        """Compute GELU(u) = u / (1 + exp(-2z)) with u = x + b, z the argument of tanh."""
        limits = self._row(MAX_EXPONENT, x.shape[-1], x.dtype)
        for v, y, u in self._blocks(x, out, spare=1):
            self._gelu(v, b, y, u, limits)
        return out

    def _gelu(self, x: Array, b: Array, y: Array, u: Array, limits: Array) -> None:
        """Compute GELU of a block in `y`, with memory for u."""
        np = self.library.xp
        np.add(x, b, out=u)
        np.multiply(u, u, out=y)
        self._add_one_and_exp(y, u, limits, out=y)
        np.divide(u, y, out=y)

    def bias_gelu_backward(self, dy: Array, x: Array, b: Array, out: Array,
                           keep_float32: bool = False) -> tuple[Array, Array]:
        """Compute dx and db; with u = x + b, z the argument of tanh and s = 1 / (1 + exp(-2z)),
        so that GELU(u) = u s: dx = dy s (1 + (1 - s) 2 z' u)."""
        limits = self._row(MAX_EXPONENT, x.shape[-1], x.dtype)
        for g, v, dx, u, s in self._blocks(dy, x, out, spare=2):
            self._gelu_gradient(g, v, b, dx, u, s, limits)
        return out, self.sum_rows(out)

    def _gelu_gradient(self, *block: Array) -> None:
        """Compute dx of a block in the fourth array, with memory for u and s."""
        np, (dy, x, b, dx, u, s, limits) = self.library.xp, block
        np.add(x, b, out=u)
        np.multiply(u, u, out=dx)
        self._add_one_and_exp(dx, u, limits, out=s)
        np.divide(1, s, out=s)
        np.multiply(dx, 6 * GELU_SCALE * GELU_CUBIC, out=dx)
        np.add(dx, 2 * GELU_SCALE, out=dx)
        np.multiply(dx, u, out=dx)
        np.subtract(1, s, out=u)
        np.multiply(dx, u, out=dx)
        np.add(dx, 1, out=dx)
        np.multiply(dx, s, out=dx)
        np.multiply(dx, dy, out=dx)

    def _add_one_and_exp(self, square: Array, u: Array, limits: Array, out: Array) -> None:
        """Compute 1 + exp(-2z) from u, its square and a row of limits, faster than a number."""
        np = self.library.xp
        np.multiply(square, -2 * GELU_SCALE * GELU_CUBIC, out=out)
        np.subtract(out, 2 * GELU_SCALE, out=out)
        np.multiply(out, u, out=out)
        np.minimum(out, limits, out=out)
        np.exp(out, out=out)
        np.add(out, 1, out=out)

    def add_rows(self, a: Array, b: Array, out: Array) -> Array:
        np = self.library.xp
        return np.add(a, b, out=out)

    def scale_rows(self, a: Array, b: Array, out: Array) -> Array:
        np = self.library.xp
        return np.multiply(a, b, out=out)

    def sum_rows(self, a: Array, keep_float32: bool = False) -> Array:
        np = self.library.xp
        return self._sum_rows(lambda u, out: np.sum(u, axis=0, out=out), a)

    def sum_products(self, a: Array, b: Array, keep_float32: bool = False) -> Array:
        np = self.library.xp
        return self._sum_rows(lambda u, v, out: np.einsum("ij,ij->j", u, v, out=out), a, b)

    def _sum_rows(self, add: Callable[..., Array], *arrays: Array) -> Array:
        """Sum `add` over all rows, part by part where the rows are not contiguous."""
        first, np, empty = arrays[0], self.library.xp, self.library.empty
        total, part = empty(first.shape[-1:], first.dtype), empty(first.shape[-1:], first.dtype)
        total[...] = 0
        for rows in row_blocks(self.library, *arrays, block=sys.maxsize):
            np.add(total, add(*rows, out=part), out=total)
        return total

    def normalize_forward(self, x: Array, features: int, eps: float,
                          total: Callable[[Array], Array], out: Array) -> tuple[Array, Array]:
        np, empty = self.library.xp, self.library.empty
        sums, squares = empty((*x.shape[:-1], 1), x.dtype), empty((*x.shape[:-1], 1), x.dtype)
        ones = self._row(1, x.shape[-1], x.dtype)
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
        for u, r in self._blocks(out, rstd):
            np.multiply(u, r, out=u)
        return out, rstd

    def _row(self, number: float, length: int, dtype: Any) -> Array:
        """Allocate a row; a dot product with ones sums a row at twice the speed of `sum`."""
        row = self.library.empty((length,), dtype)
        row[...] = number
        return row

    def normalize_backward(self, dy: Array, xhat: Array, rstd: Array, features: int,
                           total: Callable[[Array], Array], out: Array) -> Array:
        np = self.library.xp
        sums = self.library.empty((*rstd.shape[:-1], 2), rstd.dtype)
        ones = self._row(1, dy.shape[-1], dy.dtype)
        for g, h, s in self._blocks(dy, xhat, sums):
            np.vecdot(g, ones, out=s[:, 0])
            np.vecdot(g, h, out=s[:, 1])
        means = total(sums)
        np.multiply(means, 1 / features, out=means)
        for g, h, r, m, dx, t in self._blocks(dy, xhat, rstd, means, out, spare=1):
            self._normal_gradient(g, h, r, m, dx, t)
        return out

    def _normal_gradient(self, *block: Array) -> None:
        """Compute dx of a block in the fifth array, with memory t."""
        np, (dy, xhat, rstd, means, dx, t) = self.library.xp, block
        np.multiply(xhat, means[:, 1:2], out=t)
        np.subtract(dy, t, out=dx)
        np.subtract(dx, means[:, 0:1], out=dx)
        np.multiply(dx, rstd, out=dx)

    def softmax_statistics(self, logits: Array, sums: bool) -> Array:
        np, out = self.library.xp, self.library.empty((logits.shape[0], 4), logits.dtype)
        out[...] = 0
        if not logits.shape[1]:
            out[:, 0] = -math.inf
            return out
        ones = self._row(1, logits.shape[1], logits.dtype)
        for u, s in self._blocks(logits, out):
            if sums:
                np.vecdot(u, ones, out=s[:, 3])
            self._exponentials(u, s[:, 0], s[:, 1], ones)
        return out

    def _exponentials(self, a: Array, top: Array, total: Array, ones: Array) -> None:
        """Put exp(a - top) in place of `a`, for the largest number of each row, and sum it."""
        np = self.library.xp
        np.max(a, axis=-1, out=top)
        np.subtract(a, top[..., None], out=a)
        np.exp(a, out=a)
        np.vecdot(a, ones, out=total)

    def softmax_gradient(self, exponentials: Array, scale: Array, shift: Array | None,
                         out: Array) -> Array:
        np, shifts = self.library.xp, () if shift is None else (shift,)
        for u, a, y, *less in self._blocks(exponentials, scale, out, *shifts):
            np.multiply(u, a, out=y)
            for b in less:
                np.subtract(y, b, out=y)
        return out

    def attention_forward(self, q: Array, k: Array, v: Array, first: int, causal: bool,
                          out: Array) -> tuple[Array, Array]:
        np, (batch, queries, heads, d) = self.library.xp, q.shape
        lse = self.library.empty((batch, heads, queries), q.dtype)
        blocks = self._query_blocks(q, k, first, causal)
        ones = self._row(1, k.shape[1], q.dtype)
        for b, some, (scores, Q, sums) in self._head_blocks(q, k, blocks, "s", "qd", "r"):
            np.multiply(q[b, :, some, :], 1 / math.sqrt(d), out=Q)
            for rows, keys, mask in blocks:
                K, V = (by_head(np, a[b, :keys, some, :]) for a in (k, v))
                y, top = by_head(np, out[b, rows, some, :]), lse[b, some, rows]
                P = self._scores(by_head(np, Q[rows, ...]), K, mask, scores)
                total = reshape(sums[:top.size], top.shape)
                self._exponentials(P, top, total, ones[:keys])
                np.matmul(P, V, out=y)
                np.divide(y, total[:, :, None], out=y)
                np.log(total, out=total)
                np.add(top, total, out=top)
        return out, lse

    def attention_backward(self, do: Array, q: Array, k: Array, v: Array, lse: Array, first: int,
                           causal: bool, dq: Array, dk: Array, dv: Array) -> None:
        """Compute dq, dk and dv; one product gives Q K^T - lse, as [Q, -lse] [K, 1]^T."""
        np, scale, d = self.library.xp, 1 / math.sqrt(q.shape[-1]), q.shape[-1]
        blocks = self._query_blocks(q, k, first, causal)
        seen = blocks[0][1]
        if seen < k.shape[1]:    # positions after all queries have no gradient
            dk[:, seen:, ...] = dv[:, seen:, ...] = 0
        names = ("s", "s", "qe", "ke", "kd", "r", "p")
        for b, some, memory in self._head_blocks(q, k, blocks, *names):
            scores, dscores, Q, K, scaled, sums, part = memory
            np.multiply(q[b, :, some, :], scale, out=Q[:, :, :d])
            np.multiply(lse[b, some, :].mT, -1, out=Q[:, :, d])
            K[:, :, :d] = k[b, :, some, :]
            K[:, :, d] = 1
            np.multiply(k[b, :, some, :], scale, out=scaled)
            for rows, keys, mask in blocks:
                Qr, Kr, Ks, V, dO, dQ = (by_head(np, a) for a in (
                    Q[rows, ...], K[:keys, ...], scaled[:keys, ...], v[b, :keys, some, :],
                    do[b, rows, some, :], dq[b, rows, some, :]))
                P = self._scores(Qr, Kr, mask, scores)
                np.exp(P, out=P)
                self._put_terms(P.mT, dO, dv[b, :keys, some, :], seen, part)
                dS = self._scores(dO, V, None, dscores)
                total = reshape(sums[:P.shape[0] * P.shape[1]], P.shape[:2])
                self._softmax_gradient(P, dS, total)
                np.matmul(dS, Ks, out=dQ)
                self._put_terms(dS.mT, Qr[:, :, :d], dk[b, :keys, some, :],
                                seen, part)

    def _softmax_gradient(self, P: Array, dS: Array, total: Array) -> None:
        """Put P (dS - rowsum(P dS)) in place of dS, with memory for the sums."""
        np = self.library.xp
        np.vecdot(P, dS, out=total)
        np.subtract(dS, total[:, :, None], out=dS)
        np.multiply(dS, P, out=dS)

    def _put_terms(self, a: Array, b: Array, out: Array, seen: int, part: Array) -> None:
        """Multiply `a` and `b` of each head into `out` if it has all positions seen, else add."""
        np, out = self.library.xp, by_head(self.library.xp, out)
        if out.shape[1] == seen:
            np.matmul(a, b, out=out)
        else:
            part = reshape(part[:out.size], out.shape)
            np.matmul(a, b, out=part)
            np.add(out, part, out=out)

    def _query_blocks(self, q: Array, k: Array, first: int, causal: bool
                      ) -> list[tuple[slice, int, Array | None]]:
        """List blocks of queries, the last first: rows, how many positions they see, and the mask.

        Under a causal mask several blocks leave out the positions after their own, which saves
        nearly half of the work on long sequences; a single block sees all.
        """
        (_, queries, heads, _), positions = q.shape, k.shape[1]
        if not causal:
            return [(slice(0, queries), positions, None)]
        step = max(self.query_block, 2 * self.library.block // max(1, heads * positions))
        found = []
        for start in reversed(range(0, max(1, queries), step)):
            stop = min(start + step, queries)
            seen = first + stop if queries > step else positions
            found.append((slice(start, stop), seen,
                          self._causal_mask(first + start, stop - start, seen, q.dtype)))
        return found

    def _head_blocks(self, q: Array, k: Array, blocks: list,
                     *spare: str) -> Iterator[tuple[int, slice, list[Array]]]:
        """Iterate over groups of heads, each with memory for the intermediate values of a block.

        `spare` names it: one-dimensional for scores (s), for one number per row of scores (r) and
        for products that are added up (p); for the group's queries or positions with d or d + 1
        features a head (qd, qe, kd, ke).
        """
        (queries, d), positions = (q.shape[1], q.shape[3]), k.shape[1]
        rows, made = max(block[0].stop - block[0].start for block in blocks), None
        for b, some in head_blocks(self.library, q, k, rows):
            heads = some.stop - some.start
            if made is None:
                lengths = dict(s=(heads * rows * positions,), r=(heads * rows,),
                               p=(heads * positions * d,) if len(blocks) > 1 else (0,),
                               qd=(queries, heads, d), qe=(queries, heads, d + 1),
                               kd=(positions, heads, d), ke=(positions, heads, d + 1))
                made = [self.library.empty(lengths[name], q.dtype) for name in spare]
            yield b, some, [a if len(a.shape) == 1 else a[:, :heads, :] for a in made]

    def _scores(self, Q: Array, K: Array, mask: Array | None, memory: Array) -> Array:
        """Compute Q K^T plus the mask, in `memory`."""
        np, shape = self.library.xp, (*Q.shape[:2], K.shape[1])
        out = reshape(memory[:math.prod(shape)], shape)
        np.matmul(Q, K.mT, out=out)
        if mask is not None:
            np.add(out, mask, out=out)
        return out

    def _causal_mask(self, first: int, queries: int, positions: int, dtype: Any) -> Array:
        """Return the causal mask: 0 up to a query's own position, -inf beyond it."""
        library, np = self.library, self.library.xp
        later = (library.arange(0, positions)[None, :]
                 > library.arange(first, first + queries)[:, None])
        mask = library.empty((queries, positions), dtype)
        mask[...] = 0
        np.copyto(mask, -math.inf, where=later)
        return mask
