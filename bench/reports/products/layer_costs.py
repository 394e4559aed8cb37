"""Make the table of the costs of one Transformer layer on every rank, beside those in print."""

from typing import Iterator, Sequence

from bench.prediction.costs.layer_costs import COUNTS, LayerCosts
from bench.document import Column, Notes, Part, Rows, Table, number_cell
from mm3d.model.sizes import ModelSizes

UNEQUAL = 1.05    # a scheme is unbalanced from this ratio of the largest to the mean on
STORED = ("parameters", "activations")
NAMES = {"flops": "flops", "elementwise": "elementwise elements", "parameters": "parameters",
         "activations": "activations kept", "words": "words", "messages": "messages"}


def layer_costs_parts(found: Sequence[LayerCosts], missing: Sequence[str], ranks: int,
                      sizes: ModelSizes) -> list[Part]:
    """Make the table of `bench.prediction.costs.layer_costs.list_layer_costs`, and its notes."""
    rows: Rows = []
    for one in found:
        for count in COUNTS:
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


def _imbalance(one: LayerCosts, count: str) -> float:
    """Return the largest count of a rank over the mean; 1 where no rank has any."""
    values = one.counted[count]
    return values.max() / values.mean() if values.any() else 1.0


def _notes(found: Sequence[LayerCosts]) -> list[str]:
    """State what is counted, what print leaves out, and which schemes are unbalanced."""
    return ["Counted: dry runs of each rank. Elementwise elements are those that passes read and "
            "write; parameters are without gradients; words are those that broadcasts and "
            "gathers bring and that sums send away; messages are blocks.",
            *_left_out_in_print(found), *_unequal_schemes(found)]


def _left_out_in_print(found: Sequence[LayerCosts]) -> Iterator[str]:
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


def _unequal_schemes(found: Sequence[LayerCosts]) -> Iterator[str]:
    """Name schemes in which a rank stores, computes or moves much more than the mean."""
    for one in found:
        unequal = [f"{NAMES[count]} {_imbalance(one, count):.2f}" for count in COUNTS
                   if count != "messages" and _imbalance(one, count) > UNEQUAL]
        if not unequal:
            continue
        idle = [f"{int((one.counted[count] == 0).sum())} of {one.grid.ranks} ranks have no "
                f"{NAMES[count]}" for count in STORED if not one.counted[count].all()]
        yield (f"{one.scheme}: unequal, the largest over the mean is {', '.join(unequal)}"
               + "; " * bool(idle) + "; ".join(idle) + ".")
