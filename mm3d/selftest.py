"""Check every collective of the chosen transport on arrays with known sums.

``mpirun -n 8 python -m mm3d.selftest`` ends with status 0 if all are right.  ``MM3D_BACKEND`` and
``MM3D_TRANSPORT`` choose the arrays and the transport.
"""

import sys

import numpy as np
from mpi4py import MPI

from mm3d import guard
from mm3d.console import complain, protect, say
from mm3d.grid.axis import Axis
from mm3d.grid.grid import Grid
from mm3d.transport.pending import Pending

BLOCK_LENGTHS = (1, 7, 1000, 2 ** 18)    # of one rank's block, elements
DTYPES = ("float32", "float64", "float16", "int64")


def failed_collectives(grid: Grid, lengths: tuple[int, ...] = BLOCK_LENGTHS,
                       dtypes: tuple[str, ...] = DTYPES) -> list[str]:
    """Return the collectives along the direction x of `grid` whose results are wrong.

    Each runs twice with even and with uneven blocks of about these lengths, along a first and a
    last dimension: some channels between processes are opened by the first message and first used
    by the second.  All ranks of the grid call this, and get the same list: collective, counts,
    dtype and dimension of each failure.
    """
    axis, size = grid.x, grid.x.size
    cases = []
    for dtype in dtypes:
        for n in lengths:
            for counts in ([n] * size, [n + rank % 3 for rank in range(size)],
                           [n * (rank == size - 1) for rank in range(size)]):
                cases += [(dtype, counts, 0), (dtype, counts, 1)] * 2
    wrong = [f"{name} of {counts} {dtype} along dimension {dim}"
             for dtype, counts, dim in cases
             for name in _wrong_collectives(axis, dtype, counts, dim)]
    return sorted({text for found in grid.comm.allgather(wrong) for text in found})


def _wrong_collectives(axis: Axis, dtype: str, counts: list[int], dim: int) -> list[str]:
    """Return the names of the collectives that fail on one case, on this rank."""
    backend, rank, total = axis.backend, axis.rank, sum(counts)
    shape = (total, 3) if dim == 0 else (3, total)

    def make_term(source: int) -> np.ndarray:
        return ((np.arange(3 * total) + 5 * source) % 11 - 5).reshape(shape).astype(dtype)

    starts = np.cumsum([0, *counts])
    own = (slice(None),) * dim + (slice(starts[rank], starts[rank + 1]),)
    term, expected_sum = make_term(rank), sum(make_term(source) for source in range(axis.size))
    root = axis.size - 1
    summing = axis.begin_reduce_scatter(backend.asarray(term), dim, counts)
    gathering = axis.prefetch(backend.asarray(make_term(0)[own].copy()), dim, counts)
    results = {
        "all_gather": (axis.all_gather(backend.asarray(make_term(0)[own].copy()), dim, counts),
                       make_term(0)),
        "reduce_scatter": (axis.reduce_scatter(backend.asarray(term), dim, counts),
                           expected_sum[own]),
        "all_reduce": (axis.all_reduce(backend.asarray(term)), expected_sum),
        "broadcast": (axis.broadcast(backend.asarray(term), root), make_term(root)),
        "reduce": (axis.reduce(backend.asarray(term), root),
                   expected_sum if rank == root else None),
        "all_to_all": (axis.all_to_all(backend.asarray(term), counts, [counts[rank]] * axis.size,
                                       dim),
                       np.concatenate([make_term(source)[own] for source in range(axis.size)],
                                      dim)),
        "begin_reduce_scatter": (summing.wait(), expected_sum[own])}
    if isinstance(gathering, Pending):
        results["prefetch"] = gathering.wait(), make_term(0)
    if axis.transport.nonblocking_rooted:    # else it is the blocking one
        results |= {f"begin_{kind}": (
            getattr(axis, f"begin_{kind}")(backend.asarray(term), root).wait(), results[kind][1])
            for kind in ("broadcast", "reduce")}
    return [name for name, (found, expected) in results.items()
            if (found is None) != (expected is None)
            or (found is not None and not np.array_equal(backend.to_host(found), expected))]


def main() -> int:
    """Check all collectives along a line of all ranks; return 0 if they are right, else 1.

    It returns 2 for words after its name, as it has no options, and for wrong variables.
    """
    try:
        if sys.argv[1:]:
            raise ValueError(f"{sys.argv[1]}: there are no options; MM3D_BACKEND and "
                             f"MM3D_TRANSPORT choose arrays and transport")
        grid = Grid(MPI.COMM_WORLD, x=MPI.COMM_WORLD.size)
    except (ValueError, ImportError, OSError) as error:    # the same on every rank
        if MPI.COMM_WORLD.rank == 0:
            complain(f"error: {error}")
        MPI.COMM_WORLD.Barrier()    # no rank ends the job before that
        return 2
    wrong = failed_collectives(grid)
    if grid.rank == 0:
        name = grid.x.transport.name
        ranks = f"{grid.size} rank{'s' * (grid.size > 1)}"
        say(*wrong or [f"{name}: all collectives are right on {ranks}"])
    grid.free()
    return min(1, len(wrong))


if __name__ == "__main__":
    protect()
    guard.disarm()    # all ranks end with the same status; a rank that raises aborts below
    try:
        sys.exit(main())
    except Exception as error:
        guard.end_job(error)
