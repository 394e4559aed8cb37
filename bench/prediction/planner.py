"""Rank all schemes and grids of a number of ranks by predicted time.

All are screened by closed forms (`bench.prediction.closed_form_plan`), whose words are exact; the
best, and of few ranks the best of each scheme, are then traced by dry runs, whose memory and
counts are exact.  Seconds are always a model's.
"""

from dataclasses import replace
from typing import Callable, Iterator

from bench.prediction import machine_model, memory_fit
from bench.prediction.closed_form_plan import GridPlan, screen_grids
from bench.prediction.kernels import priced
from bench.prediction.seconds import step_seconds
from bench.prediction.shared_cores import trace_on_cores
from mm3d.grid.shape import GridShape
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme, registry
from mm3d.tracing import dry_run
from mm3d.tracing.trace import Trace

TraceOf = Callable[[GridPlan, int, int], Trace]
TRACED = 32    # the greatest number of plans that are all traced
TRACED_OF_MANY = 24    # plans traced where there are more
FEW_RANKS = 1024    # up to this the best of each scheme is traced too; more would take seconds


def list_candidates(ranks: int, scheme: str | None = None) -> Iterator[tuple[str, GridShape]]:
    """List the schemes that divide the work, each with all of its grids of `ranks` ranks.

    Raises ValueError when `scheme` is given and has no grid of `ranks` ranks.
    """
    for name in [scheme] if scheme else [n for n, s in registry().items() if s.divides_work]:
        try:
            grids = find_scheme(name).grids(ranks)
        except ValueError:    # no square
            if scheme:
                raise
            continue
        yield from ((name, grid) for grid in grids)


def bound_regime(M: int, N: int, K: int, ranks: int) -> int:
    """Return the regime of `mm3d.model.cost.lower_bound`: 1 to 3, the best grid's dimensions."""
    k, n, m = sorted((M, N, K))
    return 1 if ranks * n <= m else 2 if ranks * k * k <= m * n else 3


def trace_plan(plan: GridPlan, machine: machine_model.Machine, stack: Stack,
               trace_of: TraceOf | None = None) -> GridPlan:
    """Replace the seconds and the memory of a plan by those of a dry run of rank 0.

    Tokens are assumed to choose all experts equally often.
    """
    def alone(plan: GridPlan, rank: int, block: int) -> Trace:
        return dry_run.extrapolate_step(
            plan.scheme, plan.grid.ranks, plan.grid, rank, block=block, **stack.fields())
    trace = trace_on_cores(
        lambda rank: (trace_of or alone)(plan, rank, machine.elementwise_block),
        plan.scheme, plan.grid, machine.cores_shared_by(plan.grid.ranks))
    seconds = step_seconds(machine, priced(trace, machine, stack))
    return replace(plan, forward=seconds["forward"], backward=seconds["backward"],
                   memory=trace.peak, fits=trace.peak <= machine.memory_bytes, traced=True)


def rank_plans(ranks: int, machine: machine_model.Machine, stack: Stack,
               top: int = TRACED_OF_MANY, scheme: str | None = None,
               trace_of: TraceOf | None = None) -> list[GridPlan]:
    """Rank all candidates by predicted seconds; traced plans first, of these fitting ones first.

    All plans are traced if there are at most `TRACED`, else the best `top`, and more, up to 4
    `top`, until `top` fit the memory.  On at most `FEW_RANKS` ranks the best plan of each scheme
    is traced too: where sizes divide badly, closed forms are further off for some schemes.

    `trace_of` traces a rank of a plan, with a block of elementwise work; by default a step of one
    replica, which is all that closed forms cover.
    """
    found = sorted(screen_grids(list_candidates(ranks, scheme), machine, stack),
                   key=lambda plan: plan.order)
    top = len(found) if len(found) <= TRACED else top
    first = {plan.scheme: place for place, plan in reversed(list(enumerate(found)))}
    wanted = {*range(top), *(first.values() if ranks <= FEW_RANKS else ())}
    traced, left = [], []
    for place, plan in enumerate(found):
        short = place < 4 * top and sum(one.fits for one in traced) < top
        if place in wanted or place >= top and short:
            traced.append(trace_plan(plan, machine, stack, trace_of))
        else:
            left.append(plan)
    return sorted(traced, key=lambda plan: plan.order) + left


def best_grid(scheme: str, ranks: int, machine: machine_model.Machine, stack: Stack,
              trace_of: TraceOf | None = None) -> GridShape:
    """Choose the grid of ``--grid auto``: the first of the scheme's `rank_plans`.

    Raises ValueError when the scheme has no grid of `ranks` ranks.
    """
    return rank_plans(ranks, machine, stack, scheme=scheme, trace_of=trace_of)[0].grid


def describe_fit(plan: GridPlan, machine: machine_model.Machine, stack: Stack) -> str:
    """Format whether a plan fits the memory: "yes", "with" a policy of recomputation, or "NO"."""
    if plan.fits:
        return "yes"
    name, _ = memory_fit.choose_policy(plan.scheme, plan.grid, stack, machine.memory_bytes)
    return f"with {name}" if name else "NO"
