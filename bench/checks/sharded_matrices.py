"""Multiply sharded arrays, as matrices, by vectors, without gathering a matrix."""

import math
from typing import Any, Iterator

import numpy as np
from mpi4py import MPI

from mm3d.grid.grid import Grid
from mm3d.grid.layout import Layout

CHUNK = 256    # rows that are float64 at a time


class ShardedMatrix:
    """A sharded array as a matrix: its first dimensions are rows, the others columns.

    All products are computed in float64 and are the same on every rank.  Results have the copies
    as their first dimension: entry k is computed from the k-th copy of every block.

    Every method is collective; `block` is this rank's.
    """

    def __init__(self, block: Any, layout: Layout, shape: tuple[int, ...], row_dims: int,
                 grid: Grid) -> None:
        self.layout, self.shape, self.row_dims, self.grid = layout, tuple(shape), row_dims, grid
        self.place = layout.slices(grid, self.shape)
        self.block = grid.backend.to_host(block).reshape([s.stop - s.start for s in self.place])
        places = [tuple((s.start, s.stop) for s in layout.slices(grid, self.shape, coords))
                  for coords in grid.shape.all_coordinates()]
        mine = places[grid.rank]
        self.copy = places[:grid.rank].count(mine)    # the number of this rank's copy
        # Ranks without a block are no copies of each other.
        self.copies = max(places.count(place) if math.prod(b - a for a, b in place) else 1
                          for place in set(places))

    def local(self) -> np.ndarray:
        """Return this rank's block as a matrix of rows and columns."""
        shape = self.block.shape
        return self.block.reshape(math.prod(shape[:self.row_dims]),
                                  math.prod(shape[self.row_dims:]))

    def times(self, w: np.ndarray, absolute: bool = False) -> np.ndarray:
        """Multiply by the vector `w` over the columns; the absolute values if `absolute`."""
        columns = np.ravel(w[self.place[self.row_dims:]])
        rows = np.concatenate([part @ columns for part in row_chunks(self.local(), absolute)])
        return self._sum_over_ranks(rows, slice(None, self.row_dims))

    def left_times(self, v: np.ndarray, absolute: bool = False) -> np.ndarray:
        """Multiply the vector `v` over the rows by this; by the absolute values if `absolute`."""
        rows, total, first = np.ravel(v[self.place[:self.row_dims]]), 0.0, 0
        for part in row_chunks(self.local(), absolute):
            total = total + rows[first:first + len(part)] @ part
            first += len(part)
        return self._sum_over_ranks(total, slice(self.row_dims, None))

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Gather the rows with these indices."""
        lead = self.shape[:self.row_dims]
        mine = np.arange(math.prod(lead)).reshape(lead)[self.place[:self.row_dims]].ravel()
        out = np.zeros((self.copies, len(indices), *self.shape[self.row_dims:]))
        if self.block.size:
            for k, row in enumerate(indices):
                for here in np.flatnonzero(mine == row):
                    out[(self.copy, k, *self.place[self.row_dims:])] = self.local()[here].reshape(
                        self.block.shape[self.row_dims:])
        return self._allreduce(out)

    def vector(self) -> np.ndarray:
        """Gather a matrix of one row, as a vector."""
        return self.rows(np.arange(1))[0, 0]

    def _sum_over_ranks(self, part: Any, dims: slice) -> np.ndarray:
        """Sum `part`, at this block's place in the dimensions `dims`, over the ranks."""
        out = np.zeros((self.copies, *self.shape[dims]))
        if self.block.size:
            place = self.place[dims]
            out[(self.copy, *place)] = np.reshape(part, [s.stop - s.start for s in place])
        return self._allreduce(out)

    def _allreduce(self, out: np.ndarray) -> np.ndarray:
        total = np.empty_like(out)
        self.grid.comm.Allreduce(out, total)
        return total


def row_chunks(matrix: np.ndarray, absolute: bool = False) -> Iterator[np.ndarray]:
    """Iterate over `matrix` in chunks of rows, in float64; at least one chunk.

    With `absolute` they are chunks of the absolute values.
    """
    for first in range(0, max(1, len(matrix)), CHUNK):
        part = matrix[first:first + CHUNK].astype(np.float64)
        yield np.abs(part) if absolute else part


def max_over_ranks(values: np.ndarray, comm: MPI.Intracomm) -> np.ndarray:
    """Return the maximum of each value over the ranks; a NaN counts as infinite."""
    mine = np.where(np.isnan(values), np.inf, values).astype(np.float64)
    worst = np.empty_like(mine)
    comm.Allreduce(mine, worst, MPI.MAX)
    return worst
