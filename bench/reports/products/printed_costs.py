"""Make the table of counted and printed costs of two linear layers."""

from typing import Sequence

from bench.prediction.costs.printed_costs import COSTS, PairCosts
from bench.document import Column, Notes, Part, Table, number_cell
from mm3d.model.sizes import ModelSizes

NOTES = [
    "Printed: shares from the documentation of Colossal-AI, each times the matrices that it is "
    "of. Counted: dry runs of rank 0, which has more than others where sizes do not divide "
    "evenly; real ranks count the same.",
    "2d, 2.5d, words: each of three products moves (q-1)/q^2 of a matrix, not (q-1)/q, so for "
    "square matrices 2d moves 6(q-1)/q^2 and 2.5d 3(q-1)(d+1)/(d q^2) in its layers.",
    "2.5d, words and messages: the sum of the weights' gradients over depth is left out, "
    "2(d-1)/(d q^2) of a weight and 2(d-1) messages a layer. Without it the gradients are wrong.",
    "3d, words: 6(q-1)/q^3 is moved if forward keeps both gathered operands, but then q times "
    "the printed activations are kept, and 1/q^2 of the weights beside them. If nothing gathered "
    "is kept, activations are as printed, and square matrices move 8(q-1)/q^3.",
    "1d, activations: only the outer ones are whole on every rank; the wide ones are divided.",
    "Messages are blocks, not steps in time: SUMMA broadcasts 2q times a product, one after "
    "another, and each takes the steps of a whole broadcast."]


def printed_costs_parts(found: Sequence[PairCosts], missing: Sequence[str], ranks: int,
                        sizes: ModelSizes) -> list[Part]:
    """Make the table of `bench.prediction.costs.printed_costs.list_costs`, and its notes."""
    rows = []
    for one in found:
        for cost in COSTS:
            counted, printed = one.counted[cost], one.printed[cost]
            rows.append([one.scheme, str(one.grid), cost, number_cell(counted, ",.0f"),
                         number_cell(printed, ",.0f"),
                         number_cell(counted / printed if printed else float("nan"), ".4f"),
                         one.orders[cost]])
    M, h = sizes.tokens, sizes.hidden
    title = (f"Two linear layers, {M} x {h} -> {M} x {sizes.inner} -> {M} x {h}, forward "
             f"and backward, on {ranks} ranks: counted and printed costs of a rank")
    left_out = [f"Left out: {why}." for why in missing]
    return [Table(title, [Column("scheme"), Column("grid", align="<"), Column("cost", align="<"),
                          Column("counted"), Column("printed"), Column("counted / printed"),
                          Column("printed order", align="<")], rows),
            Notes("About these costs:", NOTES + left_out)]
