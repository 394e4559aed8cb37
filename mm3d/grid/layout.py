"""Describe which directions of the grid divide which dimensions of an array.

A layout is written as one entry a dimension, separated by commas; the letters of an entry are
the directions that divide the dimension, in this order.  On an X x Y x Z grid

- ``"xy,z"`` is the paper's A_ijl: rows by x, each block of rows again by y, columns by z;
- ``"z,yx"`` is its B_lji, ``"xz,y"`` its C_ilj;
- ``"xy,,z"`` an activation (batch, sequence, hidden) divided in whole sequences.

Along a direction that is not named ranks hold copies.  Where sizes do not divide, blocks differ by
one unit.  Two marks name a direction along which one rank holds the block, and the others nothing:

- ``"zx@y"`` is a bias of A's columns, the paper's b_li.  It has no rows that y could divide: z
  divides it like the columns, then x, and along y the rank on the diagonal j = l stores it (j = l
  modulo Y, where Y and Z differ).  The products of matrices have no such layout.
- ``"xy0,z"`` is A on the face y = 0 of the grid, with rows by x and columns by z, as
  `mm3d.schemes.faces` stores it.
"""

import math
import re
from typing import Mapping

import numpy as np

from mm3d.arrays.backend import Array
from mm3d.arrays.blocks import block_bounds, block_starts
from mm3d.arrays.host_arrays import check_unmasked
from mm3d.grid.grid import Grid
from mm3d.grid.shape import GridShape
from mm3d.grid.split import FaceSplit, Split


