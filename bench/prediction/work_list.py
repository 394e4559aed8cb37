"""List the works whose steps are measured, on all grids, in batches that fit in memory."""

import itertools
import sys
from dataclasses import replace
from typing import Iterable, Sequence

import numpy as np

from bench.cases.variants import itemsize
from bench.prediction import memory_fit, planner
from bench.prediction.work import SIZE_NAMES, Work
from mm3d.grid.shape import GridShape
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme

# Of memory.  Each of 64 ranks on one machine had 46 MB with all libraries loaded, 110 MB more for
# operations alone and pools, and 7 MB more for each model, mostly idle memory that its lines keep.
BYTES_OF_A_RANK, BYTES_OF_A_WORK = 160e6, 10e6
USED = 0.8    # of the machine's memory


def list_works(ranks: int, products: Iterable[tuple[int, ...]],
               layers: Iterable[tuple[int, ...]], inside: Sequence[str] = (),
               schemes: Sequence[str] = (), most: int = sys.maxsize) -> list[Work]:
    """List products C = AB and Transformers of these sizes, on all grids of all schemes.

    Each grid is listed once for each direction `inside` that leads to another order of its ranks,
    in which its coordinate varies fastest; by default in the order of the grid alone.  Of a scheme
    with more grids than `most`, so many are listed, spread over all of them.

    Raises ValueError when one of `schemes`, by default all that divide the work, has no grid of
    `ranks` ranks, or there is nothing to list.
    """
    grids = [("3d", find_scheme("3d").grid_shape((1, 1, 1)))]
    if ranks > 1:
        every = [one for name in schemes or [None] for one in planner.list_candidates(ranks, name)]
        of_schemes = itertools.groupby(every, key=lambda one: one[0])
        grids = [one for _, some in of_schemes for one in _choose_evenly(list(some), most)]
    works = [Work("matmul", scheme, grid, sizes, "ab") for sizes in products
             for scheme, grid in grids if find_scheme(scheme).matrix_product]
    works += [Work("layer", scheme, grid, sizes) for sizes in layers for scheme, grid in grids]
    if not works:
        raise ValueError(f"no product of matrices by {', '.join(schemes)}: another scheme, or a "
                         f"layer, would do")
    return [replace(work, order=order) for work in works
            for order in (list_orders(work.grid, inside) if inside else [""])]


def _choose_evenly(listed: list, most: int) -> list:
    """Choose at most `most` of `listed`, the first and the last and others evenly between."""
    if len(listed) <= most:
        return listed
    return [listed[round(k)] for k in np.linspace(0, len(listed) - 1, most)]


def works_in_batches(works: Sequence[Work], dtype: str, memory: float) -> list[list[Work]]:
    """Divide works, in their order, into as few batches as fit in the machine's memory.

    All works of a batch are in memory together, whose bytes all ranks share; a single one may need
    more than there is.  If they do not fit in one, those of other sizes are apart: which grid is
    the fastest should be found within a batch, as from one to another the machine may have become
    slower or faster.
    """
    room = USED * memory / works[0].grid.ranks - BYTES_OF_A_RANK
    needed = [BYTES_OF_A_WORK + _estimate_bytes(work, dtype) for work in works]
    if sum(needed) <= room:
        return [list(works)]
    batches: list[list[Work]] = []
    left = 0.0
    for work, size in zip(works, needed):
        if size > left or not batches or batches[-1][-1].problem != work.problem:
            batches.append([])
            left = room
        batches[-1].append(work)
        left -= size
    return batches


def sort_contenders(works: Sequence[Work], seconds: Sequence[float]) -> list[Work]:
    """Sort works of the same sizes, which follow each other, by their expected seconds.

    Those that compete for the fastest are then measured in the same batch.
    """
    expected = sorted(zip(works, seconds), key=lambda pair: pair[1])
    problems = list(dict.fromkeys(work.problem for work in works))
    return [work for problem in problems for work, _ in expected if work.problem == problem]


def _estimate_bytes(work: Work, dtype: str) -> float:
    """Estimate the bytes of a rank's arrays, with those of a step."""
    if work.kind == "layer":
        return memory_fit.predict_peak(
            work.scheme, work.grid,
            Stack(**dict(zip(SIZE_NAMES["layer"], work.sizes)), dtype=dtype))
    m, n, k = work.sizes
    gathered = max(work.grid.sizes) / work.grid.ranks    # of each matrix and its gradient, at most
    return 2 * (m * n + n * k + m * k) * gathered * itemsize(dtype)


def list_orders(grid: GridShape, inside: Iterable[str]) -> list[str]:
    """List the orders of a grid's ranks in which one of these directions varies fastest.

    The other directions keep their order, and directions of one rank do not count.  A grid with
    one direction of several ranks has the order "", its own.
    """
    several = [axis for axis in grid if grid[axis] > 1]
    if len(several) < 2:
        return [""]
    return ["".join(sorted(grid.directions, key=lambda axis: axis == direction))
            for direction in dict.fromkeys(inside) if direction in several] or [""]
