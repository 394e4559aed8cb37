"""Rank every scheme and every grid of a number of ranks by predicted time.

All of them are screened by the closed forms (`bench.prediction.closed_form_plan`), whose words are
exact; the best are then traced by dry runs of the model's own code, which makes their memory and
their counts exact. Seconds are a model either way.
"""

from typing import Iterator

import msgspec

from bench.prediction import machine_model, memory_fit
from bench.prediction.closed_form_plan import Plan, screen
from bench.prediction.seconds import step_seconds
from mm3d import ModelSizes
from mm3d.grid.shape import GridShape
from mm3d.schemes import lookup, registry
from mm3d.tracing import dry_run

TRACED = 32    # plans that are traced after screening: all, where there are no more
TRACED_OF_MANY = 12    # and so many where there are more


def candidates(ranks: int, scheme: str | None = None) -> Iterator[tuple[str, GridShape]]:
    """List every scheme that divides the work, with every grid of it, for a number of ranks.

    Raises
    ------
    ValueError
        When `scheme` is named and has no grid of so many.
    """
    for name in [scheme] if scheme else [n for n, s in registry().items() if s.divides_work]:
        try:
            grids = lookup(name).grids(ranks)
        except ValueError:    # no square
            if scheme:
                raise
            continue
        yield from ((name, grid) for grid in grids)


def regime(M: int, N: int, K: int, ranks: int) -> int:
    """Count the directions of a product's best grid: 1, 2 or 3 (see `cost.lower_bound`)."""
    k, n, m = sorted((M, N, K))
    return 1 if ranks * n <= m else 2 if ranks * k * k <= m * n else 3


def traced(plan: Plan, machine: machine_model.Machine, dtype: str, recompute: str,
           sizes: ModelSizes) -> Plan:
    """Return the plan with seconds and memory from a dry run of rank 0."""
    trace = dry_run.extended(plan.scheme, plan.grid.ranks, plan.grid, dtype=dtype,
                             block=machine.granule, recompute=recompute, **sizes)
    seconds = step_seconds(machine, trace)
    return msgspec.structs.replace(plan, forward=seconds["forward"],
                                   backward=seconds["backward"], memory=trace.peak,
                                   fits=trace.peak <= machine.memory_bytes, traced=True)


def plans(ranks: int, machine: machine_model.Machine, dtype: str = "float32",
          recompute: str = "none",
          top: int = TRACED_OF_MANY, scheme: str | None = None, **sizes: int) -> list[Plan]:
    """Plan all candidates, the best first, `top` of them traced.

    Where there are no more than `TRACED` all are traced.  Those that fit the machine come
    before those that do not.
    """
    found = sorted((screen(name, grid, machine, dtype, recompute, sizes)
                    for name, grid in candidates(ranks, scheme)), key=lambda plan: plan.order)
    top = len(found) if len(found) <= TRACED else top
    best = sorted((traced(plan, machine, dtype, recompute, sizes) for plan in found[:top]),
                  key=lambda plan: plan.order)
    return best + found[top:]


def best_grid(scheme: str, ranks: int, machine: machine_model.Machine, dtype: str = "float32",
              recompute: str = "none", **sizes: int) -> GridShape:
    """Choose the grid of ``--grid auto``: the first of the scheme's `plans`.

    Raises
    ------
    ValueError
        When the scheme has no grid of so many ranks.
    """
    return plans(ranks, machine, dtype, recompute, scheme=scheme, **sizes)[0].grid


def fitting(plan: Plan, machine: machine_model.Machine, dtype: str, sizes: ModelSizes) -> str:
    """Say whether the plan fits, or which policy of recomputation fits instead."""
    if plan.fits:
        return "yes"
    name, _ = memory_fit.policy(plan.scheme, plan.grid, dtype, sizes, machine.memory_bytes)
    return f"with {name}" if name else "NO"
