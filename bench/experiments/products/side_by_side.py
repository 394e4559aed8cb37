"""Measure every distributed product of one shape on the same ranks, beside bounds and models."""

import gc
from contextlib import ExitStack
from dataclasses import asdict, astuple, replace
from typing import Callable, ContextManager, Sequence

import numpy as np

from bench.errors import UsageError
from bench.experiments.products.counts import (COUNTS, CountedProduct, count_dry,
                                               count_product)
from bench.experiments.products.matmul import check_results
from bench.experiments.products.problem import Problem, product_grid
from bench.instruments.clock import Clock
from bench.instruments.sampling import (makespans_in_turns, measure_in_random_order,
                                        measured_environment)
from bench.instruments.timing import Limits, unwatched
from bench.records.model_run import make_record, transport_names
from bench.records.measurements import Check, Measurements
from mm3d.grid.shape import GridShape
from mm3d.schemes import algorithms_with_products


def measure_side_by_side(form: str, shape: tuple[int, int, int], dtype: str, comm,
                         backend: str | None, limits: Limits, seed: int = 0,
                         names: Sequence[str] | None = None,
                         watched: Callable[..., ContextManager] = unwatched
                         ) -> Measurements | None:
    """Measure the forward product of one shape by several algorithms, in turns.

    Each product is verified and counted alone.  Then each takes one sample in every round, in
    random order, so that a slower machine slows them all.

    Parameters
    ----------
    limits : Limits
        When to stop the rounds: after the seconds of one product times the number of products.
    names : sequence of str, optional
        The algorithms; by default every one that fits the ranks.
    watched : callable
        The context in which products run, of a grid; see `mm3d.tracing.watchdog`.

    Returns
    -------
    Measurements or None
        A record of kind "products", by scheme and rank; on rank 0, None on the others.

    Raises
    ------
    UsageError
        When no product fits the ranks, or one of `names` does not.
    WrongResult
        On all ranks, when a product is wrong.
    """
    grids: dict[str, GridShape] = {}
    missing: dict[str, str] = {}
    algorithms = algorithms_with_products()
    for name in names or algorithms:
        cls = algorithms[name]
        try:
            grid = cls.grid_shape(cls.default_grid(comm.size))
            cls.check_grid(grid)
            grids[name] = grid
        except ValueError as error:
            missing[name] = str(error)
    if not grids or (names and missing):
        raise UsageError(f"--scheme {','.join(names or ['all'])}: " + "; ".join(missing.values()))

    def make(name: str) -> Problem:
        return Problem(name, form, product_grid(name, comm, grids[name], backend), shape, dtype,
                       seed)

    def count_alone(name: str) -> tuple[list[Check], CountedProduct]:
        problem = make(name)
        with watched(problem.grid):
            checks = _check(problem, seed)
            gc.collect()
            counted = count_product(problem)
        problem.grid.free()
        return checks, counted

    checks, counted = zip(*measure_in_random_order([(name,) for name in grids], seed, count_alone))
    problems = [make(name) for name in grids]
    library = problems[0].grid.backend
    with ExitStack() as stack:
        for problem in problems:
            stack.enter_context(watched(problem.grid))
        samples, _ = makespans_in_turns([problem.forward for problem in problems], limits, seed,
                                        comm, library.synchronize, Clock(comm))
        again = [_check(problem, seed + 1, f"{problem.scheme}, after the last round, ")
                 for problem in problems]
    transports = {word for problem in problems
                  for word in transport_names(problem.grid).split()}
    for problem in problems:
        problem.grid.free()
    counted = comm.gather([astuple(one) for one in counted])
    environs = measured_environment(library.name, comm)
    if counted is None:
        return None
    settings = {"form": form, "dtype": dtype, "M": shape[0], "N": shape[1], "K": shape[2],
                "seed": seed, "grids": " ".join(grid.compact for grid in grids.values()),
                "transport": " ".join(sorted(transports)),
                "left_out": "; ".join(f"{name}: {why}" for name, why in missing.items()),
                "in_turns": True, **asdict(limits)}
    alone = [max(one.memory for one in count_dry(name, form, sizes, shape, dtype))
             for name, sizes in grids.items()]
    *counts, memory = np.array(counted).transpose(2, 1, 0)
    return make_record("products", settings, environs, {
        "s": {"samples": samples}, "byte": {"memory_alone": alone, "memory": memory},
        "1": dict(zip(COUNTS, counts))},
        [check for found in (*checks, *again) for check in found], scheme=list(grids))


def _check(problem: Problem, seed: int, when: str = "") -> list[Check]:
    """Compute a product, and return its checks with its name; WrongResult if one fails."""
    checks = check_results(problem, problem.forward(), seed, when)
    return [replace(check, quantity=f"{problem.scheme}: {check.quantity}") for check in checks]
