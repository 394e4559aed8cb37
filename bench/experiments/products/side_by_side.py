"""Measure every distributed product of one shape on the same ranks, beside bounds and models."""

import gc
import math
from dataclasses import asdict, dataclass
from typing import Callable, ContextManager, Sequence

import numpy as np

from bench.checks import freivalds
from bench.errors import UsageError
from bench.experiments.products import operands
from bench.experiments.products.matmul import LIMITS, check_results, reject, verify_product
from bench.experiments.products.problem import (Problem, find_product, product_grid,
                                                schemes_with_products)
from bench.instruments.clock import Clock
from bench.instruments.sampling import (BOUNDS, makespans, measure_in_random_order,
                                        measured_environment, pad_samples, take_samples)
from bench.instruments.stall import unwatched
from bench.instruments.statistics import median_interval
from bench.instruments.timing import Limits
from bench.records.measurements import Check, Measurements, Variable
from mm3d.arrays import backend as backends
from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.tracing.dry_arrays import DryBackend
from mm3d.transport.silent import DryCommunicator

COUNTS = ("words", "messages", "rounds")
NOT_STATED = -1    # the closed form of an algorithm that has none


@dataclass(frozen=True)
class Counted:
    """What one rank counts in one forward product.

    Attributes
    ----------
    words, messages, rounds : int
        Words and blocks as `mm3d.grid.axis.Traffic` counts them, and calls of collectives, which
        follow one another.
    memory : int
        The most bytes of arrays at one time, with those of A, B and C.
    """

    words: int
    messages: int
    rounds: int
    memory: int


@dataclass(frozen=True)
class Sampled:
    """The measurement of one product: seconds, this rank's counts, checks, and the transport."""

    seconds: list[float]
    counted: Counted
    checks: list[Check]
    transport: str


def usable_products(ranks: int) -> tuple[dict[str, GridShape], dict[str, str]]:
    """Return the grid of each product on so many ranks, and why the others have none."""
    grids, missing = {}, {}
    for name in schemes_with_products():
        cls = find_product(name)
        try:
            grids[name] = cls.grid_shape(cls.default_grid(ranks))
            cls.check_grid(grids[name])
        except ValueError as error:
            missing[name] = str(error)
            grids.pop(name, None)
    return grids, missing


def count_forward(problem: Problem) -> Counted:
    """Count the traffic and the memory of one forward product on this rank."""
    grid = problem.grid
    gc.collect()
    grid.reset_traffic()
    grid.backend.reset_peak()
    result = problem.forward()
    memory = grid.backend.memory()["peak"]
    del result
    found = list(grid.traffic().values())
    return Counted(sum(one.words for one in found), sum(one.messages for one in found),
                   sum(one.calls for one in found), memory)


def count_dry(name: str, form: str, sizes: GridShape, shape: tuple[int, int, int], dtype: str,
              rank: int = 0) -> Counted:
    """Count what one rank of a grid does, without the others and without data.

    Memory is that of a rank which receives all that it reads; ranks that share memory take less.
    """
    grid = product_grid(name, DryCommunicator(sizes.ranks, rank), sizes, DryBackend())
    return count_forward(Problem(name, form, grid, shape, dtype))


def closed_form_words(name: str, form: str, sizes: GridShape, shape: tuple[int, int, int]) -> int:
    """Return the words of all ranks by the closed form; `NOT_STATED` if there is none."""
    moves = find_product(name).matrix_product.forward_moves(sizes, form, shape)
    return NOT_STATED if moves is None else sum(move.words for move in moves)


