"""Measure every distributed product of one shape on the same ranks, beside bounds and models."""

import gc
import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Callable, ContextManager, Sequence

import numpy as np

from bench.checks import freivalds
from bench.errors import UsageError, reject
from bench.experiments.products import operands
from bench.experiments.products.matmul import LIMITS, check_results, verify_product
from bench.experiments.products.problem import (Problem, find_product, product_grid,
                                                schemes_with_products)
from bench.instruments.clock import Clock
from bench.instruments.sampling import (makespans, measure_in_random_order,
                                        measured_environment, take_samples_in_turns)
from bench.instruments.stall import unwatched
from bench.instruments.timing import Limits
from bench.records.measurements import Check, Measurements, Variable
from mm3d.grid.shape import GridShape
from mm3d.tracing.dry_arrays import DryBackend
from mm3d.tracing.events import Gemm, Observer
from mm3d.tracing.observe import observed
from mm3d.transport.silent import DryCommunicator

COUNTS = ("words", "messages", "rounds", "stored", "operations")


@dataclass(frozen=True)
class Counted:
    """What one rank counts in one forward product.

    Attributes
    ----------
    words, messages, rounds : int
        Words and blocks as `mm3d.grid.axis.Traffic` counts them, and calls of collectives, which
        follow one another.
    stored, operations : int
        Elements of this rank's blocks of A, B and C, and floating-point operations of its local
        products.
    memory : int
        The most bytes of arrays at one time, with those of A, B and C.
    """

    words: int
    messages: int
    rounds: int
    stored: int
    operations: int
    memory: int


@dataclass(frozen=True)
class Verified:
    """One product, verified: this rank's counts, the checks, and the transport."""

    counted: Counted
    checks: list[Check]
    transport: str


class OperationCounter(Observer):
    """Count the floating-point operations of matrix products."""

    kinds = (Gemm,)

    def __init__(self) -> None:
        self.operations = 0

    def enter(self, event: Gemm, barrier: Callable[[], None] | None = None) -> None:
        """Count a product."""
        self.operations += event.flops


def usable_products(ranks: int, names: Sequence[str] | None = None
                    ) -> tuple[dict[str, GridShape], dict[str, str]]:
    """Return the grid of each product on `ranks` ranks, and why the others have none."""
    grids, missing = {}, {}
    for name in names or schemes_with_products():
        cls = find_product(name)
        try:
            grids[name] = cls.grid_shape(cls.default_grid(ranks))
            cls.check_grid(grids[name])
        except ValueError as error:
            missing[name] = str(error)
            grids.pop(name, None)
    return grids, missing


def count_forward(problem: Problem) -> Counted:
    """Count the traffic, the memory and the work of one forward product on this rank."""
    grid, counter = problem.grid, OperationCounter()
    gc.collect()
    grid.reset_traffic()
    grid.backend.reset_peak()
    with observed(grid, counter):
        result = problem.forward()
    memory = grid.backend.memory()["peak"]
    del result
    found = list(grid.traffic().values())
    stored = sum(math.prod(layout.local_shape(grid, problem.shapes[name]))
                 for name, layout in problem.layouts.items())
    return Counted(sum(one.words for one in found), sum(one.messages for one in found),
                   sum(one.calls for one in found), stored, counter.operations, memory)


def count_dry(name: str, form: str, sizes: GridShape, shape: tuple[int, int, int], dtype: str,
              rank: int = 0) -> Counted:
    """Count what one rank of a grid does, without the others and without data.

    Memory is that of a rank which receives all that it reads; ranks that share memory take less.
    """
    grid = product_grid(name, DryCommunicator(sizes.ranks, rank), sizes, DryBackend())
    return count_forward(Problem(name, form, grid, shape, dtype))


