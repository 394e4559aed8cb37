"""List the works whose steps are measured, on all grids, in batches that fit in memory."""

import itertools
import math
import sys
from dataclasses import replace
from typing import Iterable, Sequence

import numpy as np

from bench.cluster.spec import Cluster
from bench.instruments.available_memory import total_memory
from bench.prediction import memory_fit, planner
from bench.prediction.work import NAMES, Work
from mm3d.grid.shape import GridShape
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme

# A short step and a long one, to separate the costs of barriers from those of work.  In a cluster
# the short one is half as wide as the other: ranks wait less between operations that are shorter.
MODELS = ((96, 8, 8, 32, 2), (448, 8, 8, 96, 1))    # hidden, heads, batch, seq, layers
SMALLER = (448, 320, 224, 160)    # features of the second model, for ever slower links
LINK_SECONDS = 1.2    # that a link may carry the matrices of a step: W twice and dW once
# Of memory.  Each of 64 ranks on one machine had 46 MB with all libraries loaded, 110 MB more for
# operations alone and pools, and 7 MB more for each model, mostly idle memory that its lines keep.
BYTES_OF_A_RANK, BYTES_OF_A_WORK = 160e6, 10e6
USED = 0.8    # of the machine's memory


def list_models(cluster: Cluster | None, many: bool = False) -> tuple[tuple[int, ...], ...]:
    """List the sizes of the models whose steps are measured: smaller ones where links are slow.

    The short model then has half the features and half the tokens.  Of `many` ranks it is left
    out: its steps are work of the shared cores alone, which longer ones hide behind the links.

    Parameters
    ----------
    cluster : Cluster or None
        The emulated cluster, if the ranks are on several of its nodes.
    many : bool, optional
        Whether there are far more ranks than cores.
    """
    if cluster is None or cluster.link is None:
        return MODELS
    _, heads, batch, seq, layers = MODELS[-1]
    matrices = 3 * 12 * 4    # bytes of float32 over the square of the features, W twice and dW
    hidden = next((hidden for hidden in SMALLER
                   if matrices * hidden ** 2 * 8 <= LINK_SECONDS * cluster.link), SMALLER[-1])
    long = (hidden, heads, batch, seq, layers)
    return (long,) if many else ((hidden // 2, heads, batch, seq // 2, layers), long)


def list_works(ranks: int, products: Iterable[tuple[int, ...]],
               layers: Iterable[tuple[int, ...]], inside: Sequence[str] = (),
               schemes: Sequence[str] = (), most: int = sys.maxsize) -> list[Work]:
    """List products C = AB and Transformers of these sizes, on all grids of all schemes.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    products : iterable of tuple of int
        M, N and K of each.
    layers : iterable of tuple of int
        Sizes of each Transformer.
    inside : sequence of str, optional
        Directions.  Each grid is listed once for each of them that leads to another order of its
        ranks, in which its coordinate varies fastest; by default in the order of the grid alone.
    schemes : sequence of str, optional
        Their names; by default all that divide the work.
    most : int, optional
        Of a scheme with more grids, so many are listed, spread over all of them.

    Raises
    ------
    ValueError
        When one of `schemes` has no grid of `ranks` ranks.
    """
    alone = find_scheme("3d").grid_shape((1, 1, 1))
    grids = [("3d", alone)]
    if ranks > 1:
        every = [one for name in schemes or [None] for one in planner.list_candidates(ranks, name)]
        of_schemes = itertools.groupby(every, key=lambda one: one[0])
        grids = [one for _, some in of_schemes for one in spread(list(some), most)]
    works = [Work("matmul", scheme, grid, sizes, "ab") for sizes in products
             for scheme, grid in grids if find_scheme(scheme).matrix_product]
    works += [Work("layer", scheme, grid, sizes) for sizes in layers for scheme, grid in grids]
    return [replace(work, order=order) for work in works
            for order in (list_orders(work.grid, inside) if inside else [""])]


def spread(listed: list, most: int) -> list:
    """Choose at most `most` of `listed`, the first and the last and others evenly between."""
    if len(listed) <= most:
        return listed
    return [listed[round(k)] for k in np.linspace(0, len(listed) - 1, most)]


def works_in_batches(works: Sequence[Work], ranks: int, dtype: str) -> list[list[Work]]:
    """Divide works, in their order, into as few batches as fit in this machine's memory.

    All works of a batch are in memory together; a single one may need more than there is.

    Parameters
    ----------
    works : sequence of Work
        Products and Transformers on grids of all ranks.
    ranks : int
        Number of ranks, which share the machine's memory.
    dtype : str
        The dtype of all arrays.
    """
    room = USED * (total_memory() or math.inf) / ranks - BYTES_OF_A_RANK
    batches: list[list[Work]] = []
    left = 0.0
    for work in works:
        needed = BYTES_OF_A_WORK + estimate_bytes(work, dtype)
        if not batches or needed > left:
            batches.append([])
            left = room
        batches[-1].append(work)
        left -= needed
    return batches


def contenders_in_batches(works: Sequence[Work], expected: Sequence[float], ranks: int,
                          dtype: str) -> list[list[Work]]:
    """Divide works into as few batches as fit in this machine's memory.

    If they do not fit in one, those of the same sizes are apart, and in the order of their
    `expected` seconds: which of them is the fastest should be found within a batch, as from one to
    another the machine may have become slower or faster.
    """
    batches = works_in_batches(works, ranks, dtype)
    if len(batches) == 1:
        return batches
    of_sizes: dict[tuple, list[Work]] = {}
    for k in sorted(range(len(works)), key=lambda k: expected[k]):
        work = works[k]
        of_sizes.setdefault((work.kind, work.sizes, work.form), []).append(work)
    return [batch for some in of_sizes.values() for batch in works_in_batches(some, ranks, dtype)]


def estimate_bytes(work: Work, dtype: str) -> float:
    """Estimate the bytes of a rank's arrays, with those of a step."""
    if work.kind == "layer":
        return memory_fit.predict_peak(
            work.scheme, work.grid, Stack(**dict(zip(NAMES["layer"], work.sizes)), dtype=dtype))
    m, n, k = work.sizes
    gathered = max(work.grid.sizes) / work.ranks    # of each matrix and its gradient, at most
    return 2 * (m * n + n * k + m * k) * gathered * np.dtype(dtype).itemsize


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
