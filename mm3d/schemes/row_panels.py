"""Divide the rows of A and of C = A B into panels: one travels while another is multiplied."""

import math

from mm3d.arrays.backend import Array
from mm3d.arrays.blocks import resized_shape
from mm3d.grid.axis import Pending
from mm3d.grid.split import Split


class RowPanels:
    """Divide rows into panels that the ranks of two directions share equally.

    `a` divides the rows of A over one direction, and `c` the same rows of C over the other.  The
    rows are as many equal blocks as the least common multiple of the two sizes; panel n is the
    n-th part of each block.  So a panel of A is gathered, and one of C scattered, like the whole.
    There are at most `most`, the largest `count` that divides all blocks equally; 1 if both
    directions have one rank.  The attributes `a` and `c` divide the rows of one panel.
    """

    def __init__(self, a: Split, c: Split, most: int) -> None:
        rows, self._blocks = a.extent, math.lcm(a.axis.size, c.axis.size)
        equal = [n for n in range(1, most + 1) if rows % (self._blocks * n) == 0]
        self.count = max(equal, default=1) if self._blocks > 1 else 1
        self.a, self.c = (split.of_panel(self.count) for split in (a, c))

    def parts(self, A: Array) -> list[Array]:
        """Return this rank's rows of each panel of A, as views where they are contiguous."""
        xp, dim = self.a.axis.backend.xp, self.a.dim
        shape = resized_shape(A.shape, dim, A.shape[dim] // self.count)
        blocks = self._view(A, self._blocks // self.a.axis.size)
        return [xp.reshape(blocks[self._index(n)], shape) for n in range(self.count)]

    def put_rows(self, whole: Array, n: int, rows: Array) -> None:
        """Copy the gathered panel `n` to its rows of `whole`, all rows of A."""
        self._put(whole, self._blocks, n, rows)

    def join(self, sums: list[Pending]) -> Pending:
        """Return a `Pending` C that joins the pending sums of its panels."""
        backend, shape = self.c.axis.backend, sums[0].out.shape
        C = backend.empty(resized_shape(shape, self.c.dim, shape[self.c.dim] * self.count),
                          sums[0].out.dtype)
        blocks = self._blocks // self.c.axis.size

        def join() -> None:
            for n, panel in enumerate(sums):
                self._put(C, blocks, n, panel.take())
        return _JoinedPanels(C, join, sums[-1].request)

    def _put(self, whole: Array, blocks: int, n: int, rows: Array) -> None:
        place = self._view(whole, blocks)[self._index(n)]
        place[...] = self.a.axis.backend.xp.reshape(rows, place.shape)

    def _view(self, array: Array, blocks: int) -> Array:
        """View the rows as (blocks, panels, rows of a panel in a block)."""
        dim = self.a.dim
        return self.a.axis.backend.xp.reshape(array, (
            *array.shape[:dim], blocks, self.count, array.shape[dim] // (blocks * self.count),
            *array.shape[dim + 1:]))

    def _index(self, n: int) -> tuple[slice, ...]:
        return (slice(None),) * (self.a.dim + 1) + (slice(n, n + 1),)


class _JoinedPanels(Pending):
    """Hold the sums of panels, which `finish` completes; testing the last one moves all."""

    def wait(self) -> Array:
        if self.finish is not None:
            self.finish()
        self.finish = self.request = None
        return self.out
