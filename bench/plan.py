"""The verb ``plan``: every scheme and every grid for so many ranks, by predicted time.

All of them are screened by the closed forms (`bench.screen`), whose words are exact; the best are
then traced by dry runs of the model's own code, which makes their memory and their counts exact.
Seconds are a model either way.
"""

import math
import time
from typing import Iterator

import msgspec
from tabulate import tabulate

from bench import fit, model
from bench.cases import UsageError
from bench.dry import sizes as sizes_of
from bench.screen import Plan, Sizes, products, screen
from mm3d import dry
from mm3d.contract import lookup, registry

TRACED = 32    # plans that are traced after screening: all, where there are no more
FEW = 12    # and so many where there are more


def candidates(ranks: int, scheme: str | None = None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every scheme that divides the work, and every grid of it, for so many ranks.

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
    """How many directions the best grid of a product has: 1, 2 or 3 (see `cost.lower_bound`)."""
    k, n, m = sorted((M, N, K))
    return 1 if ranks * n <= m else 2 if ranks * k * k <= m * n else 3


def traced(plan: Plan, machine: model.Machine, dtype: str, recompute: str,
           sizes: Sizes) -> Plan:
    """The same plan with seconds and memory from a dry run of rank 0."""
    ranks = math.prod(plan.grid)
    trace = dry.extended(plan.scheme, ranks, plan.grid, dtype=dtype, block=machine.granule,
                         recompute=recompute, **sizes)
    seconds = model.step_seconds(machine, trace)
    return msgspec.structs.replace(plan, forward=seconds["forward"],
                                   backward=seconds["backward"], memory=trace.peak,
                                   fits=trace.peak <= machine.memory_bytes, traced=True)


def plans(ranks: int, machine: model.Machine, dtype: str = "float32", recompute: str = "none",
          top: int = FEW, scheme: str | None = None, **sizes: int) -> list[Plan]:
    """The plans of all candidates, the best first, `top` of them traced.

    Where there are no more than `TRACED` all are traced.  Those that fit the machine come
    before those that do not.
    """
    found = sorted((screen(name, grid, machine, dtype, recompute, sizes)
                    for name, grid in candidates(ranks, scheme)), key=lambda plan: plan.order)
    top = len(found) if len(found) <= TRACED else top
    best = sorted((traced(plan, machine, dtype, recompute, sizes) for plan in found[:top]),
                  key=lambda plan: plan.order)
    return best + found[top:]


def best_grid(scheme: str, ranks: int, machine: model.Machine, dtype: str = "float32",
              recompute: str = "none", **sizes: int) -> tuple[int, ...]:
    """The grid that ``--grid auto`` takes: the first of the scheme's `plans`.

    Raises
    ------
    ValueError
        When the scheme has no grid of so many ranks.
    """
    return plans(ranks, machine, dtype, recompute, scheme=scheme, **sizes)[0].grid


def run(arguments) -> int:
    """Print the plans; UsageError when the arguments cannot be meant."""
    if arguments.ranks < 2 or arguments.top < 1:
        raise UsageError(f"--ranks {arguments.ranks} --top {arguments.top}: at least 2 ranks "
                         f"and one plan would do")
    machine, sizes = model.load(arguments.machine, arguments.dtype), sizes_of(arguments)
    start = time.perf_counter()
    found = plans(arguments.ranks, machine, arguments.dtype, arguments.recompute,
                  max(arguments.top, FEW), **sizes)
    took = time.perf_counter() - start
    print(f"{machine.about}\n{arguments.ranks} ranks; "
          + ", ".join(f"{key} {value}" for key, value in sizes.items())
          + f", {arguments.dtype}, recompute {arguments.recompute}\n")
    shown = found[:arguments.top]
    print(table(shown, [with_policy(plan, machine, arguments.dtype, sizes) for plan in shown]))
    print("\n" + verdict(found, sizes, arguments.ranks)
          + f"\n{len(found)} plans screened, {sum(p.traced for p in found)} traced in "
          f"{took:.1f} s. Words are those of the bucket algorithm, exactly; memory of what is "
          f"traced is a dry run's of rank 0; seconds are a model.")
    if arguments.pictures:
        from bench.outlook import planned
        for path in planned(arguments.pictures, machine, arguments, sizes):
            print(path)
    return 0


def with_policy(plan: Plan, machine: model.Machine, dtype: str, sizes: Sizes) -> str:
    """Whether the plan fits, or which policy of recomputation fits instead."""
    if plan.fits:
        return "yes"
    name, _ = fit.policy(plan.scheme, plan.grid, dtype, sizes, machine.memory_bytes)
    return f"with {name}" if name else "NO"


def table(found: list[Plan], fits: list[str]) -> str:
    """The plans, one a line, and whether each fits."""
    rows = [[p.scheme, " x ".join(map(str, p.grid)), p.seconds, p.forward, p.backward,
             p.words["forward"] / 1e6, p.words["backward"] / 1e6, p.over_bound,
             p.memory / 2**30, said] for p, said in zip(found, fits)]
    return tabulate(rows, ["scheme", "grid", "step s", "forward s", "backward s",
                           "Mwords fwd", "Mwords bwd", "/ bound", "GiB", "fits"],
                    floatfmt=".4g")


def verdict(found: list[Plan], sizes: Sizes, ranks: int) -> str:
    """Which moves least, against the bound, and what the default cube does."""
    lines = []
    least = min(found, key=lambda p: p.words["forward"])
    lines.append(f"fewest words forward: {least.scheme} {' x '.join(map(str, least.grid))}, "
                 f"{least.words['forward'] / 1e6:.4g} million a rank")
    side = round(ranks ** (1 / 3))
    cube = next((p for p in found if p.scheme == "3d" and p.grid == (side,) * 3), None)
    if cube:
        lines.append(f"the cube {side} x {side} x {side}: {cube.words['forward'] / 1e6:.4g} "
                     f"million forward, {cube.words['forward'] / least.words['forward']:.3g} "
                     f"times as many; {cube.seconds:.4g} s")
    kinds = {regime(*product.extents, ranks) for product in products(sizes)}
    lines.append("regime of the lower bound for the products: "
                 + ", ".join(f"{kind}-D" for kind in sorted(kinds)))
    return "\n".join(lines)
