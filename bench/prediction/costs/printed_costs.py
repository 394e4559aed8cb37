"""Count what two linear layers cost a rank in each scheme, beside the costs in print.

The documentation of Colossal-AI (docs/source/en/features, a page for each parallelism) prints the
costs of a linear layer C = A B, forward and backward, as shares of a whole matrix.  Here these
shares are multiplied by the matrices of two layers, M x h -> M x 4h -> M x h, and stand beside
what a rank counts in a dry run of both.  Biases are left out.
"""

import math
from dataclasses import dataclass
from typing import Any, Callable, Iterable

from mm3d.grid.shape import GridShape
from mm3d.model.saved_arrays import saved_arrays
from mm3d.model.sizes import ModelSizes
from mm3d.schemes import find_scheme
from mm3d.schemes.creation import scheme as make_scheme
from mm3d.tracing.dry_arrays import DryBackend
from mm3d.tracing.observe import observed
from mm3d.transport.communicators import DryCommunicator

COSTS = ("flops", "parameters", "activations", "words", "messages")


@dataclass(frozen=True)
class Printed:
    """The costs in print of a parallelism, on a grid of sides q and depth d, of P ranks.

    Attributes
    ----------
    orders : tuple of str
        The printed text of each of `COSTS`.
    shares : callable
        From P, q and d, returns the shares of flops, parameters and activations, and the messages
        of a product.
    words : callable
        From P, q, d and the sizes of A, B and C, returns the words of a product.  In print these
        three sizes are one.
    lacks : tuple of str
        Direction and collective of words that print leaves out; empty if none.
    """

    orders: tuple[str, str, str, str, str]
    shares: Callable[[int, int, int], tuple[float, float, float, int]]
    words: Callable[..., float]
    lacks: tuple[str, ...] = ()


_CUBE = Printed(("1/q^3", "1/q^3", "1/q^3", "6(q-1)/q^3", "6(q-1)"),
                lambda P, q, d: (1 / P, 1 / P, 1 / P, 6 * (q - 1)),
                lambda P, q, d, A, B, C: 2 * (q - 1) / P * (A + B + C))
# Scheme, options, and costs in print; on the 1-D page the matrix is the one that all ranks hold.
PRINTED: list[tuple[str, dict[str, str], Printed]] = [
    ("1d", {}, Printed(("1/P", "1/P", "1", "2(P-1)/P", "2(P-1)"),
                       lambda P, q, d: (1 / P, 1 / P, 1, 2 * (P - 1)),
                       lambda P, q, d, A, B, C: 2 * (P - 1) / P * min(A, C))),
    ("2d", {}, Printed(("1/q^2", "1/q^2", "1/q^2", "6(q-1)/q", "6(q-1)"),
                       lambda P, q, d: (1 / P, 1 / P, 1 / P, 6 * (q - 1)),
                       lambda P, q, d, A, B, C: 3 * (q - 1) / q * (A + B))),
    ("2.5d", {}, Printed(("1/(d q^2)", "1/q^2", "1/(d q^2)", "3(q-1)(d+1)/(d q)", "6(q-1)"),
                         lambda P, q, d: (1 / P, 1 / q ** 2, 1 / P, 6 * (q - 1)),
                         lambda P, q, d, A, B, C: 3 * (q - 1) / q * (A / d + B),
                         ("z", "all_reduce"))),
    ("3d", {}, _CUBE), ("3d", {"keep": "both"}, _CUBE)]


@dataclass(frozen=True)
class SchemeOnGrid:
    """A scheme with its options, on its own grid.

    Attributes
    ----------
    name : str
        The name of the scheme.
    printed : Printed or None
        Its costs in print, if there are any.
    """

    name: str
    options: dict[str, Any]
    grid: GridShape
    printed: Printed | None

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])


