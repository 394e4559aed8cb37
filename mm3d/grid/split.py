"""Divide one dimension of a matrix over one direction of the process grid, and gather it."""

import math
from typing import Any

from mm3d.arrays.backend import Array
from mm3d.arrays.blocks import block_lengths, resized_shape
from mm3d.grid.axis import Axis
from mm3d.transport.pending import Pending


class Split:
    """Divide one dimension of a matrix over one axis, and call collectives on its blocks.

    Parameters
    ----------
    axis : Axis
        The direction.
    dim : int
        The dimension that is divided.
    extent : int
        Its length before it is divided.
    unit : int
        Number of elements that stay together, such as the columns of an attention head.

    Attributes
    ----------
    counts : list of int
        Length of each rank's block.
    """

    def __init__(self, axis: Axis, dim: int, extent: int, unit: int = 1) -> None:
        self.axis, self.dim, self.extent = axis, dim, extent
        self.counts = block_lengths(extent, axis.size, unit)

    def __repr__(self) -> str:
        return f"Split(dimension {self.dim} of {self.extent} over {self.axis.name})"

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate this rank's block, of local `shape`, so that `all_gather` need not copy it.

        Every rank of the axis must call it, with the same dtype and with shapes that fit;
        `all_gather` accepts any other array as well.
        """
        return self.axis.transport.block(shape, dtype, self.dim, self.counts)

    def term(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate this rank's term of a sum, for `reduce_scatter`.

        Every rank of the axis must call it, with the same shape and dtype; `reduce_scatter`
        accepts any other array as well.
        """
        return self.axis.transport.term(shape, dtype)

    def reduce_term(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate this rank's term of a sum, for `reduce`; otherwise like `term`."""
        return self.axis.transport.reduce_term(shape, dtype)

    def all_gather(self, a: Array) -> Array:
        """Gather the whole dimension from the blocks of all ranks."""
        return self.axis.all_gather(a, self.dim, self.counts)

    def prefetch(self, a: Array) -> Array | Pending:
        """Start an `all_gather` that may run while this rank computes, for `gather`."""
        return self.axis.prefetch(a, self.dim, self.counts)

    def reduce_scatter(self, a: Array) -> Array:
        """Sum `a`, in which the dimension is whole, over the ranks; return this rank's block."""
        return self.axis.reduce_scatter(a, self.dim, self.counts)

    def begin_reduce_scatter(self, a: Array) -> Pending:
        """Start a `reduce_scatter` that may run while this rank computes."""
        return self.axis.begin_reduce_scatter(a, self.dim, self.counts)

    def broadcast(self, a: Array, root: int) -> Array:
        """Broadcast the block of the rank `root` to all ranks."""
        return self.axis.broadcast(self._block_of_root(a, root), root)

    def begin_broadcast(self, a: Array, root: int) -> Pending:
        """Start a `broadcast` that may run while this rank computes."""
        return self.axis.begin_broadcast(self._block_of_root(a, root), root)

    def reduce(self, a: Array, root: int) -> Array | None:
        """Return the sum of the terms of the block of `root`, on that rank; None on the others."""
        return self.axis.reduce(a, root)

    def begin_reduce(self, a: Array, root: int) -> Pending:
        """Start a `reduce` that may run while this rank computes."""
        return self.axis.begin_reduce(a, root)

    def all_to_all(self, a: Array) -> Array:
        """Send every rank its block of `a`, in which the dimension is whole.

        Returns the blocks of this rank, in the order of the ranks that sent them.
        """
        own = self.counts[self.axis.rank]
        return self.axis.all_to_all(a, self.counts, [own] * self.axis.size, self.dim)

    def shift(self, a: Array, held: int, by: int) -> Array:
        """Pass blocks along the line, each to the rank `by` places before, cyclically.

        `held` is the number of the block `a`; the next rank holds the next one.  Every rank calls
        this, and gets block `held + by`.
        """
        axis, size = self.axis, self.axis.size
        by %= size
        if not by:
            return a
        shape = resized_shape(a.shape, self.dim, self.counts[(held + by) % size])
        sends, receives = [0] * size, [0] * size
        sends[axis.rank - by] = a.size
        receives[(axis.rank + by) % size] = math.prod(shape)
        xp = axis.backend.xp
        flat = xp.reshape(axis.backend.contiguous(a), (a.size,))
        return xp.reshape(axis.all_to_all(flat, sends, receives), shape)

    def of_panel(self, panels: int) -> "Split":
        """Return the `Split` of one of `panels` equal parts of the dimension, in equal blocks."""
        return Split(self.axis, self.dim, self.extent // panels)

    def _block_of_root(self, a: Array, root: int) -> Array:
        """Return `a` on `root`; elsewhere memory for the block of `root`, otherwise like `a`."""
        if self.axis.rank == root:
            return a
        shape = resized_shape(a.shape, self.dim, self.counts[root])
        return self.axis.backend.empty(shape, a.dtype)


class Gathered:
    """Hold an operand that is already gathered: `gather` returns it as it is."""

    def __init__(self, array: Array) -> None:
        self.array = array


Operand = Array | Gathered | Pending


def gather(operand: Operand, split: Split) -> Array:
    """Return the gathered operand: gather it along `split`, unless that is done or in flight."""
    if isinstance(operand, Gathered):
        return operand.array
    return operand.take() if isinstance(operand, Pending) else split.all_gather(operand)


class FaceSplit(Split):
    """Give the first rank of an axis a whole dimension of a matrix, and the others none of it.

    It is for `mm3d.schemes.faces`.  Parameters and interface are those of a `Split`; a gather is a
    broadcast from the first rank, and a reduce-scatter a reduction onto it.
    """

    def __init__(self, axis: Axis, dim: int, extent: int) -> None:
        self.axis, self.dim, self.extent = axis, dim, extent
        self.counts = [extent] + [0] * (axis.size - 1)

    def __repr__(self) -> str:
        return f"FaceSplit(dimension {self.dim} of {self.extent} on the first of {self.axis.name})"

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate this rank's block, of local `shape`."""
        return self.axis.backend.empty(shape, dtype)

    term = Split.reduce_term    # a reduce-scatter is a reduction

    def all_gather(self, a: Array) -> Array:
        """Broadcast the block of the first rank."""
        return self.broadcast(a, 0)

    def reduce_scatter(self, a: Array) -> Array:
        """Return the sum of `a` on the first rank, and an empty block on the others."""
        total = self.reduce(a, 0)
        if total is None:
            total = self.axis.backend.empty(resized_shape(a.shape, self.dim, 0), a.dtype)
        return total

    def begin_reduce_scatter(self, a: Array) -> Pending:
        """Complete a `reduce_scatter`: a reduction onto one rank is not begun ahead."""
        return Pending(self.reduce_scatter(a))

    def prefetch(self, a: Array) -> Array:
        """Return `a`: a broadcast is not begun ahead."""
        return a
