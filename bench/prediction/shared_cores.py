"""Trace the work of ranks that share cores: the work of all ranks counts, not that of one.

`bench.prediction.calibration` measures products and passes while all ranks compute them.  Where
ranks share cores and only some compute, such as those on a face (`mm3d.schemes.faces`), the others
leave them the cores.
"""

import itertools
import math
from collections import Counter
from copy import copy
from typing import Callable

from mm3d.grid.layout import without_faces
from mm3d.grid.shape import GridShape
from mm3d.schemes import find_scheme
from mm3d.tracing.events import Collective
from mm3d.tracing.trace import Trace


def trace_on_cores(trace_rank: Callable[[int], Trace], scheme: str, grid: GridShape,
                   cores: int) -> Trace:
    """Return the trace of rank 0, with products and passes averaged over all ranks.

    An operation on a fraction f of the ranks counts f times, but never less than it would if each
    rank had a core to itself.  Where each rank has its own, or this is unknown, `cores` is 0:
    then, and where all ranks compute alike, this is the trace of rank 0 itself.
    """
    first = trace_rank(0)
    if not cores or not _computes_on_faces(scheme, grid):
        return first
    shares: Counter = Counter()
    for rank, share in _ranks_of_faces(grid):
        for key, times in (trace_rank(rank) if rank else first).events.items():
            shares[key] += share * times
    found = copy(first)
    found.events = Counter({
        key: first.events[key] if isinstance(key[-1], Collective)
        else max(times, first.events[key] * min(1, cores / grid.ranks))
        for key, times in shares.items()
        if not isinstance(key[-1], Collective) or key in first.events})
    return found


def _computes_on_faces(scheme: str, grid: GridShape) -> bool:
    """Return whether activations of a scheme lie on faces of the grid, so that some ranks idle."""
    spaces = find_scheme(scheme).layouts(grid, batch=1, seq=1)
    return any(without_faces(letters) != letters for space in spaces for letters in space[:2])


def _ranks_of_faces(grid: GridShape) -> list[tuple[int, float]]:
    """List one rank for each group of alike ranks, with their fraction of all.

    Ranks whose coordinates are 0 along the same directions are alike: their block lengths differ
    by one at most.  The last of them stands for all.
    """
    places = [[(0, 1 / size), (size - 1, 1 - 1 / size)][:size] for size in grid.values()]
    return [(grid.rank({axis: place for axis, (place, _) in zip(grid, chosen)}),
             math.prod(share for _, share in chosen)) for chosen in itertools.product(*places)]