def choose_grids(ranks: int, schemes: Iterable[tuple[str, dict[str, Any], Printed | None]]
                 ) -> tuple[list[SchemeOnGrid], list[str]]:
    """Choose the grid of each scheme for `ranks` ranks.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    schemes : iterable of (str, dict, Printed or None)
        Name, options and costs in print of each.

    Returns
    -------
    list of SchemeOnGrid, list of str
        The schemes that have a grid, and why others have none, each scheme once.
    """
    found, missing = [], {}
    for name, options, printed in schemes:
        cls = find_scheme(name)
        try:
            grid = cls.grid_shape(cls.default_grid(ranks))
        except ValueError as error:
            missing[name] = f"{name}: {error}"
        else:
            found.append(SchemeOnGrid(name, options, grid, printed))
    return found, list(missing.values())


@dataclass(frozen=True)
class PairCosts:
    """The costs of two linear layers on a rank, counted and in print.

    Attributes
    ----------
    scheme : str
        The name of the scheme, with its options.
    counted, printed : dict of str to float
        Each of `COSTS`: operations of the products, elements of the weights and of what forward
        keeps for backward, words and messages of both passes.
    orders : dict of str to str
        The printed text of each.
    """

    scheme: str
    grid: GridShape
    counted: dict[str, float]
    printed: dict[str, float]
    orders: dict[str, str]


def list_costs(ranks: int, sizes: ModelSizes) -> tuple[list[PairCosts], list[str]]:
    """Count the pair of layers in each scheme with printed costs, on its own grid.

    Returns
    -------
    list of PairCosts, list of str
        The costs, and why a scheme has no grid of `ranks` ranks.
    """
    chosen, missing = choose_grids(ranks, PRINTED)
    return [PairCosts(str(one), one.grid, count_pair(one.name, one.grid, sizes, one.options),
                      printed_pair(one.grid, sizes, one.printed),
                      dict(zip(COSTS, one.printed.orders))) for one in chosen], missing


def printed_pair(grid: GridShape, sizes: ModelSizes, printed: Printed) -> dict[str, float]:
    """Multiply the printed shares by the sizes of the matrices of both layers."""
    M, h, wide = sizes.tokens, sizes.hidden, sizes.inner
    return printed_sum(grid, [(M, h, wide), (M, wide, h)], printed)


def printed_sum(grid: GridShape, products: Iterable[tuple[int, int, int]],
                printed: Printed) -> dict[str, float]:
    """Add up the costs in print of linear layers, whose products are M x N times N x K."""
    P, q = grid.ranks, grid.sizes[0]
    place = P, q, P // q ** 2
    flops, parameters, activations, messages = printed.shares(*place)
    found = dict.fromkeys(COSTS, 0.0)
    for M, N, K in products:
        one = (6 * M * N * K * flops, N * K * parameters, M * N * activations,
               printed.words(*place, M * N, N * K, M * K), messages)
        found = {cost: found[cost] + value for cost, value in zip(COSTS, one)}
    return found


def count_pair(name: str, grid: GridShape, sizes: ModelSizes,
               options: dict[str, Any]) -> dict[str, float]:
    """Count forward and backward of both layers on rank 0, without data."""
    backend = DryBackend()
    scheme = make_scheme(name, DryCommunicator(grid.ranks), grid, backend, **options)
    outer, inner = scheme.spaces(sizes.batch, sizes.seq)
    features, wide = sizes.hidden, sizes.inner
    layers = []
    for source, target, shape in ((outer, inner, (features, wide)),
                                  (inner, outer, (wide, features))):
        product = scheme.product(source, target, shape, (1, 1))
        layers.append((product, backend.empty(
            product.weight.local_shape(scheme.grid, shape), "float32")))
    a, kept = outer.allocator(features)("float32"), []
    backend.trace.phase = "forward"
    with observed(scheme.grid, backend.trace):
        for product, weight in layers:
            a, saved = product.forward(a, weight)
            kept.append(saved)
        activations = sum(math.prod(each.shape) for each in saved_arrays(kept))
        for (product, weight), saved in zip(layers[::-1], kept[::-1]):
            a, _ = product.backward(a, weight, saved)
    moved = scheme.grid.traffic().values()
    return dict(zip(COSTS, (backend.trace.flops("forward"),
                            sum(math.prod(weight.shape) for _, weight in layers), activations,
                            sum(one.words for one in moved),
                            sum(one.messages for one in moved))))
