"""Compute attention on a GPU by batched products and kernels for the softmax.

They compute as many sequences and heads at a time as the memory for their scores allows.  Under a
mask queries are divided into blocks, which leave out the keys that none of their queries sees.
Where `mm3d.arrays.cudnn_attention` can, it computes attention instead.
"""

import functools
import itertools
import math
from typing import Any, Iterator

import numpy as np

from mm3d.arrays.backend import Array
from mm3d.arrays.cudnn_attention import FlashAttention, Saved, open_flash

HeadGroup = tuple[slice, slice]    # of the sequences and the heads
ScoreBlock = tuple[slice, slice]    # of the queries and the keys

THREADS_PER_BLOCK, THREADS_PER_WARP = 256, 32
NO_MASK = 2 ** 31 - 1    # positions that a query may see


class GpuAttention:
    """Compute attention, for `mm3d.arrays.cupy_kernels.GpuKernels`, which derives from this.

    Masks are told by their `reach`: how many positions a query sees, up to its own; 0 without a
    mask.
    """

    library: Any
    max_score_bytes = 2 ** 28    # of attention scores that are in memory at a time
    # Least number of queries in a block under a mask, and in the blocks of all heads together.
    # Fewer leave out more, but sums over queries are written more often, and products with no more
    # columns than a head has features leave a part of a GPU idle: 2^14 rows are 128 tiles of 128
    # rows, and an H100 has 132 multiprocessors.
    query_block, all_queries = 256, 2 ** 14
    key_step = 16    # a block's keys begin and end at multiples of it: rows are whole packs

    @functools.cached_property
    def flash(self) -> FlashAttention | None:
        """Attention by cuDNN; None where it is left out."""
        return open_flash(self.library, self.library.capability)

    def attention_forward(self, q: Array, k: Array, v: Array, first: int, causal: bool,
                          out: Array) -> tuple[Array, Any]:
        """Compute attention; with cuDNN backward reads the output, too, which is kept."""
        return self._attend(q, k, v, first, causal * (first + q.shape[1]), out)

    def attention_backward(self, do: Array, q: Array, k: Array, v: Array, lse: Any, first: int,
                           causal: bool, dq: Array, dk: Array, dv: Array) -> None:
        self._attend_backward(do, (q, k, v), lse, first, causal * (first + q.shape[1]),
                              (dq, dk, dv))

    def window_attention_forward(self, q: Array, k: Array, v: Array, first: int, window: int,
                                 out: Array) -> tuple[Array, Any]:
        """Compute `mm3d.model.attention.windows.window_attention_forward`."""
        return self._attend(q, k, v, first, window, out)

    def window_attention_backward(self, do: Array, q: Array, k: Array, v: Array, lse: Any,
                                  first: int, window: int, dq: Array, dk: Array, dv: Array
                                  ) -> None:
        self._attend_backward(do, (q, k, v), lse, first, window, (dq, dk, dv))

    def _attend(self, q: Array, k: Array, v: Array, first: int, reach: int, out: Array
                ) -> tuple[Array, Any]:
        """Compute attention under a mask of this reach."""
        if q.dtype.itemsize == 2 and self.flash:
            saved = self.flash.forward(q, k, v, first, reach, out)
            if saved is not None:
                return out, saved
        (batch, queries, heads, d), kind = q.shape, self._sum_type(q)
        lse = self.library.empty((batch, heads, queries), kind)
        kinds = [kind, q.dtype] if q.dtype != kind else [kind]    # then P overwrites the scores
        blocks = self.query_blocks(q.shape, k.shape[1], first, reach, _score_bytes(kinds))
        for group, memory in self._groups(q, blocks, kinds):
            Q, K, V = (self._stack_heads(_select(a, group)) for a in (q, k, v))
            y = self._make_stack(_select(out, group), out.dtype)
            for (rows, keys), (S, *P) in zip(blocks, memory):
                P = P[0] if P else S
                self.library.gemms(_rows(Q, rows), _transposed(_rows(K, keys)), S)
                self._launch_softmax("softmax_forward", S, P, lse[(*group, rows)],
                                     (queries, first + rows.start - keys.start, reach),
                                     kind(1 / math.sqrt(d)))
                self.library.gemms(P, _rows(V, keys), _rows(y, rows))
            self._put_stack(y, _select(out, group))
        return out, lse

    def _attend_backward(self, do: Array, qkv: tuple[Array, Array, Array], saved: Any, first: int,
                         reach: int, gradients: tuple[Array, Array, Array]) -> None:
        """Compute the gradients of `_attend` from what it saved."""
        if isinstance(saved, Saved):
            if self.flash.backward(do, qkv, saved, first, reach, gradients):
                return
            saved = saved.array
        (q, k, _), (queries, d) = qkv, (qkv[0].shape[1], qkv[0].shape[-1])
        if not queries:    # dk and dv are summed over the ranks, and no block below sets them
            for a in gradients[1:]:
                a[...] = 0
            return
        kind, gemms = self._sum_type(q), self.library.gemms
        scale, kinds = kind(1 / math.sqrt(d)), [kind, q.dtype]
        blocks = self.query_blocks(q.shape, k.shape[1], first, reach, _score_bytes(kinds))
        sums = kind if len(blocks) > 1 else q.dtype    # of the blocks
        for group, memory in self._groups(q, blocks, kinds):
            Q, K, V, dO = (self._stack_heads(_select(a, group)) for a in (*qkv, do))
            made = [self._make_stack(_select(a, group), t)
                    for a, t in zip(gradients, (q.dtype, sums, sums))]
            for a in made[1:]:
                _set_zero_outside(a, blocks[0][1])
            for (rows, keys), (S, P) in zip(blocks, memory):
                q_rows, do_rows, dQ = (_rows(a, rows) for a in (Q, dO, made[0]))
                k_rows, v_rows, dK, dV = (_rows(a, keys) for a in (K, V, *made[1:]))
                add = rows.stop < queries    # to the sums over later queries
                gemms(q_rows, _transposed(k_rows), S)
                self._launch_softmax("softmax_recompute", S, P, saved[(*group, rows)],
                                     (queries, first + rows.start - keys.start, reach), scale)
                gemms(_transposed(P), do_rows, dV, add)
                gemms(do_rows, _transposed(v_rows), S)    # dP overwrites the scores
                self._launch_by_warps("softmax_backward", P, S.shape[0] * S.shape[1], P, S, P,
                                      rest=(np.int32(S.shape[2]), scale))
                gemms(P, k_rows, dQ)    # dS has overwritten P
                gemms(_transposed(P), q_rows, dK, add)
            for stack, a in zip(made, gradients):
                self._put_stack(stack, _select(a, group))

    def query_blocks(self, shape: tuple[int, ...], positions: int, first: int, reach: int,
                     size: int) -> list[ScoreBlock]:
        """Divide queries into blocks whose scores take at most `max_score_bytes` for a head.

        Parameters
        ----------
        shape : tuple of int
            Numbers of sequences, of queries in one, of heads, and of a head's features.
        positions : int
            Number of keys in a sequence.
        first : int
            Position of the first query.
        reach : int
            How many positions a query sees, up to its own; 0 for all keys.
        size : int
            Bytes of a score.

        Returns
        -------
        list of (slice, slice)
            Queries, and the keys that one of them sees at least; the last queries first, which
            without a window see all keys that others see.
        """
        batch, queries, heads, _ = shape
        most = max(1, self.max_score_bytes // max(1, positions * size))
        step = _even_step(queries, most)
        if reach:
            step = min(most, max(self.query_block,
                                 min(most, self.all_queries) // max(1, batch * heads)))
        blocks = []
        for start in reversed(range(0, queries, step)):
            rows, keys = slice(start, min(start + step, queries)), slice(0, positions)
            if reach:
                begin = max(0, first + rows.start - reach + 1) // self.key_step * self.key_step
                end = min(positions, -(-(first + rows.stop) // self.key_step) * self.key_step)
                keys = slice(min(begin, end), end)
            blocks.append((rows, keys))
        return blocks

    def divide_heads(self, batch: int, heads: int, size: int) -> list[HeadGroup]:
        """Divide sequences and heads into groups whose scores take at most `max_score_bytes`.

        A group is all heads of some sequences, or some heads of one sequence; at least one head.
        The first group is the largest; others have a similar size.  The scores of one head take
        `size` bytes.
        """
        pairs = max(1, self.max_score_bytes // max(1, size))
        most = (pairs // heads, heads) if pairs >= heads > 0 else (1, pairs)
        return list(itertools.product(*map(_even_slices, (batch, heads), most)))

    def _groups(self, q: Array, blocks: list[ScoreBlock], kinds: list[Any]
                ) -> Iterator[tuple[HeadGroup, list[list[Array]]]]:
        """Iterate over groups of heads, with memory for the scores of each block in all `kinds`.

        The memory is (sequences x heads of the group, queries, keys), all kinds together at most
        `max_score_bytes`, and reused for every block and group.
        """
        batch, _, heads, _ = q.shape
        shapes = [tuple(one.stop - one.start for one in block) for block in blocks]
        largest = max(map(math.prod, shapes), default=0)
        groups = self.divide_heads(batch, heads, largest * _score_bytes(kinds))
        if not groups:
            return
        size = largest * math.prod(one.stop - one.start for one in groups[0])
        made = [self.library.empty((size,), kind) for kind in kinds]
        for group in groups:
            count = math.prod(one.stop - one.start for one in group)
            yield group, [[a[:count * rows * keys].reshape(count, rows, keys) for a in made]
                          for rows, keys in shapes]

    def _launch_by_warps(self, name: str, like: Array, rows: int, *arrays: Array,
                         rest: tuple[np.generic, ...]) -> None:
        """Launch a kernel of which each warp computes a row."""
        blocks = -(-rows // (THREADS_PER_BLOCK // THREADS_PER_WARP))
        self._launch(name, like, (blocks,), *arrays, rows, *rest)

    def _launch_softmax(self, name: str, S: Array, P: Array, lse: Array,
                        place: tuple[int, int, int], scale: Any) -> None:
        """Launch a kernel of the scores of a block.

        `place` is the number of all queries, the position of the block's first one among its
        keys, and the reach.
        """
        count, queries, positions = S.shape
        apart, first, reach = place
        if not reach:    # the first query is past the last key, and sees all before
            first, reach = positions, NO_MASK
        self._launch_by_warps(
            name, P, count * queries, S, P, lse,
            rest=(*map(np.int32, (queries, positions, apart, first, reach)), scale))

    def _stack_heads(self, a: Array) -> Array:
        """View (sequences, heads, positions, d) as (sequences x heads, positions, d).

        It is a copy where the matrices do not have equal distances in memory.
        """
        stack = _as_stack(a)
        if stack is None:
            stack = _as_stack(self.copy_rows(a, self.library.empty(a.shape, a.dtype)))
        return stack

    def _make_stack(self, out: Array, dtype: Any) -> Array:
        """Return `out` as a stack of this type, or memory for `_put_stack` where it is none."""
        stack = _as_stack(out) if out.dtype == dtype else None
        return _as_stack(self.library.empty(out.shape, dtype)) if stack is None else stack

    def _put_stack(self, stack: Array, out: Array) -> None:
        """Put what was computed in a stack of `_make_stack` into `out`."""
        if stack.dtype != out.dtype:
            stack = self.round_into(stack, self.library.empty(stack.shape, out.dtype))
        elif _as_stack(out) is not None:
            return
        self.copy_rows(stack.reshape(*out.shape), out)


def _score_bytes(kinds: list[Any]) -> int:
    """Return the bytes of a score in all types of `kinds` together."""
    return sum(np.dtype(kind).itemsize for kind in kinds)


def _even_step(total: int, most: int) -> int:
    """Return the length of slices of at most `most` that are as even as possible."""
    return max(1, -(-total // max(1, -(-total // max(1, most)))))


def _even_slices(total: int, most: int) -> list[slice]:
    """Divide a length into slices of at most `most`, as even as possible."""
    step = _even_step(total, most)
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def _select(a: Array, group: HeadGroup) -> Array:
    """View a group of (batch, positions, heads, d) as (sequences, heads, positions, d)."""
    return a[group[0], :, group[1], :].transpose(0, 2, 1, 3)


def _rows(a: Array, some: slice) -> Array:
    """View some rows of the matrices of a stack: all of it is the stack itself, without a call."""
    return a if some.stop - some.start == a.shape[1] else a[:, some, :]


def _set_zero_outside(a: Array, keys: slice) -> None:
    """Set the matrices of a stack to zero but for some rows."""
    for rest in (slice(0, keys.start), slice(keys.stop, a.shape[1])):
        if rest.start < rest.stop:
            a[:, rest, :] = 0


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
