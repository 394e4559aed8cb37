"""Count what layers cost the ranks of each scheme by dry runs, beside the costs in print.

The documentation of Colossal-AI (docs/source/en/features, a page for each parallelism) prints the
costs of a linear layer C = A B, forward and backward, as shares of a whole matrix.  Here these
shares are multiplied by the matrices of two layers, M x h -> M x 4h -> M x h, without biases, and
stand beside what rank 0 counts; added up over the four linear layers of a Transformer layer, they
stand beside what every rank counts.  Ranks differ where sizes do not divide evenly, and where a
scheme stores matrices on some of them only.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterable

import numpy as np

from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.model.chains import saved_arrays
from mm3d.model.sizes import ModelSizes
from mm3d.schemes import find_scheme, registry
from mm3d.schemes.creation import scheme as make_scheme
from mm3d.tracing.dry_arrays import DryBackend
from mm3d.tracing.dry_run import trace_step
from mm3d.tracing.events import MemoryPass
from mm3d.tracing.observe import observed
from mm3d.tracing.trace import Trace
from mm3d.transport.communicators import DryCommunicator

# Of two linear layers: operations of the products, elements of the weights and of what forward
# keeps for backward, words and messages of both passes.
COSTS = ("flops", "parameters", "activations", "words", "messages")
# Of a Transformer layer also elements that elementwise passes read and write.
LAYER_COUNTS = ("flops", "elementwise", "parameters", "activations", "words", "messages")
MOST_RANKS = 128    # that are traced one by one
ITEM = 4            # bytes of an element


@dataclass(frozen=True)
class Printed:
    """The costs in print of a parallelism, on a grid of sides q and depth d, of P ranks.

    `orders` are the printed texts of `COSTS`.  From P, q and d, `shares` returns those of flops,
    parameters and activations, and the messages of a product; from these and the sizes of A, B and
    C, which are one in print, `words` its words.  `lacks` are direction and collective of words
    that print leaves out.
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
    """A scheme with its options and its costs in print, if there are any, on its own grid."""

    name: str
    options: dict[str, Any]
    grid: GridShape
    printed: Printed | None

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])


def choose_grids(ranks: int, schemes: Iterable[tuple[str, dict[str, Any], Printed | None]]
                 ) -> tuple[list[SchemeOnGrid], list[str]]:
    """Choose the grids of schemes, with their options and costs in print; say why one has none."""
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
class Costs:
    """The costs of layers in a scheme: counted, and those of linear layers in print, if any.

    Counted is each of `COSTS` on rank 0, or of `LAYER_COUNTS` on every rank; `lacking` are mean
    words per rank of the collective that print leaves out.
    """

    scheme: str    # with its options
    grid: GridShape
    counted: dict[str, Any]
    printed: dict[str, float]
    lacking: float = 0.0
    orders: tuple[str, ...] = ()    # of the printed costs of a pair of layers


def list_costs(ranks: int, sizes: ModelSizes) -> tuple[list[Costs], list[str]]:
    """Count the pair of layers in each scheme with printed costs, on its own grid.

    Returns the costs, and why a scheme has no grid of `ranks` ranks.
    """
    M, h, wide = sizes.tokens, sizes.hidden, sizes.inner
    chosen, missing = choose_grids(ranks, PRINTED)
    return [Costs(str(one), one.grid, count_pair(one.name, one.grid, sizes, one.options),
                  _printed_sum(one.grid, [(M, h, wide), (M, wide, h)], one.printed),
                  orders=one.printed.orders)
            for one in chosen], missing


def _printed_sum(grid: GridShape, products: Iterable[tuple[int, int, int]],
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


def list_layer_costs(ranks: int, sizes: ModelSizes) -> tuple[list[Costs], list[str]]:
    """Count a Transformer layer on every rank, in each scheme on its own grid.

    Returns the costs, and the reasons why schemes are left out.
    """
    if ranks > MOST_RANKS:
        return [], [f"a Transformer layer, of which every rank is traced: {ranks} ranks are more "
                    f"than {MOST_RANKS}"]
    in_print = {name: printed for name, options, printed in PRINTED if not options}
    chosen, missing = choose_grids(ranks, [
        *((name, {}, in_print.get(name)) for name, cls in registry().items() if cls.divides_work),
        *(one for one in PRINTED if one[1])])
    return [_count_layer(one, sizes) for one in chosen], missing


def _count_layer(chosen: SchemeOnGrid, sizes: ModelSizes) -> Costs:
    """Count forward and backward of a Transformer layer on every rank of a grid."""
    one, grid, printed = replace(sizes, layers=1), chosen.grid, chosen.printed
    traces = [trace_step(chosen.name, grid.ranks, grid, rank, options=chosen.options, **one)
              for rank in range(grid.ranks)]
    lacking = sum(traffic.words for trace in traces for phase in trace.traffic.values()
                  for key, traffic in phase.items() if printed and key == printed.lacks)
    linear = [product.extents for product, times in cost.list_products(one).items()
              for _ in range(times)]
    every = [_counts(trace) for trace in traces]
    counted = {count: np.array([each[count] for each in every]) for count in LAYER_COUNTS}
    return Costs(str(chosen), grid, counted,
                 _printed_sum(grid, linear, printed) if printed else {}, lacking / grid.ranks)


def _counts(trace: Trace) -> dict[str, int]:
    """Return each of `LAYER_COUNTS` of a traced rank."""
    passed = sum(times * event.bytes for event, times in trace.count(MemoryPass).items())
    messages = sum(traffic.messages for phase in trace.traffic.values()
                   for traffic in phase.values())
    return dict(zip(LAYER_COUNTS, (trace.flops(), passed // ITEM, trace.parameters // 2 // ITEM,
                                   trace.saved // ITEM, trace.words(), messages)))
