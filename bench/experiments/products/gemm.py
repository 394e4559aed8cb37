"""Measure the rate of one rank's matrix products, by size, dtype and BLAS threads."""

from dataclasses import asdict
from typing import Callable, Sequence

from mpi4py import MPI
from threadpoolctl import threadpool_limits

from bench.checks import operation
from bench.errors import UsageError
from bench.experiments.products import operands
from bench.instruments.clock import Clock
from bench.instruments.host import granted_threads
from bench.instruments.sampling import (makespans, measure_in_random_order, measured_environment,
                                        samples_along, take_samples)
from bench.instruments.timing import Limits
from bench.records.measurements import Check, Measurements
from mm3d import launcher
from mm3d.arrays import backend as backends
from mm3d.arrays.backend import Backend
from mm3d.arrays.products import matmul


def thread_counts(asked: Sequence[int] | None) -> list[int]:
    """Return the numbers of BLAS threads to measure with: by default one, and that of the cores.

    Raises UsageError when BLAS uses fewer here.
    """
    threads = list(asked or sorted({1, granted_threads(launcher.cores())}))
    most = granted_threads(max(threads))
    if most < max(threads):
        raise UsageError(f"--threads {max(threads)}: BLAS takes {most} here at most")
    return threads


def measure_gemm(sizes: Sequence[int], dtypes: Sequence[str], threads: Sequence[int],
                 backend: str | Backend | None, limits: Limits, seed: int,
                 progress: Callable[[str], None]) -> Measurements:
    """Measure C = A B of square matrices on this rank alone; each product is verified first.

    Returns a record of kind "gemm", by dtype, BLAS threads and size.  Raises ValueError when there
    is no such array library here, WrongResult when a product is wrong.
    """
    library = backends.get(backend)
    points = [(dtype, count, n) for dtype in dtypes for count in threads for n in sizes]
    checks: list[Check] = []
    clock = Clock(MPI.COMM_SELF)

    def measure(dtype: str, count: int, n: int) -> tuple[list[float], str]:
        a, b = (operands.fill(library.empty((n, n), dtype), library, seed, name)
                for name in "AB")
        with threadpool_limits(count, user_api="blas"):
            checks.extend(operation.check_own_product(
                f"C of {n} x {n} {dtype}, BLAS threads: {count}", (a, b, matmul(a, b)), seed))
            return take_samples(makespans(lambda: matmul(a, b), MPI.COMM_SELF,
                                          library.synchronize, clock), limits, MPI.COMM_SELF)

    found = measure_in_random_order(points, seed, measure, progress)
    scales, variables = samples_along(
        {"dtype": list(dtypes), "threads": list(threads), "size": list(sizes)}, found)
    return Measurements("gemm", {"seed": seed, **asdict(limits)},
                        measured_environment(library.name, MPI.COMM_SELF), scales, variables,
                        checks)
