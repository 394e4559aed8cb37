"""Measure the rate of one rank's matrix products, by size, dtype and BLAS threads."""

import time
from dataclasses import asdict
from typing import Any, Callable, Sequence

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from bench.checks import operation
from bench.errors import UsageError
from bench.experiments.products import operands
from bench.instruments.host import granted_threads
from bench.instruments.sampling import (calls_needed, measure_in_random_order,
                                        measured_environment, pad_samples, repeat_calls,
                                        take_samples)
from bench.instruments.timing import Limits
from bench.records.measurements import Check, Measurements, Variable
from mm3d import launcher
from mm3d.arrays import backend as backends
from mm3d.arrays.backend import Backend
from mm3d.arrays.products import matmul

LIMITS = Limits(7, 30, 1.0)    # by default


def thread_counts(asked: Sequence[int] | None = None) -> list[int]:
    """Return the numbers of BLAS threads to measure with: one, and the number of cores.

    Parameters
    ----------
    asked : sequence of int, optional
        Numbers to measure with instead.

    Raises
    ------
    UsageError
        When BLAS uses fewer here.
    """
    threads = list(asked or sorted({1, granted_threads(launcher.cores())}))
    most = granted_threads(max(threads))
    if most < max(threads):
        raise UsageError(f"--threads {max(threads)}: BLAS takes {most} here at most")
    return threads


def measure_gemm(sizes: Sequence[int], dtypes: Sequence[str] = ("float32", "float64"),
                 threads: Sequence[int] | None = None, backend: str | Backend | None = None,
                 limits: Limits = LIMITS, seed: int = 0) -> Measurements:
    """Measure C = A B of square matrices on this rank alone; each product is verified first.

    Parameters
    ----------
    sizes : sequence of int
        Edges of the matrices.
    dtypes : sequence of str
        Dtypes of A, B and C.
    threads : sequence of int, optional
        Numbers of BLAS threads; see `thread_counts`.
    backend : str or Backend, optional
        The array library.
    limits : Limits
        When to stop repeating a product.
    seed : int
        The seed of the numbers in A and B, and of the order of the products.

    Returns
    -------
    Measurements
        A record of kind "gemm", by dtype, threads and size: seconds of a product and
        operations a second.

    Raises
    ------
    UsageError
        When BLAS uses fewer threads.
    ValueError
        When there is no such array library here.
    WrongResult
        When a product is wrong.
    """
    library, threads = backends.get(backend), thread_counts(threads)
    points = [(dtype, count, n) for dtype in dtypes for count in threads for n in sizes]
    checks: list[Check] = []

    def measure(dtype: str, count: int, n: int) -> tuple[list[float], str]:
        a, b = (operands.fill(library.empty((n, n), dtype), library, seed, name)
                for name in "AB")
        with threadpool_limits(count, user_api="blas"):
            checks.extend(operation.check_own_product(
                f"C of {n} x {n} {dtype}, BLAS threads: {count}", (a, b, matmul(a, b)), seed))
            return take_samples(make_sampler(lambda: matmul(a, b), library.synchronize),
                                limits, MPI.COMM_SELF)

    found = measure_in_random_order(points, seed, measure)
    return gemm_record({"dtype": list(dtypes), "threads": threads, "size": list(sizes)}, found,
                       {"seed": seed, **asdict(limits)},
                       measured_environment(library.name, MPI.COMM_SELF), checks)


def make_sampler(step: Callable[[], object],
                 synchronize: Callable[[], None]) -> Callable[[], float]:
    """Return a function that takes a sample of `step`.

    A sample is the mean seconds of a call, over as many calls as the clock needs.
    """
    def span(calls: int) -> float:
        start = time.perf_counter()
        repeat_calls(step, calls)()
        synchronize()
        return time.perf_counter() - start

    calls = calls_needed(span)
    return lambda: span(calls) / calls


def gemm_record(scales: dict[str, list], found: list[tuple[list[float], str]], settings: dict,
                environs: dict[str, Any], checks: list[Check]) -> Measurements:
    """Make the record of the samples `found` along `scales`."""
    dims = tuple(scales)
    shape = tuple(map(len, scales.values()))
    samples = pad_samples([seconds for seconds, _ in found], shape)
    by_width = np.array([int(end == "width") for _, end in found]).reshape(shape)
    return Measurements(
        "gemm", settings, environs,
        {**scales, "repetition": range(samples.shape[-1])},
        {"samples": Variable(samples, "s", (*dims, "repetition")),
         "ended_by_width": Variable(by_width, "1", dims)}, checks)
