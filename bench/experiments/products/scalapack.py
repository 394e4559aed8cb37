"""Measure the 3-D product beside ScaLAPACK's PSGEMM and PDGEMM, in one run.

ScaLAPACK is called through ctypes, on the same ranks, with its matrices divided
block-cyclically over its own grid.  It moves them by MPI; the 3-D product is measured by MPI, too,
and in shared memory.  Both sides multiply locally with one function, from the BLAS that ScaLAPACK
calls (`bench.experiments.products.fortran_blas`).  All are verified.  Every repetition measures
all of them in random order; figures are medians of ratios within repetitions.
"""

import contextlib
import ctypes
import os
from functools import partial
from typing import Callable, Iterator, Sequence

import numpy as np

from bench.agreement import make_on_each_rank
from bench.checks.passed import require_passed
from bench.errors import as_usage_error
from bench.experiments.products import fortran_blas
from bench.experiments.products.matmul import check_results
from bench.experiments.products.pgemm import Pgemm, load_scalapack
from bench.experiments.products.problem import LocalProducts, Problem, product_grid
from bench.instruments.clock import Clock
from bench.instruments.sampling import Sample, compare_in_turns, repeat_calls, time_side
from bench.instruments.timing import Limits
from bench.records.model_run import transport_names


class ScalapackProducts:
    """The products of both sides at one size, on the same ranks.

    Parameters
    ----------
    library : ctypes.CDLL
        ScaLAPACK; see `load_libraries`.
    gemm : fortran_blas.FortranGemm
        The function that both sides multiply with.
    grid : tuple of int or None
        Sizes of the directions of the 3-D product; None for a cube.
    blocks : sequence of int
        Rows and columns of ScaLAPACK's blocks, each a subject of its own.
    seed : int
        The seed of the numbers in all matrices.

    Raises
    ------
    UsageError
        When the ranks do not fit the grid.
    """

    def __init__(self, library: ctypes.CDLL, gemm: fortran_blas.FortranGemm, comm,
                 shape: tuple[int, int, int], grid: tuple[int, ...] | None,
                 blocks: Sequence[int], seed: int) -> None:
        self.gemm, self.comm, self.shape, self.seed = gemm, comm, shape, seed
        self.dtype = str(gemm.dtype)
        self.ours: dict[str, Problem] = {}
        with as_usage_error():
            for transport in ("", "mpi"):    # the default, and ScaLAPACK's
                with use_transport(transport):
                    ours = product_grid("3d", comm, grid, "numpy")
                    problem = Problem("3d", "ab", ours, shape, self.dtype, seed)
                self.ours.setdefault(transport_names(problem.grid), problem)
        self.theirs = [Pgemm(library, comm, shape, self.dtype, block, seed) for block in blocks]

    def free(self) -> None:
        """Free all grids."""
        for pgemm in self.theirs:
            pgemm.free()
        for problem in self.ours.values():
            problem.grid.free()

    def check(self) -> None:
        """Compute every product once; WrongResult, on all ranks, for the first that is wrong."""
        for problem in self.ours.values():
            check_results(problem, problem.forward(), self.seed)
        for pgemm in self.theirs:
            pgemm()
            require_passed(pgemm.check(self.seed))

    def subjects(self) -> dict[str, Callable[[], object]]:
        """Return all steps by name: 3-D by transport, ScaLAPACK by block size, local by BLAS."""
        first = next(iter(self.ours.values()))
        local = LocalProducts(first.forward, first.grid, first.dtype)
        return {**{f"3d on {first.grid.shape}, transport {name}": problem.forward
                   for name, problem in self.ours.items()},
                **{f"ScaLAPACK on {' x '.join(map(str, one.grid))}, blocks of {one.block}": one
                   for one in self.theirs},
                f"local products of 3d alone, by {self.gemm.file}":
                    lambda: [self.gemm(*call) for call in local.calls],
                "the same, by NumPy's own BLAS": local}


def load_libraries(comm, dtype: str, load: Callable[[], ctypes.CDLL] = load_scalapack
                   ) -> tuple[ctypes.CDLL, fortran_blas.FortranGemm]:
    """Load ScaLAPACK by `load`, and the function of its BLAS for `dtype`, on every rank.

    Raises UsageError on all ranks, when one has no ScaLAPACK, or its BLAS cannot be called.
    """
    lib = make_on_each_rank(load, comm)
    return lib, make_on_each_rank(lambda: fortran_blas.FortranGemm(lib, dtype), comm)


@contextlib.contextmanager
def use_transport(transport: str) -> Iterator[None]:
    """Let new grids use a transport within the block; the default one if it is ""."""
    before = os.environ.get("MM3D_TRANSPORT")
    if transport:
        os.environ["MM3D_TRANSPORT"] = transport
    try:
        yield
    finally:
        if transport:
            del os.environ["MM3D_TRANSPORT"]
            os.environ |= {"MM3D_TRANSPORT": before} if before is not None else {}


def compare_products(products: ScalapackProducts, calls: int,
                     limits: Limits) -> dict[str, np.ndarray]:
    """Verify and measure all products in turns, until the limits are reached.

    Parameters
    ----------
    products : ScalapackProducts
        The products of both sides; every rank of the job calls this.

    Returns
    -------
    dict of str to ndarray
        Makespans of a call by repetition, of each of `ScalapackProducts.subjects`.

    Raises
    ------
    WrongResult
        On all ranks, when a product is wrong.
    """
    comm, clock = products.comm, Clock(products.comm)
    backend = next(iter(products.ours.values())).grid.backend

    def sample(step: Callable[[], object]) -> Sample:
        found = time_side(repeat_calls(step, calls), comm, lambda: None, clock)
        return Sample(found.times / calls)
    backend.gemm = products.gemm    # before any observer of its products
    try:
        products.check()
        steps, split = products.subjects(), len(products.ours)
        ours, theirs = [*steps][:split], [*steps][split:split + len(products.theirs)]
        found, _ = compare_in_turns(
            {name: partial(sample, step) for name, step in steps.items()}, limits, products.seed,
            comm, warmup=0, ratios=[(other, own) for own in ours for other in theirs])
    finally:
        del backend.gemm
    return {name: np.array([one.seconds for one in each]) for name, each in found.items()}
