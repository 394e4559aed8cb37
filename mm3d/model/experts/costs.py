"""Count in closed form: products of a layer's parts, experts among them; what experts move."""

from dataclasses import replace
from functools import cache
from typing import Sequence

from mm3d.grid.layout import Layout
from mm3d.model.experts.options import ExpertDesign, ExpertOptions
from mm3d.model.sizes import ModelSizes
from mm3d.schemes.closed_form import Move, ProductShape
from mm3d.schemes.words import Words

Moves = list[Move]


@cache
def products_of(part: str, sizes: ModelSizes,
                experts: ExpertOptions | None) -> tuple[ProductShape, ...]:
    """List the products with weights of a part; those of a shared expert are the last."""
    if part == "experts":
        width, shared = experts.design.width, experts.design.shared
        routed = tuple(one._replace(M=experts.top * one.M)    # k rows for each token
                       for one in _perceptron(sizes, width))
        return routed if shared is None else routed + _perceptron(sizes, shared)
    h, inner, gates, rows = sizes.hidden, sizes.inner, sizes.architecture.gates, sizes.tokens
    unit = sizes.head * (sizes.group + 2)    # what comes before the last dimension stays whole
    heads = sizes.head * sizes.group
    found = {"qkv": ProductShape("up", rows, h, sizes.kv_heads * unit, (1, unit)),
             "proj": ProductShape("down", rows, sizes.kv_heads * heads, h, (heads, 1)),
             "up": ProductShape("up", rows, h, gates * inner, (1, gates)),
             "down": ProductShape("down", rows, inner, h)}
    return (found[part],) if part in found else ()


def _perceptron(sizes: ModelSizes, inner: int | None) -> tuple[ProductShape, ...]:
    """List the products of a perceptron of so many features between them; None for its own."""
    own = with_inner(sizes, inner)
    return products_of("up", own, None) + products_of("down", own, None)


def with_inner(sizes: ModelSizes, inner: int | None) -> ModelSizes:
    """Return the sizes with other features between the products of a perceptron."""
    return sizes if inner is None else replace(
        sizes, architecture=replace(sizes.architecture, inner=inner))


def has_bias(part: str, sizes: ModelSizes) -> bool:
    """Return whether the product of a part has a bias."""
    return sizes.architecture.biases in ("all", part)


def expert_moves(of: Words, sizes: ModelSizes, experts: ExpertOptions,
                 again: bool) -> tuple[Moves, Moves]:
    """List the collectives of the products, vectors, gates and counts of a layer of experts.

    Its products move what one product of all rows moves that saves no gathered operand, with the
    weights of all experts; but in 2.5-D gathered gradients of weights are summed over the layers,
    which is more.  The router, and the counts of its choices, are not recomputed.
    """
    outer, inner, E = of.outer, of.inner, experts.count
    products = products_of("experts", sizes, experts)
    routed, shared = products[:2], products[2:]
    h, wide, n = sizes.hidden, routed[0].K, int(has_bias("up", sizes))
    forward, backward = ([*outer.vector_gather_moves(E * h)] * (1 + n)    # the router's weight
                         + [*inner.vector_gather_moves(E * wide)] * n,
                         [*outer.vector_reduce_moves(E * h)] * (1 + n)
                         + [*inner.vector_reduce_moves(E * wide)] * n)
    for product in routed:
        # Without rows only the weight's words are left.
        for own, one, weight in zip((forward, backward), of.product_moves(product, True),
                                    of.product_moves(product._replace(M=0), True)):
            own += [move._replace(words=move.words + (E - 1) * more.words)
                    for move, more in zip(one, weight, strict=True)]
    if not again:
        forward += [*outer.row_sum_moves(of.tokens, E), *_count_moves(of, experts.top * E)]
    backward += outer.row_sum_moves(of.tokens, experts.top)
    more = _shared_moves(of, sizes, experts.design, shared)
    return forward + more[0], backward + more[1]


def _shared_moves(of: Words, sizes: ModelSizes, design: ExpertDesign,
                  products: Sequence[ProductShape]) -> tuple[Moves, Moves]:
    """List the collectives of a shared expert, whose vectors are not joined, and of its gate."""
    found = [of.product_moves(one) for one in products]
    vectors = [(of.spaces(one.way)[1], one.K) for one in products if has_bias("up", sizes)]
    if design.shared_gate:
        vectors.append((of.outer, sizes.hidden))
        sums = [*of.outer.row_sum_moves(of.tokens, 1)]
        found.append((sums, sums))
    found += [of.vector_moves([one]) for one in vectors]
    return tuple([move for one in found for move in one[phase]] for phase in (0, 1))


def _count_moves(of: Words, n: int) -> Moves:
    """List the gathers of n integers of each rank's run of tokens."""
    sequences, positions = Layout(of.outer.rows).dims
    runs = of.batch if {*positions} & {*of.grid.divided} else of.grid.ranks_along(sequences)
    # Before each gather a rank holds what the directions not yet gathered leave of all runs.
    held = n * runs * of.grid.ranks // of.grid.ranks_along(sequences)
    found = []
    for c in [*reversed(positions), *reversed(sequences)]:
        found.append(Move(c, "all_gather", held * (of.grid[c] - 1)))
        held *= of.grid[c]
    return found
