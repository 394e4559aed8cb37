"""Count in closed form what a layer of experts moves."""

from typing import Sequence

from mm3d.grid.layout import Layout
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.sizes import ModelSizes
from mm3d.schemes.closed_form import Move, ProductShape
from mm3d.schemes.words import Words


def expert_moves(of: Words, sizes: ModelSizes, experts: ExpertOptions,
                 products: Sequence[ProductShape],
                 again: bool) -> tuple[list[Move], list[Move]]:
    """List the collectives of the products, vectors, gates and counts of a layer of experts.

    Its products move what one product of all rows moves, with the weights of all experts; but in
    2.5-D gathered gradients of weights are summed over the layers, which is more.  The router, and
    the counts of its choices, are not recomputed.
    """
    outer, inner, E = of.outer, of.inner, experts.count
    h, wide, n = sizes.hidden, sizes.gates * sizes.inner, int(sizes.architecture.biases == "all")
    forward, backward = ([*outer.vector_gather_moves(E * h)] * (1 + n)    # the router's weight
                         + [*inner.vector_gather_moves(E * wide)] * n,
                         [*outer.vector_reduce_moves(E * h)] * (1 + n)
                         + [*inner.vector_reduce_moves(E * wide)] * n)
    for product in products:
        # Without rows only the weight's words are left.
        for own, one, weight in zip((forward, backward), of.product_moves(product),
                                    of.product_moves(product._replace(M=0))):
            own += [move._replace(words=move.words + (E - 1) * more.words)
                    for move, more in zip(one, weight, strict=True)]
    if not again:
        forward += [*outer.row_sum_moves(of.tokens, E), *_count_moves(of, experts.top * E)]
    return forward, backward + [*outer.row_sum_moves(of.tokens, experts.top)]


def _count_moves(of: Words, n: int) -> list[Move]:
    """List the gathers of n integers of each rank's run of tokens."""
    sequences, positions = Layout(of.outer.rows).dims
    runs = of.batch if of.grid.ranks_along(positions) > 1 else of.grid.ranks_along(sequences)
    # Before each gather a rank holds what the directions not yet gathered leave of all runs.
    held = n * runs * of.grid.ranks // of.grid.ranks_along(sequences)
    found = []
    for c in [*reversed(positions), *reversed(sequences)]:
        found.append(Move(c, "all_gather", held * (of.grid[c] - 1)))
        held *= of.grid[c]
    return found
