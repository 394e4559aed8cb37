"""Describe how activations, and vectors along their features, are divided over the grid.

Activations have two *spaces*: the *outer* space of the residual stream, and the *inner* space
between the two linear layers of a block.  A product *up* leads from the outer space into the inner
one, a product *down* back.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Callable

from mm3d.arrays.backend import Array
from mm3d.arrays.blocks import block_bounds
from mm3d.grid.axis import Axis
from mm3d.grid.grid import Grid
from mm3d.grid.layout import Layout
from mm3d.grid.split import Split


@dataclass(frozen=True)
class Space:
    """Describe how the activations of a space, (batch, sequence, ..., features), are divided.

    Attributes
    ----------
    grid : Grid
        The grid.
    batch, seq : int
        Number of sequences, and of positions in each, that the grid divides.
    rows : str
        Layout of the first two dimensions, as in ``"xy,"`` or ``"x,y"``.
    features : str
        Directions that divide the last dimension.
    vector : str
        Layout of a vector along the features (a bias), as in ``"zx@y"`` (`mm3d.grid.layout`).
    gathered_along : str
        Direction along which products gather these activations; empty if they do not.
    context : Context, optional
        The ranks that have other positions of the same sequences; without it the grid has all.
    """

    grid: Grid
    batch: int
    seq: int
    rows: str
    features: str
    vector: str
    gathered_along: str = ""
    context: "Context | None" = None

    def layout(self, middle: int = 0, unit: int = 1) -> Layout:
        """Return the layout of an activation, `middle` whole dimensions before its features."""
        spec = ",".join([self.rows, *[""] * middle, self.features])
        return Layout(spec, {2 + middle: unit})

    def local_shape(self, *features: int) -> tuple[int, ...]:
        """Return the shape of this rank's block of an activation of (batch, seq, *features)."""
        layout = self.layout(len(features) - 1)
        return layout.local_shape(self.grid, (self.batch, self.seq, *features))

    def allocator(self, *features: int, unit: int = 1) -> Callable[[Any], Array]:
        """Return a function that allocates this rank's block of (batch, seq, *features).

        The function takes a dtype and returns an uninitialized array.  If products gather the
        activation, the memory suits the gather, and every rank must call the function.
        """
        layout, shape = self.layout(len(features) - 1, unit), (self.batch, self.seq, *features)
        memory = self.grid.backend
        if self.gathered_along:
            memory = layout.split(self.grid, shape, self.gathered_along)
        return partial(memory.empty, layout.local_shape(self.grid, shape))

    def rows_split(self, letter: str) -> Split:
        """Return the `Split` of the rows along the direction `letter`."""
        return Layout(self.rows).split(self.grid, (self.batch, self.seq), letter)

    @property
    def sequence_axis(self) -> Axis | None:
        """Return the direction that divides the positions of a sequence; None if there is none."""
        letter = self.rows.partition(",")[2]
        return self.grid[letter] if letter and self.grid[letter].size > 1 else None

    @property
    def length(self) -> int:
        """Return the global number of positions of a sequence."""
        return self.seq if self.context is None else self.context.seq

    def runs(self, held: slice | None = None) -> list[range]:
        """Return the global positions of this rank's tokens, as runs of neighbours.

        `held` is a slice of the grid's `seq` positions, by default that of this rank.
        """
        if held is None:
            held = Layout(self.rows).slices(self.grid, (self.batch, self.seq))[1]
        found, before = [], 0
        for chunk in self.context.chunks() if self.context else [range(self.seq)]:
            found.append(chunk[max(0, held.start - before):max(0, held.stop - before)])
            before += len(chunk)
        return [run for run in found if run] or found[:1]

    def sum_features(self, a: Array) -> Array:
        """Sum `a` over the ranks that share this rank's rows."""
        for letter in self.features:
            a = self.grid[letter].all_reduce(a)
        return a


@dataclass(frozen=True)
class Context:
    """Divide each sequence among n ranks, or grids: 2 n chunks, as even as can be, two for each.

    Rank r holds chunk r and then chunk 2 n - 1 - r.  So all have as many pairs of a query and an
    earlier key, 2 n l^2 of chunks of l positions: the work of causal attention is balanced.
    """

    axis: Axis    # the ranks, direction c
    seq: int    # global number of positions of a sequence, at least one for each rank
    way: str    # {"gather", "ring"}: keys and values of other ranks are gathered, or passed on

    def chunks(self, rank: int | None = None) -> list[range]:
        """Return the positions of a rank's two chunks, by default of this one's."""
        return chunks_of(self.seq, self.axis.size, self.axis.rank if rank is None else rank)


def chunks_of(seq: int, ranks: int, rank: int) -> list[range]:
    """Return the positions of a rank's two chunks, see `Context`, in the order of its array."""
    bounds = (block_bounds(seq, 2 * ranks, part) for part in (rank, 2 * ranks - 1 - rank))
    return [range(start, start + length) for start, length in bounds]
