"""Divide the positions of sequences among ranks that have a grid each: context parallelism."""

from dataclasses import dataclass
from typing import Iterator

from mm3d.arrays.backend import Array
from mm3d.arrays.blocks import block_bounds
from mm3d.grid.axis import Axis
from mm3d.grid.split import Split

WAYS = ("gather", "ring")


@dataclass(frozen=True)
class Context:
    """Divide sequences among n ranks: 2 n chunks, as even as can be, and two of them for each.

    Rank r holds chunk r and then chunk 2 n - 1 - r.  So all have as many pairs of a query and an
    earlier key, 2 n l^2 of chunks of l positions: the work of causal attention is balanced.

    Attributes
    ----------
    axis : Axis
        The ranks, direction c.
    seq : int
        Global number of positions of a sequence, at least one for each rank.
    way : {"gather", "ring"}
        How attention meets the keys and values of other ranks: gathered, or passed on.
    """

    axis: Axis
    seq: int
    way: str = "gather"

    def chunks(self, rank: int) -> list[range]:
        """Return the positions of a rank's two chunks, in the order in which it holds them."""
        count = 2 * self.axis.size
        bounds = (block_bounds(self.seq, count, part) for part in (rank, count - 1 - rank))
        return [range(start, start + length) for start, length in bounds]

    def length(self, rank: int | None = None) -> int:
        """Return how many positions of a sequence a rank holds, by default this one."""
        return sum(map(len, self.chunks(self.axis.rank if rank is None else rank)))

    def runs(self, held: slice) -> list[range]:
        """Return the positions of tokens `held`, counted in this rank's chunks, as runs."""
        found, before = [], 0
        for chunk in self.chunks(self.axis.rank):
            found.append(chunk[max(0, held.start - before):max(0, held.stop - before)])
            before += len(chunk)
        return [run for run in found if run]


class ChunkSplit(Split):
    """Divide positions, dimension 1, over the ranks of a context.

    What is gathered, and what is reduced and scattered, is in the order of the sequence.
    """

    def __init__(self, context: Context) -> None:
        self.context, self.axis, self.dim, self.extent = context, context.axis, 1, context.seq
        self.counts = [context.length(rank) for rank in range(self.axis.size)]

    def __repr__(self) -> str:
        return f"ChunkSplit({self.extent} positions over {self.axis.name})"

    def _places(self) -> Iterator[tuple[slice, slice]]:
        """Yield where each chunk is in the sequence, and in the order of the ranks."""
        before = 0
        for rank in range(self.axis.size):
            for chunk in self.context.chunks(rank):
                yield slice(chunk.start, chunk.stop), slice(before, before + len(chunk))
                before += len(chunk)

    def all_gather(self, a: Array) -> Array:
        """Gather all positions, in the order of the sequence, from the chunks of all ranks."""
        gathered = super().all_gather(a)
        out = self.axis.backend.empty(tuple(gathered.shape), a.dtype)
        for place, here in self._places():
            out[:, place, ...] = gathered[:, here, ...]
        return out

    def reduce_scatter(self, a: Array) -> Array:
        """Sum `a`, of all positions, over the ranks; return this rank's chunks."""
        term = self.term(tuple(a.shape), a.dtype)
        for place, here in self._places():
            term[:, here, ...] = a[:, place, ...]
        return super().reduce_scatter(term)
