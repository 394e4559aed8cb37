"""Count in closed form what a Transformer costs: words moved, and operations.

Nothing runs: the words of a layer are the sum over its products (`Scheme.product_moves`), vectors,
norms and attention (`mm3d.schemes.words`).  A dry run (`mm3d.tracing.dry_run`) runs the program
instead, and tells the memory too.  Words are array elements, counted as by
`mm3d.grid.axis.Traffic` and summed over all ranks: whole numbers on every grid, also where nothing
divides evenly.  Where everything does, each of the P ranks has 1/P of them.

>>> sizes = mm3d.ModelSizes(layers=2, hidden=48, heads=4, batch=8, seq=16)
>>> found = mm3d.cost.words("3d", dict(x=2, y=2, z=2), sizes, recompute="selective")
>>> found["forward"]["y", "all_gather"]
24576
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

from mm3d.grid.axis import Shown
from mm3d.model.experts.costs import Moves, expert_moves, has_bias, products_of
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.recomputation import parse_policy, period_of
from mm3d.model.sizes import ModelSizes
from mm3d.schemes.closed_form import Move, ProductShape
from mm3d.schemes.words import SpaceCosts, Words

Key = tuple[str, str]    # direction and kind of collective

PRODUCTS = ("qkv", "proj", "up", "down")
# The parts of a layer, in pairs: "selective" recomputes the first of each from its input.
ATTENTION = (("norm", "qkv"), ("attention", "proj"))
PERCEPTRON = (("norm", "up"), ("gelu", "down"))
EXPERTS = (("norm", "experts"),)
# The parts whose vectors are gathered together: those of a layer, without those of experts.
VECTORS = {"vectors": [part for pair in ATTENTION + PERCEPTRON for part in pair],
           "vectors beside experts": [part for pair in ATTENTION + EXPERTS for part in pair]}


def flops(sizes: ModelSizes, experts: ExpertOptions | None = None) -> dict[str, int]:
    """Count the floating-point operations of all matrix products of a step, over all ranks.

    A multiplication and an addition count as two; backward takes twice as many as forward.
    Recomputation is not included (see `flops_again`), nor are the scores of attention that
    backward always recomputes.  A causal mask or a window saves nothing here; kernels leave out
    what they can of the products that it hides.  Experts drop no token.

    Returns
    -------
    dict
        Operations of "forward" and of "backward".
    """
    forward = _sum_flops(sizes, experts, "none", "forward")
    return {"forward": forward, "backward": 2 * forward}


def flops_of_halves(sizes: ModelSizes, experts: ExpertOptions | None = None) -> dict[str, int]:
    """Count the floating-point operations of the halves of backward, over all ranks.

    The products for the weight gradients of linear layers are in the second half; all others, also
    of experts, are in the first.  Recomputation, part of the first half, is not included.

    Returns
    -------
    dict
        Operations of "backward_input" and of "backward_weights".
    """
    linear = sum(times * _flops_of(part, sizes, experts) for (part, kind), times
                 in passes(sizes, "none", experts).items()
                 if kind == "forward" and part in PRODUCTS)
    return {"backward_input": flops(sizes, experts)["backward"] - linear,
            "backward_weights": linear}


def flops_again(sizes: ModelSizes, recompute: str, experts: ExpertOptions | None = None) -> int:
    """Count the floating-point operations that backward repeats, over all ranks.

    They are not included in `flops`; see `mm3d.model.recomputation`.
    """
    return _sum_flops(sizes, experts, recompute, "again")


def _sum_flops(sizes: ModelSizes, experts: ExpertOptions | None, recompute: str,
               wanted: str) -> int:
    """Sum the operations of all passes of a kind."""
    return sum(times * _flops_of(part, sizes, experts, kind == "again")
               for (part, kind), times in passes(sizes, recompute, experts).items()
               if kind == wanted)


def _flops_of(part: str, sizes: ModelSizes, experts: ExpertOptions | None,
              again: bool = False) -> int:
    """Count the operations of the forward of a part; routers are not computed `again`."""
    found = sum(2 * one.M * one.N * one.K for one in products_of(part, sizes, experts))
    if part == "attention":
        found += 4 * sizes.tokens * sizes.seq * sizes.heads * sizes.head    # Q K^T and P V
    if part == "experts":    # the router, and the gate of a shared expert
        columns = experts.count * (not again) + experts.design.shared_gate
        found += 2 * sizes.tokens * sizes.hidden * columns
    return found


def list_products(sizes: ModelSizes,
                  experts: ExpertOptions | None = None) -> dict[ProductShape, int]:
    """Count the products with weights of a forward pass by their shapes; all experts as one."""
    found: Counter[ProductShape] = Counter()
    for (part, kind), times in passes(sizes, "none", experts).items():
        for product in products_of(part, sizes, experts) if kind == "forward" else ():
            found[product] += times
    return found


def parameters(sizes: ModelSizes) -> int:
    """Count the elements of all parameters; a layer of 2019 has 12 hidden^2 + 13 hidden."""
    norms = 2 * sizes.hidden * vectors_of_norm(sizes)
    return sizes.layers * (norms + sum(
        one.N * one.K + one.K * has_bias(part, sizes)
        for part in PRODUCTS for one in products_of(part, sizes, None)))


def parameter_arrays(sizes: ModelSizes) -> int:
    """Count the arrays of parameters of a layer without experts; one of 2019 has 12."""
    return 2 * vectors_of_norm(sizes) + sum(1 + has_bias(part, sizes) for part in PRODUCTS)


def vectors_of_norm(sizes: ModelSizes) -> int:
    """Return how many vectors a norm has, and how many sums over a row its forward takes."""
    return 1 if sizes.architecture.norm == "rms" else 2


@cache
def passes(sizes: ModelSizes, recompute: str = "none",
           experts: ExpertOptions | None = None) -> Counter[tuple[str, str]]:
    """Count the passes through the parts of all layers in a step.

    Returns
    -------
    Counter
        By part and kind of pass: "forward", "again" for a forward that backward repeats,
        "backward", and "recomputed" for the backward of a product after
        `mm3d.schemes.product.Product.recompute_saved`, which neither multiplies nor communicates.
    """
    period = period_of(recompute, experts)
    whole, rest = divmod(sizes.layers, period)
    if whole <= 2:
        return _count_passes(sizes.layers, recompute, experts)
    # Each further period of layers has as many as the one before.
    once, twice = (_count_passes(n * period + rest, recompute, experts) for n in (1, 2))
    return Counter({key: once[key] + (whole - 1) * (twice[key] - once[key]) for key in twice})


def _count_passes(layers: int, recompute: str,
                  experts: ExpertOptions | None) -> Counter[tuple[str, str]]:
    """Count the passes one layer after the other."""
    policy, found = parse_policy(recompute), Counter()
    ends = {*itertools.accumulate(policy.groups(layers))}
    for number in range(layers):
        routed = experts is not None and experts.in_layer(number)
        pairs = ATTENTION + (EXPERTS if routed else PERCEPTRON)
        vectors = [*VECTORS][routed]
        found[vectors, "forward"] += 1
        found[vectors, "backward"] += 1
        for place, (first, second) in enumerate(pairs):
            last = not routed and number + 1 in ends and place + 1 == len(pairs)
            alone = policy.selective and second != "experts"    # a pair that is recomputed
            found[first, "forward"] += 1
            found[second, "forward"] += 1
            found[first, "backward"] += 1
            found[second, "recomputed" if alone or last else "backward"] += 1
            found[first, "again"] += alone + (bool(policy.group_size) and not (last and alone))
            found[second, "again"] += bool(policy.group_size) and not last
    return +found    # without zero counts


def moves(scheme: str, grid: Mapping[str, int], sizes: ModelSizes, recompute: str = "none",
          experts: ExpertOptions | None = None, **options: Any) -> dict[str, dict[Key, Move]]:
    """Sum up the collectives of a step by phase, direction and kind.

    Parameters
    ----------
    scheme : str
        Name of the scheme.
    grid : mapping of str to int
        Sizes of its directions.
    sizes : ModelSizes
        Sizes of the model.
    recompute : str
        Policy of recomputation; what it repeats is part of backward.
    experts : ExpertOptions, optional
        Options of experts; no token is dropped.  Their words are exact along each direction, but
        of other kinds of collectives where a scheme broadcasts.
    **options
        Options of the scheme.

    Returns
    -------
    dict
        "forward" and "backward": {(direction, collective): Move}, with the words of all ranks
        together and the calls of each rank.  Directions of one rank move nothing and are left out.

    Raises
    ------
    ValueError
        As of `mm3d.schemes.words.Words`, and when the sizes do not fit each other.
    """
    sizes.check()
    of = Words(scheme, grid, sizes.batch, sizes.seq, **options)
    found: dict[str, dict[Key, Move]] = {"forward": {}, "backward": {}}
    for (part, kind), times in passes(sizes, recompute, experts).items():
        forward, backward = _moves_of(part, of, sizes, experts, kind)
        own = found["forward" if kind == "forward" else "backward"]
        for move in forward if kind in ("forward", "again") else backward:
            if move.axis in of.grid.divided:
                add_move(own, move, times)
    return found


def add_move(own: dict[Key, Move], move: Move, times: int) -> None:
    """Add the words and calls of a move, made so many `times`, to those of its kind in `own`."""
    key = move.axis, move.collective
    before = own.get(key, Move(*key, 0, 0))
    own[key] = Move(*key, before.words + times * move.words, before.calls + times * move.calls)


def _moves_of(part: str, of: Words, sizes: ModelSizes, experts: ExpertOptions | None,
              kind: str) -> tuple[Moves, Moves]:
    """List the collectives of a part, forward and backward, in a kind of pass."""
    if part in VECTORS:
        return of.vector_moves([one for name in VECTORS[part]
                                for one in _vectors_in(name, of, sizes)])
    gathers = [move for one in _vectors_in(part, of, sizes) if kind == "again"    # one by one
               for move in of.vector_moves([one])[0]]
    if part == "norm":    # sums for the mean, the variance, and all gradients at once
        n = vectors_of_norm(sizes)
        sums = [*of.outer.row_sum_moves(of.tokens, 1)] * n
        return sums + gathers, [*of.outer.row_sum_moves(of.tokens, n)]
    if part == "gelu":
        return gathers, []
    if part == "attention":    # keys and values are gathered, in backward again
        keys = sizes.kv_heads * sizes.head
        gathers, sums = ([*of.inner.sequence_moves(collective, 2 * of.tokens * keys)]
                         for collective in ("all_gather", "reduce_scatter"))
        return gathers, gathers + sums
    if part == "experts":
        return expert_moves(of, sizes, experts, kind == "again")
    (product,) = products_of(part, sizes, experts)
    forward, backward = of.product_moves(product, kind == "recomputed")
    return forward + gathers, backward


def _vectors_in(part: str, of: Words, sizes: ModelSizes) -> list[tuple[SpaceCosts, int]]:
    """List the vectors that the forward of a part uses, each with its space and length."""
    gelu_adds = sizes.architecture.gates == 1    # the bias of the product up
    if part == "norm":
        return [(of.outer, sizes.hidden)] * vectors_of_norm(sizes)
    if part == "gelu":
        return [(of.inner, sizes.inner)] * (gelu_adds and has_bias("up", sizes))
    if part not in PRODUCTS or part == "up" and gelu_adds or not has_bias(part, sizes):
        return []
    return [(of.spaces(one.way)[1], one.K) for one in products_of(part, sizes, None)]


class WordCounts(Shown, dict[str, dict[Key, int]]):
    """Hold the words of all ranks by phase and (direction, collective); printed it is a table."""

    def __str__(self) -> str:
        rows = [(phase, kind, along, count) for phase, found in self.items()
                for (along, kind), count in found.items()]
        rows.append(("all", "", "", sum(row[-1] for row in rows)))
        return "\n".join(f"{phase:10}{kind:15}{along:7}{count:>18}" for phase, kind, along, count
                         in [("phase", "collective", "along", "words of all ranks"), *rows])


def words(scheme: str, grid: Mapping[str, int], sizes: ModelSizes, recompute: str = "none",
          **options: Any) -> WordCounts:
    """Count the words that a step moves: the words of `moves`, without the calls.

    Parameters and errors as in `moves`.
    """
    return WordCounts({phase: {key: move.words for key, move in found.items()} for phase, found
                       in moves(scheme, grid, sizes, recompute, **options).items()})


def step_words(model: Any) -> dict[Key, float]:
    """Return the words of a forward and a backward of a `mm3d.Transformer`, in closed form.

    They are the mean of all ranks, by (direction, collective); a rank with larger blocks than
    others moves more.  ``print(model.traffic().beside(step_words(model)))`` is a table.
    """
    options = {name: getattr(model.scheme, name) for name in model.scheme.options}
    found: Counter[Key] = Counter()
    for own in moves(model.scheme.name, model.grid.shape, model.sizes, model.recompute,
                     model.stack.experts, **options).values():
        found.update({key: move.words for key, move in own.items()})
    return {key: words / model.grid.size for key, words in found.items()}


def lower_bound(M: int, N: int, K: int, ranks: int) -> float:
    """Return a lower bound of the words that some rank moves in a product M x N by N x K.

    It is the tight memory-independent bound of Al Daas, Ballard, Grigori, Kumar and Rouse (2022),
    where ranks store each element once: with copies, as in 2.5-D, they may move fewer words.
    """
    k, n, m = sorted((M, N, K))
    if ranks * n <= m:
        data = n * k + (m * n + m * k) / ranks
    elif ranks * k * k <= m * n:
        data = 2 * k * math.sqrt(m * n / ranks) + m * n / ranks
    else:
        data = 3 * (m * n * k / ranks) ** (2 / 3)
    return data - (m * n + n * k + m * k) / ranks


def lower_bound_with_memory(M: int, N: int, K: int, ranks: int, memory: float) -> float:
    """Return a lower bound of the words that some rank moves with `memory` words of its own.

    It is the bound of Irony, Toledo and Tiskin (2004), MNK / (2 sqrt(2) P sqrt(S)) - S, and at
    least 0, of P ranks that hold S words at most: with much memory it says nothing, and
    `lower_bound` holds.
    """
    return max(0.0, M * N * K / (2 * math.sqrt(2) * ranks * math.sqrt(memory)) - memory)
