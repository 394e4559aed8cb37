"""Make the tables of the costs of layers, counted and in print."""

from typing import Iterator, Sequence

from bench.document import Column, Notes, Part, Rows, Table, number_cell
from bench.prediction.meshes.layer_costs import COSTS, LAYER_COUNTS, Costs
from mm3d.model.sizes import ModelSizes

UNEQUAL = 1.05    # a scheme is unbalanced from this ratio of the largest to the mean on
STORED = ("parameters", "activations")
NAMES = {"flops": "flops", "elementwise": "elementwise elements", "parameters": "parameters",
         "activations": "activations kept", "words": "words", "messages": "messages"}

OF_PAIR = [
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


def printed_costs_parts(found: Sequence[Costs], missing: Sequence[str], ranks: int,
                        sizes: ModelSizes) -> list[Part]:
    """Make the table of `bench.prediction.meshes.layer_costs.list_costs`, and its notes."""
    rows = []
    for one in found:
        for cost, order in zip(COSTS, one.orders):
            counted, printed = one.counted[cost], one.printed[cost]
            rows.append([one.scheme, str(one.grid), cost, number_cell(counted, ",.0f"),
                         number_cell(printed, ",.0f"),
                         number_cell(counted / printed if printed else float("nan"), ".4f"),
                         order])
    M, h = sizes.tokens, sizes.hidden
    title = (f"Two linear layers, {M} x {h} -> {M} x {sizes.inner} -> {M} x {h}, forward "
             f"and backward, on {ranks} ranks: counted and printed costs of a rank")
    left_out = [f"Left out: {why}." for why in missing]
    return [Table(title, [Column("scheme"), Column("grid", align="<"), Column("cost", align="<"),
                          Column("counted"), Column("printed"), Column("counted / printed"),
                          Column("printed order", align="<")], rows),
            Notes("About these costs:", OF_PAIR + left_out)]


def layer_costs_parts(found: Sequence[Costs], missing: Sequence[str], ranks: int,
                      sizes: ModelSizes) -> list[Part]:
    """Make the table of `bench.prediction.meshes.layer_costs.list_layer_costs`, and its notes."""
    rows: Rows = []
    for one in found:
        for count in LAYER_COUNTS:
            values, printed = one.counted[count], one.printed.get(count, float("nan"))
            rows.append([one.scheme, str(one.grid), NAMES[count],
                         *(number_cell(value, ",.0f") for value in (
                             values.min(), values.mean(), values.max())),
                         number_cell(_imbalance(one, count), ".3f"),
                         number_cell(printed, ",.0f"),
                         number_cell(values.mean() / printed, ".4f")])
    title = (f"One Transformer layer, {sizes.batch} sequences of {sizes.seq}, hidden "
             f"{sizes.hidden}, {sizes.heads} heads, forward and backward, on {ranks} ranks")
    columns = [Column("scheme"), Column("grid", align="<"), Column("cost", align="<"),
               *(Column(name, "", "counted on every rank") for name in (
                   "least", "mean", "largest")),
               Column("largest", "/ mean"), Column("in print"), Column("mean", "/ in print")]
    notes = _notes(found) if found else []
    left_out = [f"Left out: {why}." for why in missing]
    return [Table(title, columns, rows)] * bool(found) + [
        Notes("About a layer's costs:", notes + left_out)]


def _imbalance(one: Costs, count: str) -> float:
    """Return the largest count of a rank over the mean; 1 where no rank has any."""
    values = one.counted[count]
    return values.max() / values.mean() if values.any() else 1.0


def _notes(found: Sequence[Costs]) -> list[str]:
    """State what is counted, what print leaves out, and which schemes are unbalanced."""
    return ["Counted: dry runs of each rank. Elementwise elements are those that passes read and "
            "write; parameters are without gradients; words are those that broadcasts and "
            "gathers bring and that sums send away; messages are blocks.",
            *_left_out_in_print(found), *_unequal_schemes(found)]


def _left_out_in_print(found: Sequence[Costs]) -> Iterator[str]:
    """State what the costs in print, added up over the four linear layers, leave out."""
    printed = [one for one in found if one.printed]
    if not printed:
        return
    more = max(one.counted["flops"].sum() / (one.grid.ranks * one.printed["flops"])
               for one in printed) - 1
    yield ("In print: the costs of a linear layer in the documentation of Colossal-AI, added up "
           f"over the four. Left out: attention's products, {more:.1%} of the operations; what "
           "layer norms, attention and GELU keep, which is more than the inputs of linear layers "
           "are; biases, norm weights and sums of rows, in words and, above all, in messages.")
    for one in printed:
        if one.lacking:
            words = one.counted["words"].mean()
            yield (f"{one.scheme}: of {words:,.0f} words of a rank {one.lacking:,.0f}, "
                   f"{one.lacking / words:.1%}, are the sums of gradients over depth, which "
                   f"print lacks.")


def _unequal_schemes(found: Sequence[Costs]) -> Iterator[str]:
    """Name schemes in which a rank stores, computes or moves much more than the mean."""
    for one in found:
        unequal = [f"{NAMES[count]} {_imbalance(one, count):.2f}" for count in LAYER_COUNTS
                   if count != "messages" and _imbalance(one, count) > UNEQUAL]
        if not unequal:
            continue
        idle = [f"{int((one.counted[count] == 0).sum())} of {one.grid.ranks} ranks have no "
                f"{NAMES[count]}" for count in STORED if not one.counted[count].all()]
        yield (f"{one.scheme}: unequal, the largest over the mean is {', '.join(unequal)}"
               + "; " * bool(idle) + "; ".join(idle) + ".")
