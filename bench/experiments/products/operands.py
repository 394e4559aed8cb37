"""Allocate and fill the operands of microbenchmarks; observe those of the products of a step."""

from collections import Counter
from typing import Any, Callable, Iterable

import numpy as np

from bench.errors import as_usage_error
from bench.records.model_run import transport_names
from mm3d.arrays.backend import Array
from mm3d.arrays.blocks import block_lengths, block_starts
from mm3d.grid.grid import Grid
from mm3d.grid.layout import Layout
from mm3d.grid.split import Split
from mm3d.tracing.events import ArrayObserver, Gemm
from mm3d.tracing.observe import observed

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


class OperandShapes(ArrayObserver):
    """Collect the operands of products of two matrices: shapes, and which are transposed."""

    kinds = (Gemm,)

    def __init__(self) -> None:
        self.found: list[tuple[tuple, tuple]] = []

    def see_result(self, event: Gemm, given: tuple[Array, Array], result: Array) -> None:
        """Collect the operands, unless they are stacks, as attention multiplies them."""
        if all(len(m.shape) == 2 for m in given):
            self.found.append(tuple((tuple(m.shape), _transposed(m)) for m in given))


def observe_products(step: Callable[[], Any], grid: Grid) -> list[tuple]:
    """Return this rank's products of two matrices in a step of all ranks."""
    shapes = OperandShapes()
    with observed(grid, shapes):
        step()
    return count_products((*a, b[1], a_columns, b_columns)
                          for (a, a_columns), (b, b_columns) in shapes.found)


def count_products(found: Iterable[tuple[int, int, int, bool, bool]]) -> list[tuple]:
    """Return each product once, with its count; empty products are left out."""
    return [(*each, count) for each, count in Counter(found).items() if min(each[:3])]


def _transposed(a: Any) -> bool:
    """Return True if columns are contiguous and rows are not."""
    rows, columns = np.shape(a)
    return rows > 1 and columns > 1 and a.strides[0] < a.strides[1]