def measure_side_by_side(form: str, shape: tuple[int, int, int], dtype: str, comm,
                         backend: str | None = None, limits: Limits = LIMITS, seed: int = 0,
                         names: Sequence[str] | None = None,
                         watched: Callable[..., ContextManager] = unwatched
                         ) -> Measurements | None:
    """Measure the forward product of one shape by several algorithms, in turns.

    Each product is verified and counted alone.  Then each takes one sample in every round, in
    random order, so that a slower machine slows them all.

    Parameters
    ----------
    form : {"ab", "abt", "atb"}
        The product.
    shape : tuple of int
        M, N, K.
    dtype : str
        The dtype of all matrices.
    comm : mpi4py.MPI.Intracomm
        The ranks; every one of them calls this.
    backend : str, optional
        The array library.
    limits : Limits
        When to stop the rounds: after the seconds of one product times the number of products.
    seed : int
        The seed of the matrices, of the checks and of the order of the products.
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
    grids, missing = usable_products(comm.size, names)
    if not grids or (names and missing):
        raise UsageError(f"--scheme {','.join(names or ['all'])}: " + "; ".join(missing.values()))

    def make(name: str) -> Problem:
        return Problem(name, form, product_grid(name, comm, grids[name], backend), shape, dtype,
                       seed)

    verified = measure_in_random_order([(name,) for name in grids], seed,
                                       lambda name: _verify_alone(make(name), seed, watched))
    samples, again, library = _sample_in_turns([make(name) for name in grids], limits, seed,
                                               watched)
    counted = comm.gather([asdict(one.counted) for one in verified])
    environs = measured_environment(library, comm)
    if counted is None:
        return None
    variables = _variables(form, shape, dtype, grids, samples, counted)
    settings = {"form": form, "dtype": dtype, "M": shape[0], "N": shape[1], "K": shape[2],
                "seed": seed, "grids": " ".join(grid.compact for grid in grids.values()),
                "transport": " ".join(sorted({word for one in verified
                                              for word in one.transport.split()})),
                "left_out": "; ".join(f"{name}: {why}" for name, why in missing.items()),
                "in_turns": True, **asdict(limits)}
    scales = {"scheme": list(grids), "rank": range(comm.size),
              "repetition": range(samples.shape[1])}
    return Measurements("products", settings, environs, scales, variables,
                        [check for one in verified for check in one.checks] + again)


def _verify_alone(problem: Problem, seed: int, watched: Callable[..., ContextManager]) -> Verified:
    """Verify one product and count it, while no other has arrays; free its grid."""
    with watched(problem.grid):
        checks = verify_product(problem, ("forward",), seed)[2]
        counted = count_forward(problem)
    found = Verified(counted, _named(problem, checks), operands.transport_names(problem.grid))
    problem.grid.free()
    return found


def _sample_in_turns(problems: Sequence[Problem], limits: Limits, seed: int,
                     watched: Callable[..., ContextManager]
                     ) -> tuple[np.ndarray, list[Check], str]:
    """Take samples (products, rounds), check the last results, and name the array library."""
    comm, library = problems[0].grid.comm, problems[0].grid.backend.name
    with ExitStack() as stack:
        for problem in problems:
            stack.enter_context(watched(problem.grid))
        calls = [makespans(problem.forward, problem.grid.comm, problem.grid.backend.synchronize,
                           Clock(problem.grid.comm)) for problem in problems]
        together = replace(limits, max_seconds=limits.max_seconds * len(problems))
        samples, _ = take_samples_in_turns(calls, together, seed, comm)
        again = []
        for problem in problems:
            found = check_results(problem, problem.forward(), seed + 1)
            reject(freivalds.failure_message(found), f"{problem.scheme}, after the last round, ")
            again += _named(problem, found)
    for problem in problems:
        problem.grid.free()
    return np.array(samples), again, library


def _named(problem: Problem, checks: Sequence[Check]) -> list[Check]:
    """Return the checks with the name of the product."""
    return [replace(check, quantity=f"{problem.scheme}: {check.quantity}") for check in checks]


def _variables(form: str, shape: tuple[int, int, int], dtype: str, grids: dict[str, GridShape],
               samples: np.ndarray, counted: list[list[dict]]) -> dict[str, Variable]:
    """Make the variables of the record, with the counts of all ranks."""
    per_rank = {name: np.array([[one[name] for one in mine] for mine in counted]).T
                for name in (*COUNTS, "memory")}
    variables = {
        "samples": Variable(samples, "s", ("scheme", "repetition")),
        "memory": Variable(per_rank["memory"], "byte", ("scheme", "rank")),
        "memory_alone": Variable(np.array([
            max(one.memory for one in counts)
            for counts in count_all_dry(form, shape, dtype, grids, len(counted))]),
            "byte", ("scheme",))}
    return variables | {name: Variable(per_rank[name], "1", ("scheme", "rank"))
                        for name in COUNTS}


def count_all_dry(form: str, shape: tuple[int, int, int], dtype: str,
                  grids: dict[str, GridShape], ranks: int) -> list[list[Counted]]:
    """Count what each rank does in each product, without data: see `count_dry`."""
    return [[count_dry(name, form, sizes, shape, dtype, rank) for rank in range(ranks)]
            for name, sizes in grids.items()]
