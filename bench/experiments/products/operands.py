"""Allocate and fill the operands of microbenchmarks, and name their default transport."""

from typing import Any, Callable

import numpy as np

from bench.errors import as_usage_error
from bench.instruments.sampling import transport_names
from mm3d.arrays.backend import Array
from mm3d.arrays.blocks import block_lengths, block_starts
from mm3d.grid.grid import Grid
from mm3d.grid.layout import Layout
from mm3d.grid.split import Split

CollectiveCall = Callable[[], Array | None]


def allocate(layout: Layout, grid: Grid, shape: tuple[int, ...], dtype: Any,
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


def collective_operand(split: Split, kind: str, shape: tuple[int, ...], dtype: str) -> Array:
    """Allocate the array that a collective reads, in the memory from which it is sent fastest."""
    if kind == "all_gather":
        return split.empty((*shape[:-1], split.counts[split.axis.rank]), dtype)
    if kind == "reduce_scatter":
        return split.term(shape, dtype)
    return split.axis.backend.empty(shape, dtype)


def collective_call(split: Split, kind: str, a: Array) -> CollectiveCall:
    """Return a call of a collective on `a`, as `mm3d.grid.axis.COLLECTIVES` names it."""
    axis = split.axis
    return {"all_gather": lambda: split.all_gather(a),
            "reduce_scatter": lambda: split.reduce_scatter(a),
            "all_reduce": lambda: axis.all_reduce(a),
            "broadcast": lambda: axis.broadcast(a, 0),
            "reduce": lambda: axis.reduce(a, 0),
            "all_to_all": lambda: axis.all_to_all(
                a, split.counts, [split.counts[axis.rank]] * axis.size, split.dim)}[kind]


def plain_call(comm: Any, kind: str, length: int, dtype: str) -> Callable[[], object]:
    """Return MPI's own blocking call for a collective on a flat array of NumPy, of zeros.

    Nothing but mpi4py is between the caller and MPI, and no memory is allocated.

    Parameters
    ----------
    kind : str
        One of `mm3d.grid.axis.COLLECTIVES`.
    """
    counts = block_lengths(length, comm.size)
    whole, other = np.zeros(length, dtype), np.zeros(length, dtype)
    block = np.zeros(counts[comm.rank], dtype)
    received = np.zeros(counts[comm.rank] * comm.size, dtype)
    parts = (counts, block_starts(counts))
    arriving = [counts[comm.rank]] * comm.size
    return {"all_gather": lambda: comm.Allgatherv(block, [whole, parts]),
            "reduce_scatter": lambda: comm.Reduce_scatter(whole, block, counts),
            "all_reduce": lambda: comm.Allreduce(whole, other),
            "broadcast": lambda: comm.Bcast(whole, 0),
            "reduce": lambda: comm.Reduce(whole, other if comm.rank == 0 else None, root=0),
            "all_to_all": lambda: comm.Alltoallv(
                [whole, parts], [received, (arriving, block_starts(arriving))])}[kind]


def default_transport(comm) -> str:
    """Return the transport of collectives of all ranks of `comm`; "none" for one rank.

    Raises UsageError when the environment asks for a transport that is not possible.
    """
    with as_usage_error():
        grid = Grid(comm, "numpy", x=comm.size)
    name = transport_names(grid)
    grid.free()
    return name
