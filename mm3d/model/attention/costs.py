"""Count in closed form what attention moves and multiplies where a context divides positions."""

import math
from collections.abc import Mapping
from typing import Any

from mm3d.grid.activations import chunks_of
from mm3d.model.attention.windows import visible
from mm3d.model.cost import Key, add_move, passes
from mm3d.model.sizes import ModelSizes
from mm3d.schemes.closed_form import Move
from mm3d.schemes.words import Words


def context_moves(scheme: str, grid: Mapping[str, int], sizes: ModelSizes, ranks: int,
                  way: str = "gather", recompute: str = "none",
                  **options: Any) -> dict[str, dict[Key, Move]]:
    """Sum up the collectives along direction c in a step, by phase, direction and kind.

    Both ways, see `mm3d.grid.activations.Context`, move the same words, n - 1 times keys and
    values in forward, and these and their gradients in backward: in a call each, or passed on in
    n - 1 calls.  Where the grid divides positions too, each of its ranks moves what it has
    gathered along the grid.

    The context has n = `ranks`; other parameters and the result, with the words of all ranks of n
    grids together, are as of `mm3d.model.cost.moves`, with global sizes.
    """
    inner = Words(scheme, grid, sizes.batch, sizes.seq, **options).inner
    held = inner.copies * inner.grid.ranks_along(inner.rows.partition(",")[2])
    block = 2 * sizes.tokens * sizes.kv_heads * sizes.head * held * (ranks - 1)
    if way == "ring":
        forward = [Move("c", "all_to_all", block, ranks - 1)]
        backward = [Move("c", "all_to_all", 2 * block, 2 * (ranks - 1))]
    else:
        forward = [Move("c", "all_gather", block)]
        backward = forward + [Move("c", "reduce_scatter", block)]
    found: dict[str, dict[Key, Move]] = {"forward": {}, "backward": {}}
    for (part, kind), times in passes(sizes, recompute).items():
        if part == "attention":
            own = found["forward" if kind == "forward" else "backward"]
            for move in forward if kind in ("forward", "again") else backward:
                add_move(own, move, times)
    return found


def context_pairs(seq: int, ranks: int, rank: int, window: int | None = None) -> int:
    """Count the pairs of a query and a key of a sequence that a rank of a context multiplies.

    The mask is causal.  Of n ranks with 2 n equal chunks of l positions each has (2 n + 1) l^2,
    where one rank without a context has 4 n^2 l^2: only what a mask hides wholly is left out.
    """
    every = [chunk for one in range(ranks) for chunk in chunks_of(seq, ranks, one)]
    pairs = (visible(own, keys, True, window)
             for own in chunks_of(seq, ranks, rank) for keys in every)
    return sum(math.prod(map(len, pair)) for pair in pairs)
