"""Compute costs in closed form: floating-point operations, and words moved.

They are what the schemes claim, stated without running; a dry run (`mm3d.tracing.dry_run`) tells
the memory too.  Each is a sum over the layers of a model, which state their own
(`mm3d.model.specs`).  Words are array elements, counted as by `mm3d.grid.axis.Traffic` and summed
over all ranks; so they are whole numbers on every grid, also where nothing divides evenly.  Where
everything does, each of the P ranks has 1/P of the sum.

>>> sizes = mm3d.ModelSizes(layers=2, hidden=48, heads=4, batch=8, seq=16)
>>> model = mm3d.model_spec(sizes, recompute="selective")
>>> mm3d.model.cost.words("3d", dict(x=2, y=2, z=2), model)
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from mm3d.model.chain_specs import ModelSpec
from mm3d.model.specs import LayerPass
from mm3d.schemes.closed_form import Move, ProductShape
from mm3d.schemes.parallelism import Parallelism

Key = tuple[str, str]    # direction and kind of collective


def flops(model: ModelSpec) -> dict[str, int]:
    """Count the floating-point operations of all matrix products of a step, over all ranks.

    A multiplication and an addition count as two; backward takes twice as many as forward.  In a
    Transformer layer the four linear layers take 24 tokens hidden^2 and attention 4 tokens seq
    hidden.  Recomputation is not included (see `flops_again`), nor are the scores of attention
    that backward always recomputes.  A causal mask saves nothing here; NumPy's kernels leave out
    what they can of the products that it hides.

    Parameters
    ----------
    model : ModelSpec
        The model, such as the result of `mm3d.model_spec`.

    Returns
    -------
    dict
        Operations of "forward" and of "backward".
    """
    forward = _sum_flops(model, model.chain.forward_passes())
    return {"forward": forward, "backward": 2 * forward}


def flops_of_halves(model: ModelSpec) -> dict[str, int]:
    """Count the floating-point operations of the halves of backward, over all ranks.

    The products of the weights' gradients are in the second half, all others in the first.
    Recomputation, which is part of the first half, is not included.

    Returns
    -------
    dict
        Operations of "backward_input" and of "backward_weights".
    """
    second = sum(one.times * one.layer.weights_flops(model.batch, model.seq)
                 for one in model.chain.forward_passes())
    return {"backward_input": flops(model)["backward"] - second, "backward_weights": second}


def flops_again(model: ModelSpec) -> int:
    """Count the floating-point operations of recomputed layers, over all ranks.

    They are not included in `flops`; see `mm3d.model.recomputation`.
    """
    return _sum_flops(model, model.chain.passes_repeated_in_backward())


def _sum_flops(model: ModelSpec, passes: Iterable[LayerPass]) -> int:
    """Sum the operations of the forward of each of `passes`."""
    return sum(one.times * one.layer.flops(model.batch, model.seq) for one in passes)


def products(model: ModelSpec) -> dict[ProductShape, int]:
    """Count the products with weights of a forward pass by their shapes."""
    found = Counter()
    for one in model.chain.forward_passes():
        for product in one.layer.products(model.batch, model.seq):
            found[product] += one.times
    return found


def parameters(model: ModelSpec) -> int:
    """Count the elements of all parameters; a Transformer layer has 12 hidden^2 + 13 hidden."""
    return sum(one.times * math.prod(shape) for one in model.chain.forward_passes()
               for shape in one.layer.parameters().values())


def parameter_arrays(model: ModelSpec) -> int:
    """Count the parameters as arrays; a Transformer layer has 12."""
    return sum(one.times * len(one.layer.parameters()) for one in model.chain.forward_passes())


def moves(scheme: str, grid: Mapping[str, int], model: ModelSpec,
          **options: Any) -> dict[str, dict[Key, Move]]:
    """Sum up the collectives of a step by phase, direction and kind.

    Parameters
    ----------
    scheme : str
        Name of the scheme.
    grid : mapping of str to int
        Sizes of its directions.
    model : ModelSpec
        The model, such as the result of `mm3d.model_spec`.  The collectives of recomputed layers
        are part of backward.
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
        When there is no scheme of that name.
    """
    parallelism = Parallelism(scheme, grid, model.batch, model.seq, **options)
    chain = model.chain
    forward = ((one.times, one.layer.moves(parallelism)[0]) for one in chain.forward_passes())
    backward = [*((one.times, one.layer.moves(parallelism)[0])
                  for one in chain.passes_repeated_in_backward()),
                *((one.times, one.layer.moves(parallelism, one.recomputed)[1])
                  for one in chain.backward_passes())]
    return {"forward": _sum_moves(parallelism, forward),
            "backward": _sum_moves(parallelism, backward)}


def _sum_moves(parallelism: Parallelism,
               repeated: Iterable[tuple[int, list[Move]]]) -> dict[Key, Move]:
    """Sum collectives by direction and kind; `repeated` gives lists of them and their times."""
    words, calls = Counter(), Counter()
    for times, collectives in repeated:
        for move in collectives:
            if parallelism.grid[move.axis] > 1:
                words[move.axis, move.collective] += times * move.words
                calls[move.axis, move.collective] += times * move.calls
    return {key: Move(*key, words[key], calls[key]) for key in words if calls[key]}


def words(scheme: str, grid: Mapping[str, int], model: ModelSpec,
          **options: Any) -> dict[str, dict[Key, int]]:
    """Count the words that a step moves: those of `moves`, without the calls.

    Parameters and errors are those of `moves`.
    """
    return {phase: {key: move.words for key, move in found.items()}
            for phase, found in moves(scheme, grid, model, **options).items()}


def lower_bound(M: int, N: int, K: int, ranks: int) -> float:
    """Return a lower bound of the words that some rank moves in a product M x N by N x K.

    It is the tight memory-independent bound of Al Daas, Ballard, Grigori, Kumar and Rouse (2022)
    in its three regimes, in which the best grid has one, two or three directions.

    Parameters
    ----------
    M, N, K : int
        Global sizes of the product.
    ranks : int
        Number of ranks.
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
    least 0: with much memory it says nothing, and `lower_bound` holds.

    Parameters
    ----------
    M, N, K, ranks
        As in `lower_bound`.
    memory : float
        S, the words of arrays that a rank holds at most.
    """
    return max(0.0, M * N * K / (2 * math.sqrt(2) * ranks * math.sqrt(memory)) - memory)
