"""Make the table of what the exchange of tokens costs in layers with experts."""

from typing import Sequence

from bench.prediction.expert_overhead import Overhead
from bench.prediction.machine_model import Machine
from bench.reports.document import Column, Notes, Part, Table, number_cell
from mm3d import ModelSizes

PLACES = ("in a node", "between nodes")


def overhead_parts(found: Sequence[Overhead], machine: Machine, sizes: ModelSizes, dtype: str,
                   dense: float) -> list[Part]:
    """Make the table of layers with experts, and say what is in it.

    Parameters
    ----------
    found : sequence of Overhead
        The layers.
    machine, sizes, dtype
        What they were predicted for.
    dense : float
        Seconds of a layer without experts.
    """
    columns = [Column("E", "experts"), Column("k", "of a token"), Column("ranks", "of these")]
    columns += [Column("counted", "", "million words"), Column("by hand", "", "million words"),
                Column("MB")]
    columns += [Column("products", "ms", "without exchange"),
                Column("all", "ms", "without exchange")]
    for place in PLACES:
        columns += [Column("exchange", "ms", place), Column("of all", "%", place),
                    Column("of products", "%", place)]
    columns.append(Column("GiB", "at the peak"))
    rows = [[one.experts.count, one.experts.top, one.parallel,
             number_cell(one.words / 1e6, ".6g"), number_cell(one.by_hand / 1e6, ".6g"),
             number_cell(one.bytes / 1e6, ".4g"), number_cell(1e3 * one.products, ".3g"),
             number_cell(1e3 * one.layer, ".3g"), *_cells(one, one.inside),
             *_cells(one, one.between), number_cell(one.peak / 2 ** 30, ".1f")] for one in found]
    return [Table(f"A layer with experts on a rank, forward and backward: {sizes.batch} x "
                  f"{sizes.seq} tokens of {sizes.hidden} features, {dtype}, on {machine.name}",
                  columns, rows), Notes("About this prediction:", [
                      f"{machine.about}.",
                      "Replicas of one rank divide the experts. The routing is assumed, not "
                      "computed: all experts get equally many tokens, and nothing is dropped. "
                      "Words are counted in a dry run, and by hand 4 k T h (n - 1) / n: two "
                      "all-to-alls forward and two backward.",
                      "Seconds are a model. Exchange: the all-to-alls, and the gather of counts; "
                      "nothing hides it. Between nodes: one rank in each, or full nodes where a "
                      "node has fewer ranks; the other ranks of a node do the same, and share "
                      "its link. Of all: of the layer by this library, whose elementwise passes "
                      "are not fused; of products: of the exchange and the matrix products "
                      "alone, a bound for a library that hides all else.",
                      f"The same layer with one perceptron takes {1e3 * dense:.3g} ms. The "
                      f"peak has this layer alone, with its gradients."])]


def _cells(one: Overhead, exchange: float) -> list:
    """Return the cells of one place, from the seconds of the exchange there."""
    return [number_cell(1e3 * exchange, ".3g"),
            *(number_cell(100 * exchange / (exchange + rest), ".1f")
              for rest in (one.layer, one.products))]
