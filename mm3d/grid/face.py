"""Store a dimension on one face of the grid: all of it on the first rank of an axis."""

from typing import Any

from mm3d.arrays.backend import Array
from mm3d.arrays.blocks import resized_shape
from mm3d.grid.axis import Axis, Pending
from mm3d.grid.split import Split


class FaceSplit(Split):
    """Give the first rank of an axis a whole dimension of a matrix, and the others none of it.

    It has the interface of a `Split`, whose blocks are balanced.  A gather is here a broadcast
    from the first rank, and a reduce-scatter a reduction onto it.

    Parameters
    ----------
    axis, dim, extent
        As in `mm3d.grid.axis.Split`.
    """

    def __init__(self, axis: Axis, dim: int, extent: int) -> None:
        self.axis, self.dim, self.extent = axis, dim, extent
        self.counts = [extent] + [0] * (axis.size - 1)

    def __repr__(self) -> str:
        return f"FaceSplit(dimension {self.dim} of {self.extent} on the first of {self.axis.name})"

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate this rank's block, of local `shape`."""
        return self.axis.backend.empty(shape, dtype)

    def term(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate this rank's term of a sum, for `reduce_scatter`, as `reduce_term` does."""
        return self.reduce_term(shape, dtype)

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
