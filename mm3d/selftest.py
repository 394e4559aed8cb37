"""Every collective of the chosen transport, on arrays with known sums.

``mpirun -n 8 python -m mm3d.selftest`` ends with 0 if all are right.  ``MM3D_BACKEND`` and
``MM3D_TRANSPORT`` choose what is tried.
"""

import sys

import numpy as np
from mpi4py import MPI

from mm3d import guard, launcher
from mm3d.grid.axis import Axis
from mm3d.grid.grid import Grid
from mm3d.transport.pending import Pending

LENGTHS = (1, 7, 1000, 2 ** 18)    # of one rank's block, elements
TYPES = ("float32", "float64", "float16", "int64")


def failures(grid: Grid, lengths: tuple[int, ...] = LENGTHS,
             types: tuple[str, ...] = TYPES) -> list[str]:
    """Collectives along the direction x of `grid` that gave something else than they should.

    Each is tried twice with even and with uneven blocks, along a first and a last dimension: some
    ways between processes are opened by the first message and taken by the second.
    """
    axis, size = grid.x, grid.x.size
    cases = []
    for dtype in types:
        for n in lengths:
            for counts in ([n] * size, [n + rank % 3 for rank in range(size)],
                           [n * (rank == size - 1) for rank in range(size)]):
                cases += [(dtype, counts, 0), (dtype, counts, 1)] * 2
    wrong = [f"{name} of {counts} {dtype} along dimension {dim}"
             for dtype, counts, dim in cases for name in _wrong(axis, dtype, counts, dim)]
    return sorted({text for found in grid.comm.allgather(wrong) for text in found})


def _wrong(axis: Axis, dtype: str, counts: list[int], dim: int) -> list[str]:
    """Names of the collectives that fail on one case, on this rank."""
    backend, rank, total = axis.backend, axis.rank, sum(counts)
    shape = (total, 3) if dim == 0 else (3, total)

    def term(of: int) -> np.ndarray:
        return ((np.arange(3 * total) + 5 * of) % 11 - 5).reshape(shape).astype(dtype)

    starts = np.cumsum([0, *counts])
    own = (slice(None),) * dim + (slice(starts[rank], starts[rank + 1]),)
    here, added = term(rank), sum(term(of) for of in range(axis.size))
    root = axis.size - 1
    summing = axis.begin_reduce_scatter(backend.asarray(here), dim, counts)
    gathering = axis.prefetch(backend.asarray(term(0)[own].copy()), dim, counts)
    results = {
        "all_gather": (axis.all_gather(backend.asarray(term(0)[own].copy()), dim, counts),
                       term(0)),
        "reduce_scatter": (axis.reduce_scatter(backend.asarray(here), dim, counts), added[own]),
        "all_reduce": (axis.all_reduce(backend.asarray(here)), added),
        "broadcast": (axis.broadcast(backend.asarray(here), root), term(root)),
        "reduce": (axis.reduce(backend.asarray(here), root), added if rank == root else None),
        "begin_reduce_scatter": (summing.wait(), added[own])}
    if isinstance(gathering, Pending):
        results["prefetch"] = gathering.wait(), term(0)
    return [name for name, (found, expected) in results.items()
            if (found is None) != (expected is None)
            or (found is not None and not np.array_equal(backend.to_host(found), expected))]


def main() -> int:
    """Try all collectives on a line of all ranks; 0 if they are right."""
    grid = Grid(MPI.COMM_WORLD, x=MPI.COMM_WORLD.size)
    wrong = failures(grid)
    if grid.rank == 0:
        name = grid.x.transport.name
        print(*wrong or [f"{name}: all collectives are right on {grid.size} ranks"], sep="\n")
    grid.free()
    return min(1, len(wrong))


if __name__ == "__main__":
    guard.disarm()    # the status is the same on all ranks, and what one raises ends the job
    try:
        sys.exit(main())
    except Exception:
        launcher.abort(MPI.COMM_WORLD)
