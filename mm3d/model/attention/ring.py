"""Compute attention with keys and values that ranks pass on, a block of each rank at a time."""

import math
from typing import Any, Iterator

from mm3d.arrays.backend import Array, accumulation_dtype, namespace
from mm3d.model.attention.layer import Attention, Visit
from mm3d.model.functional import attend_backward, causal_mask, upcast
from mm3d.model.attention.windows import window_mask
from mm3d.schemes.passes import Pass


class RingAttention(Attention):
    """Compute attention without gathering keys and values over the ranks of a context.

    Blocks of keys and values go round, and each rank merges what its queries find in each by the
    log-sum-exps of both.  In backward the gradients of a block go round with it: they begin on
    the rank before its own, and are complete where they arrive.  So a block and its gradients are
    passed n - 1 times each, and the words are those of gathering.  Source: Liu, Zaharia and
    Abbeel, arXiv 2310.01889; chunks as in Brandon et al., arXiv 2311.09431.

    Parameters as for `Attention`, of a space with a context.  The output must stay unchanged until
    backward, as the product after it keeps it.
    """

    def _ring(self, own: Array) -> Iterator[tuple[int, Array, list[Visit]]]:
        """Yield the number, the keys and values, and the visits of each block, `own` the last."""
        axis, kv = self.chunks.axis, own
        for held in range(axis.rank + 1, axis.rank + axis.size):
            kv = self.chunks.shift(kv, held - 1, 1)
            yield held, kv, self._visits_of(held)
        yield axis.rank + axis.size, own, self._visits_of(axis.rank)

    def _visits_of(self, rank: int) -> list[Visit]:
        """List what the queries of this rank see in the block of a rank."""
        return [*self._visits(self.chunks.context.chunks(rank % self.chunks.axis.size))]

    def _members(self, visits: list[Visit]) -> Iterator[tuple[int, Visit]]:
        """Yield each visit for the members of a group; in a dry run one stands for the others."""
        for n in self.space.grid.backend.alike(self.group):
            yield from ((n, visit) for visit in visits)

    def _own_keys(self, x: Array) -> tuple[Array, Array]:
        """Return Q, K and V of this rank's positions, and the K and V that are passed on."""
        by_head = self._split_heads(x)
        kv = by_head[:, :, self.group:, ...]
        return by_head, kv if self.split is None else self.split.all_gather(kv)

    def forward(self, x: Array, within: Pass | None = None) -> tuple[Array, Any]:
        """Compute the output, (batch, seq, features); save it, Q, K, V and the log-sum-exps."""
        library, y = self.space.grid.backend, self.empty(x.dtype)
        q, own = self._own_keys(x)
        by_member = self._split_heads(y, self.group)
        total = self._zeros_beside(by_member)
        batch, rows, heads = by_member.shape[:3]
        lse = [library.empty((batch, heads, rows), total.dtype) for _ in range(self.group)]
        for one in lse:
            one[...] = -math.inf
        for _, kv, visits in self._ring(own):
            for n, (rows, keys, first, limit) in self._members(visits):
                queries, k, v = q[:, rows, n, ...], kv[:, keys, 0, ...], kv[:, keys, 1, ...]
                found = self.pair[0](queries, k, v, first, limit,
                                     out=library.empty(tuple(queries.shape), x.dtype))
                merge(total[:, rows, :, n, :], lse[n][:, :, rows], *found)
        if total is not by_member:
            by_member[...] = namespace(x).astype(total, x.dtype)
        return y, (x, y, lse)

    def _zeros_beside(self, a: Array) -> Array:
        """Return `a` as zeros, or for types of 16 bits another array of them, in float32."""
        kind = accumulation_dtype(a)
        if a.dtype != kind:
            a = self.space.grid.backend.empty(tuple(a.shape), kind)
        a[...] = 0
        return a

    def backward(self, dy: Array, saved: Any, within: Pass | None = None) -> Array:
        """Compute the gradients of Q, K and V, (batch, seq, group + 2, features)."""
        x, y, lse = saved
        library, dx = self.space.grid.backend, self.empty_qkv(x.dtype)
        q, own = self._own_keys(x)
        o, do = (self._split_heads(a, self.group) for a in (y, dy))
        sums = [sum_of_rows(do[:, :, :, n, :], o[:, :, :, n, :]) for n in range(self.group)]
        by_head = self._split_heads(dx)
        dq = by_head[:, :, :self.group, ...]
        total, dkv = self._zeros_beside(dq), None
        for held, kv, visits in self._ring(own):
            if dkv is None:
                dkv = library.empty(tuple(kv.shape), x.dtype)
                dkv[...] = 0
            else:
                dkv = self.chunks.shift(dkv, held - 1, 1)
            for n, (rows, keys, first, limit) in self._members(visits):
                queries, k, v = q[:, rows, n, ...], kv[:, keys, 0, ...], kv[:, keys, 1, ...]
                terms = [library.empty(tuple(a.shape), x.dtype) for a in (queries, k, v)]
                attend_backward(do[:, rows, :, n, :], (queries, k, v), lse[n][:, :, rows],
                                self._mask(queries, k, first, limit), terms,
                                sums[n][:, :, rows])
                total[:, rows, n, ...] += terms[0]
                dkv[:, keys, 0, ...] += terms[1]
                dkv[:, keys, 1, ...] += terms[2]
        if total is not dq:
            dq[...] = namespace(x).astype(total, x.dtype)
        by_head[:, :, self.group:, ...] = (dkv if self.split is None else
                                           self.split.reduce_scatter(dkv))
        return dx

    def _mask(self, q: Array, k: Array, first: int, limit: int) -> Array | None:
        """Return the mask of a visit; None where it hides nothing."""
        if self.window is not None:
            return window_mask(q, k, first, self.window)
        return causal_mask(q, k, first) if limit else None


def merge(total: Array, lse: Array, out: Array, more: Array) -> None:
    """Merge attention to some keys, `out` and its `more`, into that to others, in place.

    Parameters
    ----------
    total, out : Array
        Outputs, (batch, queries, heads, d).
    lse, more : Array
        Their log-sum-exps, (batch, heads, queries); -inf where there are no keys yet.
    """
    xp, more = namespace(total), getattr(more, "array", more)    # cuDNN's has the output, too
    top = xp.where(more > lse, more, lse)
    old, new = xp.exp(lse - top), xp.exp(more - top)
    both = old + new
    lse[...] = top + xp.log(both)
    old /= both
    new /= both
    rows = [xp.permute_dims(share, (0, 2, 1))[:, :, :, None] for share in (old, new)]
    total *= rows[0]
    total += rows[1] * upcast(out)


def sum_of_rows(do: Array, o: Array) -> Array:
    """Return the sums of dO O over the features of each head, (batch, heads, queries).

    They are the sums of P dP over all keys (Dao et al., arXiv 2205.14135).
    """
    xp = namespace(do)
    return xp.permute_dims(xp.sum(upcast(do) * upcast(o), axis=-1), (0, 2, 1))
