"""Compute attention of this rank's queries to all positions, gathered or passed on in a ring."""

import math
from typing import Any, Iterator

from mm3d.arrays.backend import Array, accumulation_dtype, namespace, reshape
from mm3d.grid.activations import Context, Space
from mm3d.grid.split import Split
from mm3d.model import functional
from mm3d.model.attention import windows
from mm3d.model.attention.windows import window_mask
from mm3d.model.functional import attend_backward, causal_mask, upcast
from mm3d.model.parameters import Parameter
from mm3d.schemes.passes import Pass

# Queries and keys that meet, where the first query is among these keys, and the window, or
# whether the mask is causal.
Visit = tuple[slice, slice, int, int]


class Attention:
    """Compute multi-head attention from Q, K and V, (batch, seq, group + 2, features).

    Each head of K and V serves a group of heads of Q: number n of the group is Q[:, :, n], then
    come K and V.  So a group's heads are neighbours, in the output and in published weights, and
    stay on the rank of their key.  Heads are divided like the features.

    Where the positions of a sequence are divided, each rank uses its own queries, gathers keys and
    values along the sequence, and reduce-scatters their gradients: over the grid, and then over
    the ranks of a context.  The paper leaves this communication out.

    Input and output are in `space`; all heads of Q together have so many `features` globally, one
    has `head`, and a `group` of heads of Q shares one of K and V.  With `causal` a position
    attends only to itself and those before it, at most to a `window` of positions.
    """

    parameters: list[Parameter] = []

    def __init__(self, space: Space, features: int, head: int, causal: bool, group: int = 1,
                 window: int | None = None) -> None:
        self.space, self.head, self.causal, self.group = space, head, causal, group
        self.window = window if window is not None and window < space.length else None
        self.pair = functional.attention_forward, functional.attention_backward
        if self.window is not None:
            self.pair = windows.window_attention_forward, windows.window_attention_backward
        self.empty = space.allocator(features, unit=group * head)
        self.empty_qkv = space.allocator(group + 2, features // group, unit=head)
        axis = space.sequence_axis
        self.split = None if axis is None else space.rows_split(axis.name)
        self.chunks = None if space.context is None else _ChunkSplit(space.context)
        whole, runs = range(space.length), space.runs()
        self.visits: list[Visit] = [*self._visits([whole])]
        if self.chunks is None:    # kernels leave out what they can
            self.visits = [(slice(0, len(runs[0])), slice(0, len(whole)), runs[0].start,
                            self.window or causal)]

    def _visits(self, blocks: list[range]) -> Iterator[Visit]:
        """Yield which of this rank's queries see which keys of joined blocks of positions.

        Queries and keys are slices of the rank's, and of the blocks.  What a mask hides wholly at
        the beginning or the end is left out.
        """
        before = 0
        for run in self.space.runs():
            start = 0
            for block in blocks:
                own, keys = windows.visible(run, block, self.causal, self.window)
                if own and keys:
                    first = own.start - keys.start
                    masked = self.causal and first + 1 < len(keys)
                    yield (slice(before + own.start - run.start, before + own.stop - run.start),
                           slice(start + keys.start - block.start,
                                 start + keys.stop - block.start),
                           first, self.window or masked)
                start += len(block)
            before += len(run)

    def _split_heads(self, a: Array, *members: int) -> Array:
        """View the features of `a` as (..., heads, `members` of a group, features of a head)."""
        heads = a.shape[-1] // (self.head * math.prod(members))
        return reshape(a, (*a.shape[:-1], heads, *members, self.head))

    def _gather_qkv(self, qkv: Array) -> tuple[Array, Array, Array]:
        """Return Q of this rank's positions, with all members, and K and V of all positions."""
        by_head = self._split_heads(qkv)
        kv = by_head[:, :, self.group:, ...]
        for split in (self.split, self.chunks):
            if split is not None:
                kv = split.all_gather(kv)
        return by_head, kv[:, :, 0, ...], kv[:, :, 1, ...]

    def forward(self, x: Array, within: Pass | None = None) -> tuple[Array, Any]:
        """Compute the output, (batch, seq, features); save Q, K, V and the log-sum-exps."""
        q, k, v = self._gather_qkv(x)
        y = self.empty(x.dtype)
        by_member = self._split_heads(y, self.group)
        lse, library = [], self.space.grid.backend
        for n in library.alike(self.group):
            if n == 1 and not library.has_contents:    # the last, in place of all before it
                lse += [library.empty(a.shape, a.dtype) for a in lse * (self.group - 2)]
            lse += [self.pair[0](q[:, own, n, ...], k[:, keys, ...], v[:, keys, ...], first,
                                 limit, out=by_member[:, own, :, n, :])[1]
                    for own, keys, first, limit in self.visits]
        return y, (x, lse)

    def backward(self, dy: Array, saved: Any, within: Pass | None = None) -> Array:
        """Compute the gradients of Q, K and V, (batch, seq, group + 2, features)."""
        x, lse = saved
        q, k, v = self._gather_qkv(x)
        dx = self.empty_qkv(x.dtype)
        by_head, do = self._split_heads(dx), self._split_heads(dy, self.group)
        dkv, term = by_head[:, :, self.group:, ...], None
        splits = [one for one in (self.chunks, self.split) if one is not None]
        if splits:
            dkv = splits[0].term((k.shape[0], k.shape[1], 2, *k.shape[2:]), x.dtype)
        if self.chunks is not None:    # visits add to a part of the positions each
            dkv[...], term = 0, self.space.grid.backend.empty(dkv.shape, x.dtype)
        alike = self.space.grid.backend.alike(self.group)
        for number, (n, (own, keys, first, limit)) in enumerate(
                (n, visit) for n in alike for visit in self.visits):
            if number == 1 and term is None:    # the members of a group add to the same gradients
                term = self.space.grid.backend.empty(dkv.shape, x.dtype)
            into = (dkv if term is None else term)[:, keys, ...]
            self.pair[1](
                do[:, own, :, n, :], q[:, own, n, ...], k[:, keys, ...], v[:, keys, ...],
                lse[number], first, limit, by_head[:, own, n, ...], into[:, :, 0, ...],
                into[:, :, 1, ...])
            if term is not None:
                dkv[:, keys, ...] += into
        for split in splits:
            dkv = split.reduce_scatter(dkv)
        if splits:
            by_head[:, :, self.group:, ...] = dkv
        return dx


class _ChunkSplit(Split):
    """Divide positions, dimension 1, over the ranks of a context.

    What is gathered, and what is reduced and scattered, is in the order of the sequence.
    """

    def __init__(self, context: Context) -> None:
        self.context, self.axis, self.dim, self.extent = context, context.axis, 1, context.seq
        self.counts = [sum(map(len, context.chunks(rank))) for rank in range(self.axis.size)]

    def __repr__(self) -> str:
        return f"ChunkSplit({self.extent} positions over {self.axis.name})"

    def _places(self) -> Iterator[tuple[slice, slice]]:
        """Yield where each chunk is in the sequence, and in the order of the ranks."""
        before = 0
        for rank in range(self.axis.size):
            for chunk in self.context.chunks(rank):
                yield slice(chunk.start, chunk.stop), slice(before, before + len(chunk))
                before += len(chunk)

    def term(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate a term for `reduce_scatter`, which copies it into another order."""
        return self.axis.backend.empty(shape, dtype)

    def all_gather(self, a: Array) -> Array:
        """Gather all positions, in the order of the sequence, from the chunks of all ranks."""
        gathered = super().all_gather(a)
        out = self.axis.backend.empty(tuple(gathered.shape), a.dtype)
        for place, here in self._places():
            out[:, place, ...] = gathered[:, here, ...]
        return out

    def reduce_scatter(self, a: Array) -> Array:
        """Sum `a`, of all positions, over the ranks; return this rank's chunks."""
        term = super().term(tuple(a.shape), a.dtype)
        for place, here in self._places():
            term[:, here, ...] = a[:, place, ...]
        return super().reduce_scatter(term)


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
        sums = [_sum_of_rows(do[:, :, :, n, :], o[:, :, :, n, :]) for n in range(self.group)]
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

    `total` and `out` are outputs, (batch, queries, heads, d); `lse` and `more` their log-sum-exps,
    (batch, heads, queries), -inf where there are no keys yet.
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


def _sum_of_rows(do: Array, o: Array) -> Array:
    """Sum dO O over features, as P dP over all keys, (batch, heads, queries); arXiv 2205.14135."""
    xp = namespace(do)
    return xp.permute_dims(xp.sum(upcast(do) * upcast(o), axis=-1), (0, 2, 1))
