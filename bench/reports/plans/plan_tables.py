"""Make the table of plans, and remarks on them."""

from typing import Sequence

from bench.document import Column, Notes, Table, number_cell
from bench.prediction.closed_form_plan import GridPlan
from bench.prediction.planner import bound_regime
from mm3d import ModelSizes
from mm3d.model import cost
from mm3d.schemes import find_scheme


def plan_table(plans: Sequence[GridPlan], fits: Sequence[str]) -> Table:
    """Make the table of plans, with the text of `fits` for each."""
    rows = [[p.scheme, str(p.grid),
             *map(number_cell, (p.seconds, p.forward, p.backward, p.words["forward"] / 1e6,
                                p.words["backward"] / 1e6, p.over_bound, p.memory / 2**30)), said]
            for p, said in zip(plans, fits)]
    return Table("Schemes and grids by predicted step time", [
        Column("scheme"), Column("grid", align="<"),
        *(Column(name, align=".") for name in (
            "step s", "forward s", "backward s", "Mwords fwd", "Mwords bwd", "/ bound", "GiB")),
        Column("fits without", "an optimizer", align="<")], rows)


def plan_remarks(plans: Sequence[GridPlan], sizes: ModelSizes, ranks: int, took: float,
                 experts: bool = False) -> Notes:
    """State the plan with the fewest words, the default grids, and the seconds of planning.

    With `experts` there is no lower bound, and nothing is said of it.
    """
    least = min(plans, key=lambda p: p.words["forward"])
    lines = [f"fewest words forward: {least.scheme} {least.grid}, "
             f"{least.words['forward'] / 1e6:.4g} million a rank"]
    for scheme in dict.fromkeys(p.scheme for p in plans):
        lines += _default(scheme, plans, least, ranks)
    kinds = {bound_regime(*product.extents, ranks)
             for product in cost.list_products(ModelSizes(**sizes))}
    if not experts:
        lines.append("regime of the lower bound for the products: "
                     + ", ".join(f"{kind}-D" for kind in sorted(kinds)))
    lines += [f"{len(plans)} plans screened, {sum(p.traced for p in plans)} traced in "
              f"{took:.1f} s",
              "words are those of the bucket algorithm, exactly; memory of what is traced is a "
              "dry run's of rank 0; seconds are a model"]
    return Notes("Remarks", lines)


def _default(scheme: str, plans: Sequence[GridPlan], least: GridPlan, ranks: int) -> list[str]:
    """State the words of the default grid of a scheme that has several grids."""
    own = {p.grid: p for p in plans if p.scheme == scheme}
    try:
        grid = find_scheme(scheme).grid_shape(find_scheme(scheme).default_grid(ranks))
    except ValueError:    # such as no cube
        return []
    if len(own) == 1 or grid not in own:
        return []
    moved, fewest = own[grid].words["forward"], least.words["forward"]
    # Replicas of all weights move none.
    times = f", {moved / fewest:.3g} times as many" if fewest else ""
    return [f"{scheme} on its default grid, {grid}: {moved / 1e6:.4g} million forward{times}; "
            f"{own[grid].seconds:.4g} s"]
