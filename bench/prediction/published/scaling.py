"""Predict how time, words and memory grow with the number of ranks.

Families of grids are planned at powers of two; the paper's tables are extended beyond 64 ranks.
"""

import math

import msgspec
import numpy as np

from bench.cases.paper import Row, load_tables
from bench.cases.selection import select_rows
from bench.prediction import machine_model, planner
from bench.prediction.closed_form_plan import GridPlan, screen_grid
from bench.prediction.published import paper_fit
from bench.prediction.seconds import step_seconds
from mm3d.grid.shape import GridShape
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.tracing import dry_run

BEST = "3-D, best grid"
MOST_RANKS = 2 ** 21
FAMILIES = ("1-D", "1-D, sequence", "2-D", "data, sharded (P x 1 x 1)", "3-D cube", BEST)
Curves = dict[str, list[tuple[int, GridPlan]]]    # ranks and plan, by family


def family_grid(family: str, ranks: int) -> tuple[str, GridShape] | None:
    """Return scheme and grid of a family on `ranks` ranks; None where it has none."""
    root, side = math.isqrt(ranks), round(ranks ** (1 / 3))
    found = {"1-D": ("1d", (ranks,)), "1-D, sequence": ("1d-sp", (ranks,)),
             "2-D": ("2d", (root, root)) if root ** 2 == ranks else None,
             "data, sharded (P x 1 x 1)": ("3d", (ranks, 1, 1)),
             "3-D cube": ("3d", (side,) * 3) if side ** 3 == ranks else None}.get(family)
    return found and (found[0], find_scheme(found[0]).grid_shape(found[1]))


def plan_families(machine: machine_model.Machine, stack: Stack) -> Curves:
    """Plan each family by closed forms at powers of two up to `MOST_RANKS`."""
    found: Curves = {family: [] for family in FAMILIES}
    for ranks in (2 ** power for power in range(1, MOST_RANKS.bit_length())):
        for family in FAMILIES:
            if chosen := family_grid(family, ranks):
                found[family].append((ranks, screen_grid(*chosen, machine, stack)))
        best = min((screen_grid(*each, machine, stack)
                    for each in planner.list_candidates(ranks, "3d")), key=lambda p: p.seconds)
        found[BEST].append((ranks, best))
    return found


def find_crossovers(found: Curves) -> list[tuple[int, str]]:
    """Find the numbers of ranks at which another family of single grids becomes the fastest.

    A family without a grid of some number of ranks is interpolated.  The search ends at the
    largest number of ranks that all families reach.

    Returns numbers of ranks, each with the family that is the fastest from there on.
    """
    lines = {family: np.log([(ranks, p.seconds) for ranks, p in points]).T
             for family, points in found.items() if family != BEST}
    changes: list[tuple[int, str]] = []
    reach = min(points[-1][0] for points in found.values())
    for ranks in (ranks for ranks, _ in found[BEST] if ranks <= reach):
        at = {family: np.interp(math.log(ranks), *line) for family, line in lines.items()
              if line[0][0] <= math.log(ranks) <= line[0][-1]}
        fastest = min(at, key=at.get)
        if not changes or changes[-1][1] != fastest:
            changes.append((ranks, fastest))
    return changes


def weak_sizes(scheme: str, ranks: int) -> dict[str, int]:
    """Return the sizes of Table 1, extended beyond its last row by the square root of the ranks.

    Features grow by that factor.  So does the batch if it grows in the table; otherwise (1-D, for
    lack of memory) it is divided by the factor.
    """
    rows = select_rows("weak", scheme)
    for row in rows:
        if row.gpus == ranks:
            return _sizes_of(row)
    first, last = rows[0], rows[-1]
    hidden = 64 * round(16 * math.sqrt(ranks))
    more = math.sqrt(ranks / last.gpus)
    batch = max(1, round(last.batch * more if last.batch > first.batch else last.batch / more))
    return dict(hidden=hidden, heads=hidden // 64, batch=batch, seq=load_tables().settings.seq)


def strong_sizes(scheme: str, ranks: int) -> dict[str, int]:
    """Return the sizes of Table 2, the same for all numbers of ranks."""
    return _sizes_of(select_rows("strong", scheme)[-1])


def _sizes_of(row: Row) -> dict[str, int]:
    """Return the sizes of a row."""
    settings = load_tables().settings
    return dict(hidden=row.hidden, heads=settings.heads[row.hidden], batch=row.batch,
                seq=settings.seq)


def predict_step_time(outcome: paper_fit.Outcome, scheme: str, ranks: int,
                      sizes: dict[str, int]) -> float:
    """Predict the average step time by the fitted model, on the scheme's default grid."""
    fit = outcome.fit
    tuned = msgspec.structs.replace(outcome.machine, achieved=fit.achieved)
    trace = dry_run.extrapolate_step(scheme, ranks, layers=fit.layers,
                                     dtype=load_tables().settings.dtype, **sizes)
    return sum(step_seconds(tuned, trace, fit.recompute[scheme]).values()) / sizes["batch"]
