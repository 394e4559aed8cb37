"""Compute attention, with queries of this rank and keys of all positions."""

import math
from typing import Any, Iterator

from mm3d.arrays.backend import Array, reshape
from mm3d.grid.activations import Context, Space
from mm3d.grid.split import Split
from mm3d.model import functional
from mm3d.model.attention import windows
from mm3d.model.parameters import Parameter
from mm3d.schemes.passes import Pass

Visit = tuple[slice, slice, int, int]    # queries, keys, first query among them, causal or window


class Attention:
    """Compute multi-head attention from Q, K and V, (batch, seq, group + 2, features).

    Each head of K and V serves a group of heads of Q: number n of the group is Q[:, :, n], then
    come K and V.  So a group's heads are neighbours, in the output and in published weights, and
    stay on the rank of their key.  Heads are divided like the features.

    Where the positions of a sequence are divided, each rank uses its own queries, gathers keys and
    values along the sequence, and reduce-scatters their gradients: over the grid, and then over
    the ranks of a context.  The paper leaves this communication out.

    Parameters
    ----------
    space : Space
        Space of the input and the output.
    features : int
        Global number of features of all heads of Q together.
    head : int
        Number of features of a head.
    causal : bool
        Whether a position attends only to itself and those before it.
    group : int
        Number of heads of Q that share one of K and V.
    window : int, optional
        To how many positions a causal position attends at most.
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
        self.chunks = None if space.context is None else ChunkSplit(space.context)
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


class ChunkSplit(Split):
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
