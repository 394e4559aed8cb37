"""Allocate and fill the operands of microbenchmarks, and name the transports they use."""

from typing import Any, Iterable, Sequence

import numpy as np

from bench.errors import UsageError
from mm3d.arrays.backend import Array
from mm3d.grid.grid import Grid
from mm3d.grid.layout import Layout
from mm3d.transport.choice import in_place


def empty(layout: Layout, grid: Grid, shape: tuple[int, ...], dtype: Any,
          letter: str | None) -> Array:
    """Allocate this rank's block of an array of global `shape`.

    It lies where collectives along the direction `letter`, if there is one, need not copy it.
    """
    local = layout.local_shape(grid, shape)
    if letter is None:
        return grid.backend.empty(local, dtype)
    return layout.split(grid, shape, letter).empty(local, dtype)


def fill(a: Array, backend, seed: int, *names: Any) -> Array:
    """Fill `a` with normally distributed numbers, drawn from the seed and the names; return it."""
    key = [seed, *(sum(map(ord, name)) if isinstance(name, str) else name for name in names)]
    random = np.random.default_rng(key)
    dtype = np.dtype(str(a.dtype))
    a[...] = backend.from_host(tuple(a.shape), dtype,
                               lambda: random.standard_normal(tuple(a.shape), dtype))
    return a


def transport(grid: Grid) -> str:
    """Name the transports of the grid's collectives."""
    names = {getattr(axis.transport, "name", "mpi") for axis in grid.axes.values()
             if axis.size > 1}
    return " ".join(sorted(names)) or "none"


def transports(grid: Grid, axes: Iterable[str]) -> str:
    """Name the transport along each of these directions, in their order."""
    return " ".join(grid[name].transport.name for name in axes)


def in_places(transports: str, kinds: Sequence[str]) -> np.ndarray:
    """Whether collectives leave their result in place, (direction, kind), with a transport of
    each direction."""
    return np.array([[kind in in_place(name) for kind in kinds] for name in transports.split()])


def usual_transport(comm) -> str:
    """Name the transport of collectives of all ranks of `comm`; "none" for one rank.

    Raises
    ------
    UsageError
        When the environment asks for what cannot be.
    """
    try:
        grid = Grid(comm, "numpy", x=comm.size)
    except ValueError as error:
        raise UsageError(str(error)) from error
    name = transport(grid)
    grid.free()
    return name
