"""Compute attention on a GPU by batched products and kernels for the softmax.

They compute as many sequences and heads at a time as the memory for their scores allows.  Where
`mm3d.arrays.cudnn_attention` can, it computes attention instead.
"""

import functools
import itertools
import math
from typing import Any, Iterator

import numpy as np

from mm3d.arrays.cudnn_attention import FlashAttention, open_flash

Array = Any
Part = tuple[slice, slice, slice]    # of the sequences, the heads and the queries

MAX_SCORE_BYTES = 2 ** 28    # of attention scores that are in memory at a time


class GpuAttention:
    """Compute attention, for `mm3d.arrays.cupy_kernels.GpuKernels`, which derives from this."""

    library: Any

    @functools.cached_property
    def flash(self) -> FlashAttention | None:
        """Attention by cuDNN; None where it is left out."""
        return open_flash(self.library, self.library.capability)

    def attention_forward(self, q: Array, k: Array, v: Array, first: int, causal: bool,
                          out: Array) -> tuple[Array, Array]:
        """Compute attention.  With cuDNN's logarithms goes the output, which backward reads."""
        if q.dtype.itemsize == 2 and self.flash:
            lse = self.flash.forward(q, k, v, first, causal, out)
            if lse is not None:
                return out, (lse, out)
        batch, queries, heads, d = q.shape
        positions, kind = k.shape[1], self._sum_type(q)
        lse = self.library.empty((batch, heads, queries), kind)
        narrow = [q.dtype] if q.dtype != kind else []    # else P overwrites the scores
        for part, (S, *P) in self._score_parts(q, positions, [kind, *narrow]):
            P = P[0] if P else S
            Q, y = _select_part(q, part), _select_part(out, part)
            K, V = _select_part(k, part[:2]), _select_part(v, part[:2])
            self.library.gemms(self._stack_heads(Q), _transposed(self._stack_heads(K)), S)
            self._launch_by_warps(
                "softmax_forward", q, S.shape[0] * S.shape[1], S, P, lse[part],
                rest=(np.int32(S.shape[1]), np.int32(positions), np.int32(first + part[2].start),
                      np.int32(causal), kind(1 / math.sqrt(d))))
            self._multiply_stacks(P, self._stack_heads(V), y)
        return out, lse

    def attention_backward(self, do: Array, q: Array, k: Array, v: Array, lse: Array, first: int,
                           causal: bool, dq: Array, dk: Array, dv: Array) -> None:
        if isinstance(lse, tuple):
            if self.flash.backward(do, (q, k, v), lse, first, causal, (dq, dk, dv)):
                return
            lse = lse[0]
        queries, d = q.shape[1], q.shape[-1]
        if not queries:    # dk and dv are summed over the ranks, and no part below sets them
            dk[...], dv[...] = 0, 0
            return
        positions, kind = k.shape[1], self._sum_type(q)
        scale, sums = kind(1 / math.sqrt(d)), []
        for part, (S, P) in self._score_parts(q, positions, [kind, q.dtype]):
            Q, dO = (self._stack_heads(_select_part(a, part)) for a in (q, do))
            K, V = (self._stack_heads(_select_part(a, part[:2])) for a in (k, v))
            rows = S.shape[0] * S.shape[1]
            self.library.gemms(Q, _transposed(K), S)
            self._launch_by_warps(
                "softmax_recompute", q, rows, S, P, lse[part],
                rest=(np.int32(S.shape[1]), np.int32(positions), np.int32(first + part[2].start),
                      np.int32(causal), scale))
            dV = self._accumulate_product(sums, 0, _transposed(P), dO,
                                          _select_part(dv, part[:2]), part[2], queries)
            self.library.gemms(dO, _transposed(V), S)    # dP overwrites the scores
            self._launch_by_warps("softmax_backward", q, rows, P, S, P,
                                  rest=(np.int32(positions), scale))
            # dS has overwritten P.
            self._multiply_stacks(P, K, _select_part(dq, part))
            dK = self._accumulate_product(sums, 1, _transposed(P), Q,
                                          _select_part(dk, part[:2]), part[2], queries)
            sums = [dV, dK]

    def _score_parts(self, q: Array, positions: int,
                     kinds: list[Any]) -> Iterator[tuple[Part, list[Array]]]:
        """Iterate over parts of attention, with memory for their scores in each of `kinds`.

        The memory is (sequences x heads of the part, queries, positions), all kinds together at
        most `MAX_SCORE_BYTES`, and reused for every part.
        """
        batch, queries, heads, _ = q.shape
        size = positions * sum(np.dtype(kind).itemsize for kind in kinds)
        parts = divide_scores(batch, heads, queries, size)
        sequences, some, rows = _extents(parts[0]) if parts else (0, 0, 0)    # of the largest
        made = [self.library.empty((sequences * some, rows, positions), kind) for kind in kinds]
        for part in parts:
            sequences, some, rows = _extents(part)
            yield part, [a[:sequences * some, :rows, ...] for a in made]

    def _stack_heads(self, a: Array) -> Array:
        """View (sequences, heads, positions, d) as (sequences x heads, positions, d).

        It is a copy where the matrices do not have equal distances in memory.
        """
        stack = _as_stack(a)
        if stack is None:
            stack = _as_stack(self.copy_rows(a, self.library.empty(a.shape, a.dtype)))
        return stack

    def _multiply_stacks(self, a: Array, b: Array, out: Array) -> None:
        """Multiply stacks of matrices into `out`, (sequences, heads, positions, d)."""
        stack = _as_stack(out)
        if stack is not None:
            self.library.gemms(a, b, stack)
            return
        contiguous = self.library.empty(out.shape, out.dtype)
        self.library.gemms(a, b, _as_stack(contiguous))
        self.copy_rows(contiguous, out)

    def _accumulate_product(self, sums: list[Array], which: int, a: Array, b: Array, out: Array,
                            rows: slice, queries: int) -> Array | None:
        """Multiply stacks of matrices for some of the queries, and sum over all of them.

        `rows` are the queries of this part.  If they are all queries, the product goes to `out`.
        Else it is added to ``sums[which]``, the sum over the earlier queries, in the type of
        sums; after the last queries the sum is copied to `out`.  Returns the sum so far.
        """
        if rows == slice(0, queries):
            self._multiply_stacks(a, b, out)
            return None
        begun = rows.start > 0
        total = sums[which] if begun else self.library.empty(out.shape, self._sum_type(out))
        self.library.gemms(a, b, _as_stack(total), begun)
        if rows.stop == queries:
            out[...] = total.astype(out.dtype, copy=False)
        return total