def measure_side_by_side(form: str, shape: tuple[int, int, int], dtype: str, comm,
                         backend: str | None = None, limits: Limits = LIMITS,
                         seed: int = 0, watched: Callable[..., ContextManager] = unwatched
                         ) -> Measurements | None:
    """Measure the forward product of one shape by every algorithm that fits the ranks.

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
        When to stop repeating one product.
    seed : int
        The seed of the matrices, of the checks and of the order of the products.
    watched : callable
        ``watched(grid)`` is the context in which a product is watched for stalls.

    Returns
    -------
    Measurements or None
        A record of kind "products", by scheme and rank; on rank 0, None on the others.

    Raises
    ------
    UsageError
        When no product fits the ranks.
    WrongResult
        On all ranks, when a product is wrong.
    """
    grids, missing = usable_products(comm.size)
    if not grids:
        raise UsageError("--scheme all: " + "; ".join(missing.values()))

    def measure(name: str) -> Sampled:
        return _measure_product(name, form, shape, dtype, grids[name], comm, backend, limits,
                                seed, watched)

    found = measure_in_random_order([(name,) for name in grids], seed, measure)
    counted = comm.gather([asdict(one.counted) for one in found])
    environs = measured_environment(backends.get(backend).name, comm)
    if counted is None:
        return None
    variables = _variables(form, shape, dtype, grids, found, counted)
    settings = {"form": form, "dtype": dtype, "M": shape[0], "N": shape[1], "K": shape[2],
                "seed": seed, "grids": " ".join(grid.compact for grid in grids.values()),
                "transport": " ".join(sorted({word for one in found
                                              for word in one.transport.split()})),
                "left_out": "; ".join(f"{name}: {why}" for name, why in missing.items()),
                **asdict(limits)}
    scales = {"scheme": list(grids), "rank": range(comm.size), "bound": BOUNDS,
              "repetition": range(variables["samples"].values.shape[1])}
    return Measurements("products", settings, environs, scales, variables,
                        [check for one in found for check in one.checks])


def _measure_product(name: str, form: str, shape: tuple[int, int, int], dtype: str,
                     sizes: GridShape, comm, backend: str | None, limits: Limits,
                     seed: int, watched: Callable[..., ContextManager]) -> Sampled:
    """Verify one product, count it, take its samples, and check the last result again."""
    grid = product_grid(name, comm, sizes, backend)
    problem = Problem(name, form, grid, shape, dtype, seed)
    with watched(grid):
        checks = verify_product(problem, ("forward",), seed)[2]
        counted = count_forward(problem)
        sample = makespans(problem.forward, comm, grid.backend.synchronize, Clock(comm))
        seconds, _ = take_samples(sample, limits, comm)
        again = check_results(problem, problem.forward(), seed + 1)
    reject(freivalds.failure_message(again), f"{name}, after the last repetition, ")
    transport = operands.transport_names(grid)
    grid.free()
    return Sampled(seconds, counted, [
        Check(f"{name}: {check.quantity}", check.error, check.tolerance)
        for check in checks + again], transport)


def _variables(form: str, shape: tuple[int, int, int], dtype: str, grids: dict[str, GridShape],
               found: list[Sampled], counted: list[list[dict]]) -> dict[str, Variable]:
    """Make the variables of the record, with the counts of all ranks."""
    ranks = len(counted)
    per_rank = {name: np.array([[one[name] for one in mine] for mine in counted]).T
                for name in (*COUNTS, "memory")}
    variables = {
        "samples": Variable(pad_samples([one.seconds for one in found], (len(found),)), "s",
                            ("scheme", "repetition")),
        "seconds": Variable(np.array([median_interval(one.seconds) for one in found]), "s",
                            ("scheme", "bound")),
        "memory": Variable(per_rank["memory"], "byte", ("scheme", "rank"))}
    variables |= {name: Variable(per_rank[name], "1", ("scheme", "rank")) for name in COUNTS}
    return variables | derived_variables(form, shape, dtype, grids, ranks)


def derived_variables(form: str, shape: tuple[int, int, int], dtype: str,
                      grids: dict[str, GridShape], ranks: int) -> dict[str, Variable]:
    """Compute what follows from the sizes: closed forms, bounds, and memory by dry runs."""
    alone = np.array([max(count_dry(name, form, sizes, shape, dtype, rank).memory
                          for rank in range(ranks)) for name, sizes in grids.items()])
    words = alone / np.dtype(dtype).itemsize
    return {
        "closed_form_words": Variable(np.array(
            [closed_form_words(name, form, sizes, shape) for name, sizes in grids.items()]),
            "1", ("scheme",)),
        "memory_alone": Variable(alone, "byte", ("scheme",)),
        "least_words": Variable(np.array(cost.lower_bound(*shape, ranks)), "1", ()),
        "least_words_with_memory": Variable(np.array(
            [cost.lower_bound_with_memory(*shape, ranks, each) for each in words]),
            "1", ("scheme",))}


def record_grids(names: Sequence[str], grids: str) -> dict[str, GridShape]:
    """Return the grid of each scheme of a record, from its setting "grids"."""
    return {name: GridShape.parse(text, find_product(name).directions)
            for name, text in zip(names, grids.split(), strict=True)}


def mean_words(total: float, ranks: int) -> float:
    """Return the words of a rank in the mean; NaN for `NOT_STATED`."""
    return math.nan if total == NOT_STATED else total / ranks
