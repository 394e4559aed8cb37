"""Count what one Transformer layer costs every rank in each scheme, by dry runs of all ranks.

Ranks differ where sizes do not divide evenly, and where a scheme stores matrices on some of them
only.  Beside the counts stand the costs in print of linear layers
(`bench.prediction.costs.printed_costs`), added up over the four of a Transformer layer.
"""

from dataclasses import dataclass, replace

import numpy as np

from bench.prediction.costs.printed_costs import PRINTED, SchemeOnGrid, choose_grids, printed_sum
from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.model.sizes import ModelSizes
from mm3d.schemes import registry
from mm3d.tracing.dry_run import trace_step
from mm3d.tracing.events import Pass
from mm3d.tracing.trace import Trace

# Operations of matrix products; elements that elementwise passes read and write; elements of the
# parameters, and of what forward keeps for backward; words and messages of both passes.
COUNTS = ("flops", "elementwise", "parameters", "activations", "words", "messages")
MOST_RANKS = 128    # that are traced one by one
ITEM = 4            # bytes of an element


@dataclass(frozen=True)
class LayerCosts:
    """The costs of one Transformer layer on the ranks of a grid, counted and in print.

    Attributes
    ----------
    scheme : str
        The name of the scheme, with its options.
    counted : dict of str to ndarray
        By each of `COUNTS`, the count on every rank.
    printed : dict of str to float
        The costs in print of the four linear layers; empty if there are none.
    lacking : float
        Mean words per rank of the collective that print leaves out.
    """

    scheme: str
    grid: GridShape
    counted: dict[str, np.ndarray]
    printed: dict[str, float]
    lacking: float


def list_layer_costs(ranks: int, sizes: ModelSizes) -> tuple[list[LayerCosts], list[str]]:
    """Count a Transformer layer on every rank, in each scheme on its own grid.

    Returns
    -------
    list of LayerCosts, list of str
        The costs, and the reasons why schemes are left out.
    """
    if ranks > MOST_RANKS:
        return [], [f"a Transformer layer, of which every rank is traced: {ranks} ranks are more "
                    f"than {MOST_RANKS}"]
    in_print = {name: printed for name, options, printed in PRINTED if not options}
    chosen, missing = choose_grids(ranks, [
        *((name, {}, in_print.get(name)) for name, cls in registry().items() if cls.divides_work),
        *(one for one in PRINTED if one[1])])
    return [count_layer(one, sizes) for one in chosen], missing


def count_layer(chosen: SchemeOnGrid, sizes: ModelSizes) -> LayerCosts:
    """Count forward and backward of a Transformer layer on every rank of a grid."""
    one, grid, printed = replace(sizes, layers=1), chosen.grid, chosen.printed
    traces = [trace_step(chosen.name, grid.ranks, grid, rank, options=chosen.options, **one)
              for rank in range(grid.ranks)]
    lacking = sum(traffic.words for trace in traces for phase in trace.traffic.values()
                  for key, traffic in phase.items() if printed and key == printed.lacks)
    linear = [product.extents for product, times in cost.products(one).items()
              for _ in range(times)]
    every = [_counts(trace) for trace in traces]
    return LayerCosts(
        str(chosen), grid, {count: np.array([each[count] for each in every]) for count in COUNTS},
        printed_sum(grid, linear, printed) if printed else {}, lacking / grid.ranks)


def _counts(trace: Trace) -> dict[str, int]:
    """Return each of `COUNTS` of a traced rank."""
    passed = sum(times * event.bytes for event, times in trace.count(Pass).items())
    messages = sum(traffic.messages for phase in trace.traffic.values()
                   for traffic in phase.values())
    return dict(zip(COUNTS, (trace.flops(), passed // ITEM, trace.parameters // 2 // ITEM,
                             trace.saved // ITEM, trace.words(), messages)))