def divide_scores(batch: int, heads: int, queries: int, size: int) -> list[Part]:
    """Divide attention into parts whose scores take at most `MAX_SCORE_BYTES`, of similar size.

    A part is all heads of some sequences, or some heads of one sequence, or some queries of one
    head; at least one query.  The first part is the largest.

    Parameters
    ----------
    batch, heads, queries : int
        Number of sequences, of heads, and of queries in a sequence.
    size : int
        Bytes of the scores of one query.
    """
    fit = max(1, MAX_SCORE_BYTES // max(1, size))
    if fit >= queries:
        pairs = fit // max(1, queries)
        most = (pairs // heads, heads, queries) if pairs >= heads > 0 else (1, pairs, queries)
    else:
        most = (1, 1, fit)
    return list(itertools.product(*map(_even_slices, (batch, heads, queries), most)))


def _even_slices(total: int, most: int) -> list[slice]:
    """Divide a length into slices of at most `most`, as even as possible."""
    step = max(1, -(-total // max(1, -(-total // max(1, most)))))
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def _extents(part: Part) -> tuple[int, ...]:
    """Return the lengths of the slices of a part."""
    return tuple(one.stop - one.start for one in part)


def _select_part(a: Array, part: tuple[slice, ...]) -> Array:
    """View a part of (batch, positions, heads, d) as (sequences, heads, positions, d).

    All positions are selected if the part has no third slice.
    """
    sequences, heads, rows = (*part, slice(None))[:3]
    return a[sequences, rows, heads, :].transpose(0, 2, 1, 3)


def _as_stack(a: Array) -> Array | None:
    """View (sequences, heads, positions, d) as one stack of matrices at equal distances.

    None if their distances in memory differ.
    """
    sequences, heads, rows, d = a.shape
    if sequences == 1:
        return a[0, ...]
    if heads == 1:
        return a[:, 0, ...]
    return a.reshape(sequences * heads, rows, d) if a.flags.c_contiguous else None


def _transposed(a: Array) -> Array:
    """View a stack of matrices with each of them transposed."""
    return a.transpose(0, 2, 1)