class Layout:
    """Describe how an array is divided over a grid.

    Where a block lies depends only on the shape of the grid and on coordinates.  So `slices`,
    `local_shape`, `owns_block` and `diagonal_rank` take a `GridShape` and coordinates, or a `Grid`
    and by default the coordinates of this rank.

    Parameters
    ----------
    spec : str
        The layout, in the notation of this module.
    units : mapping of int to int, optional
        By dimension, the number of elements that the *first* direction that divides it keeps
        together (the columns of an attention head).  Later directions divide single elements.

    Attributes
    ----------
    dims : tuple of str
        By dimension, the directions that divide it; `letters` are those of all, in order.
    faces : frozenset of str
        Those along which the first rank holds the whole block.
    diagonal : str or None
        The direction after '@'; `named` is `letters` and it.

    Raises
    ------
    ValueError
        When a direction appears twice, '@' is not followed by one direction, or units are no
        whole numbers of at least 1, each of a dimension that there is.
    """

    def __init__(self, spec: str, units: Mapping[int, int] | None = None) -> None:
        dims, at, diagonal = spec.partition("@")
        self.spec, self.units = spec, dict(units or {})
        self.dims = tuple(dims.replace("0", "").split(","))
        self.faces = frozenset(re.findall("([a-z])0", dims))
        self.diagonal, self.letters = diagonal or None, "".join(self.dims)
        self.named = self.letters + diagonal
        if len({*self.named}) < len(self.named) or at and (len(diagonal) != 1 or not self.letters):
            raise ValueError(f"layout {spec!r}: a direction may divide one dimension only, once, "
                             f"and '@' names one direction more, as in 'xy,z' or 'zx@y'")
        for dim, unit in self.units.items():
            if dim not in range(len(self.dims)) or unit < 1 or unit % 1:
                raise ValueError(f"layout {spec!r} with units={self.units}: whole numbers of at "
                                 f"least 1, for dimensions 0 to {len(self.dims) - 1}, would do")

    def __repr__(self) -> str:
        units = f", units={self.units}" if self.units else ""
        return f"Layout({self.spec!r}{units})"

    def slices(self, grid: GridShape | Grid, shape: tuple[int, ...],
               coords: Mapping[str, int] | None = None) -> tuple[slice, ...]:
        """Return the slices of a global array that select a rank's block.

        Parameters
        ----------
        grid : GridShape or Grid
            The grid that the array is divided over.
        shape : tuple of int
            Global shape of the array.
        coords : mapping of str to int, optional
            Coordinates of the rank, or arrays of those of many; by default those of this rank.

        Raises
        ------
        ValueError
            When the grid lacks a direction of the layout, or the number of dimensions differs.
        """
        sizes, coords = _resolve_place(grid, coords)
        self._check(sizes, shape)
        if not self.owns_block(sizes, coords):
            return (slice(0, 0),) * len(shape)
        bounds = (self._bounds(sizes, n, dim, coords, self.dims[dim])
                  for dim, n in enumerate(shape))
        return tuple(slice(start, start + length) for start, length in bounds)

    def local_shape(self, grid: GridShape | Grid, shape: tuple[int, ...],
                    coords: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """Return the shape of a rank's block; parameters and errors as in `slices`."""
        return tuple(s.stop - s.start for s in self.slices(grid, shape, coords))

    def shard(self, a: np.ndarray, grid: Grid) -> Array:
        """Return a copy of this rank's block of the global array `a`, as the backend's array.

        Raises
        ------
        ValueError
            When elements are masked, or as in `slices`.
        """
        check_unmasked("the array", a)
        return grid.backend.asarray(np.ascontiguousarray(a[self.slices(grid, a.shape)]))

    def unshard(self, a: Array, grid: Grid, shape: tuple[int, ...]) -> np.ndarray:
        """Gather the global array of `shape` on every rank from the ranks' blocks `a`.

        For checks and small arrays only: no algorithm stores a global array.  Every rank of the
        grid must call it.

        Raises
        ------
        ValueError
            On every rank alike, when some rank's `a` does not have the shape of its block.
        """
        shape = tuple(shape)
        local = np.ascontiguousarray(grid.backend.to_host(a))
        expected = self.local_shape(grid, shape)
        found = grid.comm.allgather(None if local.shape == expected else (expected, local.shape))
        for rank, wrong in enumerate(found):
            if wrong:
                raise ValueError(f"the block of an array of {shape} in layout {self.spec!r} is "
                                 f"{wrong[0]} on rank {rank}, not {wrong[1]}")
        places = [self.slices(grid, shape, coords) for coords in grid.shape.all_coordinates()]
        # As integers: MPI does not know every dtype, nor all of them more than 2^31 elements.
        like = np.dtype(f"u{math.gcd(local.itemsize, 8)}")
        words = local.itemsize // like.itemsize    # integers an element
        sizes = [words * math.prod(s.stop - s.start for s in place) for place in places]
        parts, starts = np.empty(sum(sizes), like), block_starts(sizes)
        grid.comm.Allgatherv(local.reshape(-1).view(like), [parts, (sizes, starts)])
        out = np.empty(shape, local.dtype)
        for place, start, size in zip(places, starts, sizes):
            part = parts[start:start + size].view(local.dtype)
            out[place] = part.reshape(out[place].shape)
        return out

    def split(self, grid: Grid, shape: tuple[int, ...], letter: str) -> Split:
        """Return the `Split` of an array of global `shape` along the direction `letter`.

        Its extent is the length of this rank's block after the directions before `letter` have
        divided the dimension.

        Raises
        ------
        ValueError
            When `letter` divides no dimension.
        """
        self._check(grid.shape, shape)
        if len(letter) != 1 or letter not in self.letters:
            raise ValueError(f"layout {self.spec!r} divides nothing by {letter!r}: it has "
                             f"{', '.join(self.letters) or 'no directions'}")
        dim = next(d for d, letters in enumerate(self.dims) if letter in letters)
        before = self.dims[dim].partition(letter)[0]
        _, length = self._bounds(grid.shape, shape[dim], dim, grid.coords, before)
        if letter in self.faces:
            return FaceSplit(grid[letter], dim, length)
        return Split(grid[letter], dim, length, 1 if before else self.units.get(dim, 1))

    # Layouts with '@', of vectors.

    def owns_block(self, grid: GridShape | Grid, coords: Mapping[str, int] | None = None) -> bool:
        """Return whether the rank at `coords`, by default this rank, stores a block."""
        if self.diagonal is None:
            return True
        sizes, coords = _resolve_place(grid, coords)
        return coords[self.diagonal] == self.diagonal_rank(sizes, coords)

    def diagonal_rank(self, grid: GridShape | Grid,
                      coords: Mapping[str, int] | None = None) -> int:
        """Return the coordinate, along the direction after '@', of the rank that stores the block.

        `coords` are the coordinates along the others, by default those of this rank.
        """
        sizes, coords = _resolve_place(grid, coords)
        # The first direction of the last divided dimension selects it, such as a vector's
        # features; earlier ones may be divided too, such as experts.
        along = next(letters[0] for letters in reversed(self.dims) if letters)
        return coords[along] % sizes[self.diagonal]

    def _bounds(self, sizes: GridShape, length: int, dim: int, coords: Mapping[str, int],
                letters: str) -> tuple[int, int]:
        """Return start and length of the block at `coords` that `letters` make of a dimension."""
        start, unit = 0, self.units.get(dim, 1)
        for letter in letters:
            if letter in self.faces:    # coordinates may be arrays
                holds = coords[letter] == 0
                before, length = length * (1 - holds), length * holds
            else:
                before, length = block_bounds(length, sizes[letter], coords[letter], unit)
            start, unit = start + before, 1
        return start, length

    def _check(self, sizes: GridShape, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless the grid and an array of `shape` fit the layout."""
        missing = [c for c in self.named if c not in sizes]
        if missing:
            raise ValueError(f"layout {self.spec!r} names the direction {missing[0]!r}, which "
                             f"the grid does not have: it has {', '.join(sizes)}")
        if len(shape) != len(self.dims):
            raise ValueError(f"layout {self.spec!r} is for {len(self.dims)} dimensions, but the "
                             f"array has {len(shape)}: {tuple(shape)}")


def _resolve_place(grid: GridShape | Grid, coords: Mapping[str, int] | None
                   ) -> tuple[GridShape, Mapping[str, int]]:
    """Return the shape of a grid, and coordinates on it, by default those of this rank."""
    if not isinstance(grid, GridShape):
        return grid.shape, grid.coords if coords is None else coords
    if coords is None:
        raise ValueError(f"a block on {grid!r} needs coordinates: no rank is behind the shape")
    return grid, coords


def divided_directions(spec: str) -> str:
    """Return the directions that divide the dimensions of a layout, or of a part of one."""
    return "".join(filter(str.isalpha, spec.partition("@")[0]))


def without_faces(spec: str) -> str:
    """Return a layout in which every rank holds what the first rank of its line holds."""
    return re.sub("[a-z]0", "", spec)
