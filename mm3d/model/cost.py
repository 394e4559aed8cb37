"""Closed forms: floating-point operations, words moved and words kept.

They are sums over the layers of a model, each of which states its own (`mm3d.model.specs`).  Words
are counted as `mm3d.grid.axis.Traffic` counts them and summed over all ranks, which makes them
whole numbers on every grid, also where nothing divides; a rank's share is that sum over P, exactly
where everything does.

>>> sizes = mm3d.ModelSizes(layers=2, hidden=48, heads=4, batch=8, seq=16)
>>> model = mm3d.describe(sizes, recompute="selective")
>>> mm3d.model.cost.saved_words("3d", dict(x=2, y=2, z=2), model)
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mm3d.model.chain_specs import ChainSpec, ModelSpec, RecomputedSpec, Repeated
from mm3d.model.specs import Spec, Work
from mm3d.schemes.closed_form import Move, ProductShape
from mm3d.schemes.parallelism import Parallelism

Key = tuple[str, str]    # direction and kind of collective


def flops(model: ModelSpec) -> dict[str, int]:
    """Count the floating-point operations of all matrix products of a step, over all ranks.

    A multiplication and an addition count as two; backward does twice as many as forward.  A
    Transformer layer's four linear layers take 24 tokens hidden^2 and attention 4 tokens seq
    hidden.  Not counted is what backward computes again (`flops_again`, and the scores of
    attention in any case); nothing is saved by a causal mask.
    """
    forward = _flops(model, model.chain.in_forward())
    return {"forward": forward, "backward": 2 * forward}


def flops_again(model: ModelSpec) -> int:
    """Count the floating-point operations of what backward computes again, over all ranks.

    They are none of `flops`; see `mm3d.model.recomputation`.
    """
    return _flops(model, model.chain.repeated())


def _flops(model: ModelSpec, works: Iterable[Work]) -> int:
    return sum(work.times * work.layer.flops(model.batch, model.seq) for work in works)


def products(model: ModelSpec) -> dict[ProductShape, int]:
    """Count the products with weights of a forward pass by their shapes."""
    found = Counter()
    for work in model.chain.in_forward():
        for product in work.layer.products(model.batch, model.seq):
            found[product] += work.times
    return found


def parameters(model: ModelSpec) -> int:
    """Count the trained numbers; a Transformer layer has 12 hidden^2 + 13 hidden."""
    return sum(work.times * math.prod(shape) for work in model.chain.in_forward()
               for shape in work.layer.parameters().values())


def parameter_arrays(model: ModelSpec) -> int:
    """Count the trained arrays; a Transformer layer has 12."""
    return sum(work.times * len(work.layer.parameters()) for work in model.chain.in_forward())


def moves(scheme: str, grid: Mapping[str, int], model: ModelSpec,
          **options: Any) -> dict[str, dict[Key, Move]]:
    """Collectives of a step of `model` by phase, direction and kind.

    Parameters
    ----------
    scheme : str
        Name of the scheme.
    grid : mapping of str to int
        Sizes of its directions.
    model : ModelSpec
        The model, such as `mm3d.describe` gives for a Transformer; what it computes again it
        sends again, in backward.
    **options
        Of the scheme.

    Returns
    -------
    dict
        "forward" and "backward": {(direction, collective): Move}, words summed over all ranks and
        calls of each rank.  Directions of one rank move nothing and are left out.
    """
    on = Parallelism(scheme, grid, model.batch, model.seq, **options)
    chain = model.chain
    forward = ((work.times, work.layer.moves(on)[0]) for work in chain.in_forward())
    backward = [*((work.times, work.layer.moves(on)[0]) for work in chain.repeated()),
                *((work.times, work.layer.moves(on, work.again)[1])
                  for work in chain.in_backward())]
    return {"forward": _summed(on, forward), "backward": _summed(on, backward)}


def _summed(on: Parallelism, entered: Iterable[tuple[int, list[Move]]]) -> dict[Key, Move]:
    """The sums by direction and kind of collectives that are entered so many times."""
    words, calls = Counter(), Counter()
    for times, collectives in entered:
        for move in collectives:
            if on.grid[move.axis] > 1:
                words[move.axis, move.collective] += times * move.words
                calls[move.axis, move.collective] += times * move.calls
    return {key: Move(*key, words[key], calls[key]) for key in words if calls[key]}


def words(scheme: str, grid: Mapping[str, int], model: ModelSpec,
          **options: Any) -> dict[str, dict[Key, int]]:
    """The words of `moves` alone."""
    return {phase: {key: move.words for key, move in found.items()}
            for phase, found in moves(scheme, grid, model, **options).items()}


def saved_words(scheme: str, grid: Mapping[str, int], model: ModelSpec, **options: Any) -> int:
    """Count the words kept between forward and backward, over all ranks.

    A Transformer layer keeps, of each token: twice the normalized row, the row after the affine
    part and a number (LN), Q, K and V, the attention's output and one number a head, and the
    wide activation before and after GELU; each rank the gathered weights of the norms and bias
    of the GELU, and what the products keep.  Of layers that are computed again it keeps the input
    (`mm3d.model.recomputation`).  Parameters as in `moves`.
    """
    on = Parallelism(scheme, grid, model.batch, model.seq, **options)
    return sum(model.chain.saved(on))


def peak_words(scheme: str, grid: Mapping[str, int], model: ModelSpec, **options: Any) -> float:
    """Count the words of a rank at the worst moment of a step, where everything divides.

    Parameters and gradients, input and output with their gradients, all that is kept between
    forward and backward, and what passes: the gradients of one linear layer or activation, that
    of the residual stream, and what products gather; with recomputation also what is computed
    again at one time.  Blocks of elementwise work are left out.  Parameters as in `moves`.
    """
    on = Parallelism(scheme, grid, model.batch, model.seq, **options)
    saved = model.chain.saved(on)
    activation = on.outer.words(on.tokens, model.hidden) / on.ranks
    # An input that is kept is counted already; the gradient at the end of layers that are
    # computed again is the model's own if there are no others.
    activations = 3 + (not saved.input) + (_groups(model.chain) > 1)
    return ((2 * parameters(model) + sum(saved)) / on.ranks + activations * activation
            + model.chain.passing(on))


def _groups(chain: ChainSpec) -> int:
    """Number of the model's own layers and blocks, if some of them are computed again; else 0."""
    found = [*_own(chain)]
    again = any(isinstance(layer, RecomputedSpec) for _, layer in found)
    return sum(times for times, _ in found) if again else 0


def _own(chain: ChainSpec) -> Iterator[tuple[int, Spec]]:
    """The layers and blocks of a chain, with their numbers, also of chains that only repeat."""
    times = chain.times if isinstance(chain, Repeated) else 1
    for layer in chain.layers:
        nested = type(layer) in (ChainSpec, Repeated)
        for more, one in _own(layer) if nested else [(1, layer)]:
            yield times * more, one


def lower_bound(M: int, N: int, K: int, ranks: int) -> float:
    """Words that some rank must at least move to multiply M x N by N x K on so many ranks.

    The tight memory-independent bound of Al Daas, Ballard, Grigori, Kumar and Rouse (2022) in
    its three regimes, in which the best grid has one, two or three directions.
    """
    k, n, m = sorted((M, N, K))
    if ranks * n <= m:
        data = n * k + (m * n + m * k) / ranks
    elif ranks * k * k <= m * n:
        data = 2 * k * math.sqrt(m * n / ranks) + m * n / ranks
    else:
        data = 3 * (m * n * k / ranks) ** (2 / 3)
    return data - (m * n + n * k + m * k) / ranks
