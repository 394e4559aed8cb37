"""Arrays that lie on a grid, as matrices that can be multiplied with vectors, never gathered."""

import math
from typing import Any, Iterator

import numpy as np
from mpi4py import MPI

from mm3d.grid.grid import Grid
from mm3d.grid.layout import Layout

CHUNK = 256    # rows that are float64 at a time


class Sheet:
    """A distributed array as a matrix: its first dimensions are rows, the others columns.

    Everything is computed in float64.  Where ranks hold copies, results have the first dimension
    (copies): one for the first copy of every block, one for the second, and so on.

    Parameters
    ----------
    block : array
        This rank's block.
    layout : Layout
        How the whole lies on the grid.
    shape : tuple of int
        Of the whole.
    lead : int
        How many dimensions are rows.
    grid : Grid
        The ranks; every method is collective.
    """

    def __init__(self, block: Any, layout: Layout, shape: tuple[int, ...], lead: int,
                 grid: Grid) -> None:
        self.layout, self.shape, self.lead, self.grid = layout, tuple(shape), lead, grid
        self.place = layout.slices(grid, self.shape)
        self.block = grid.backend.to_host(block).reshape([s.stop - s.start for s in self.place])
        places = [tuple((s.start, s.stop) for s in layout.slices(grid, self.shape, coords))
                  for coords in grid.shape.all_coordinates()]
        mine = places[grid.rank]
        self.copy = places[:grid.rank].count(mine)
        # Ranks without a block are no copies of each other.
        self.copies = max(places.count(place) if math.prod(b - a for a, b in place) else 1
                          for place in set(places))

    def matrix(self) -> np.ndarray:
        """This rank's block with one dimension of rows and one of columns."""
        shape = self.block.shape
        return self.block.reshape(math.prod(shape[:self.lead]), math.prod(shape[self.lead:]))

    def times(self, w: np.ndarray, absolute: bool = False) -> np.ndarray:
        """The product with the vector `w` over the columns, or that of the absolute values."""
        columns = np.ravel(w[self.place[self.lead:]])
        rows = np.concatenate([part @ columns for part in chunks(self.matrix(), absolute)])
        return self._summed(rows, slice(None, self.lead))

    def left(self, v: np.ndarray, absolute: bool = False) -> np.ndarray:
        """The product of the vector `v` over the rows with this, or with the absolute values."""
        rows, total, first = np.ravel(v[self.place[:self.lead]]), 0.0, 0
        for part in chunks(self.matrix(), absolute):
            total = total + rows[first:first + len(part)] @ part
            first += len(part)
        return self._summed(total, slice(self.lead, None))

    def some(self, rows: np.ndarray) -> np.ndarray:
        """The rows with these numbers, whole."""
        numbers = np.arange(math.prod(self.shape[:self.lead])).reshape(self.shape[:self.lead])
        mine = numbers[self.place[:self.lead]].ravel()
        out = np.zeros((self.copies, len(rows), *self.shape[self.lead:]))
        if self.block.size:
            for k, row in enumerate(rows):
                for here in np.flatnonzero(mine == row):
                    out[(self.copy, k, *self.place[self.lead:])] = self.matrix()[here].reshape(
                        self.block.shape[self.lead:])
        return self._everywhere(out)

    def whole(self) -> np.ndarray:
        """The array itself; of vectors only."""
        return Sheet.some(self, np.arange(1))[0, 0]

    def _summed(self, part: Any, dims: slice) -> np.ndarray:
        """The sum over the ranks of `part`, which lies in the dimensions `dims` of this."""
        out = np.zeros((self.copies, *self.shape[dims]))
        if self.block.size:
            place = self.place[dims]
            out[(self.copy, *place)] = np.reshape(part, [s.stop - s.start for s in place])
        return self._everywhere(out)

    def _everywhere(self, out: np.ndarray) -> np.ndarray:
        total = np.empty_like(out)
        self.grid.comm.Allreduce(out, total)
        return total


def chunks(matrix: np.ndarray, absolute: bool = False) -> Iterator[np.ndarray]:
    """Rows of `matrix` in float64, some at a time, or their absolute values; one part at least."""
    for first in range(0, max(1, len(matrix)), CHUNK):
        part = matrix[first:first + CHUNK].astype(np.float64)
        yield np.abs(part) if absolute else part


def greatest(values: np.ndarray, comm: MPI.Intracomm) -> np.ndarray:
    """The greatest of each over the ranks; what is no number counts as infinite."""
    mine = np.where(np.isnan(values), np.inf, values).astype(np.float64)
    worst = np.empty_like(mine)
    comm.Allreduce(mine, worst, MPI.MAX)
    return worst
