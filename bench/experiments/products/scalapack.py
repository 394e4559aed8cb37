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
from dataclasses import dataclass
from functools import partial
from typing import Callable, Iterator, Sequence

import numpy as np

from bench.agreement import make_on_each_rank
from bench.checks import freivalds
from bench.errors import WrongResult, as_usage_error
from bench.experiments.products import fortran_blas, operands
from bench.experiments.products.matmul import check_results
from bench.experiments.products.pgemm import Pgemm, load_scalapack
from bench.experiments.products.problem import Problem, LocalProducts, product_grid
from bench.instruments.clock import Clock
from bench.instruments.sampling import Sample, compare_in_turns, repeat_calls, time_side
from bench.instruments.timing import Limits
from mm3d import launcher


@dataclass(frozen=True)
class Side:
    """A step that takes turns with others.

    Attributes
    ----------
    gemm : callable or None
        The function that computes its matrix products; None for its own.
    """

    name: str
    step: Callable[[], object]
    gemm: Callable | None = None


@dataclass(frozen=True)
class ProductComparison:
    """The 3-D product beside ScaLAPACK's, at one size.

    Attributes
    ----------
    shape : tuple of int
        M, N, K.
    ranks, cores : int
        Ranks of the job and cores of the machine.
    subjects : list of str
        Names of the steps that took turns: the 3-D product by each of `transports`, ScaLAPACK's
        in blocks of each of `blocks`, and local products alone.
    transports : list of str
        Transports of the 3-D product.
    blocks : list of int
        Rows and columns of ScaLAPACK's blocks.
    seconds : ndarray
        Makespans of a call, (repetitions, subjects).
    library : str
        The file of the BLAS that both sides multiply with.
    loaded : dict of str to str
        Every BLAS that is loaded, by the name of its file.
    """

    shape: tuple[int, int, int]
    dtype: str
    ranks: int
    cores: int
    calls: int
    subjects: list[str]
    transports: list[str]
    blocks: list[int]
    seconds: np.ndarray
    library: str
    loaded: dict[str, str]

    def speed_ups(self) -> list[np.ndarray]:
        """Divide ScaLAPACK's seconds by those of the 3-D product with each of its transports.

        Each ratio is (repetitions, block sizes).
        """
        ours = len(self.transports)
        theirs = self.seconds[:, ours:ours + len(self.blocks)]
        return [theirs / self.seconds[:, [k]] for k in range(ours)]


class ScalapackProducts:
    """The products of both sides at one size, on the same ranks.

    Parameters
    ----------
    library : ctypes.CDLL
        ScaLAPACK; see `load_libraries`.
    gemm : fortran_blas.FortranGemm
        The function that both sides multiply with.
    comm : mpi4py.MPI.Intracomm
        All ranks of the job.
    shape : tuple of int
        M, N, K.
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
                self.ours.setdefault(operands.transport_names(problem.grid), problem)
        self.theirs = [Pgemm(library, comm, shape, self.dtype, block, seed) for block in blocks]

    def free(self) -> None:
        """Free all grids."""
        for pgemm in self.theirs:
            pgemm.free()
        for problem in self.ours.values():
            problem.grid.free()

    def find_wrong_result(self) -> str | None:
        """Compute every product once; describe the first wrong result, None if all are right."""
        for problem in self.ours.values():
            with fortran_blas.use_gemm(problem.grid.backend, self.gemm):
                result = problem.forward()
            wrong = freivalds.failure_message(check_results(problem, result, self.seed))
            if wrong:
                return wrong
        for pgemm in self.theirs:
            pgemm()
            worst = pgemm.error(self.seed)
            if not worst <= freivalds.MULTIPLE * np.finfo(self.dtype).eps:
                return f"ScaLAPACK in blocks of {pgemm.block} is off by {worst:.2g} |A||B|"
        return None

    def subjects(self) -> list[Side]:
        """List all subjects: 3-D by transport, ScaLAPACK by block size, local products by BLAS."""
        first = next(iter(self.ours.values()))
        local = LocalProducts(first.forward, first.grid, first.dtype)
        grid = first.grid.shape
        return [*(Side(f"3d on {grid}, transport {name}", problem.forward, self.gemm)
                  for name, problem in self.ours.items()),
                *(Side(f"ScaLAPACK on {pgemm.grid[0]} x {pgemm.grid[1]}, blocks of "
                       f"{pgemm.block}", pgemm) for pgemm in self.theirs),
                Side(f"local products of 3d alone, by {self.gemm.file}",
                     lambda: [self.gemm(*call) for call in local.calls]),
                Side("the same, by NumPy's own BLAS", local)]


def load_libraries(comm, dtype: str, load: Callable[[], ctypes.CDLL] = load_scalapack
                   ) -> tuple[ctypes.CDLL, fortran_blas.FortranGemm]:
    """Load ScaLAPACK by `load`, and the function of its BLAS for `dtype`, on every rank.

    Raises
    ------
    UsageError
        On all ranks, when one has no ScaLAPACK, or its BLAS cannot be called.
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
                     limits: Limits) -> ProductComparison | None:
    """Verify and measure all products in turns, until the limits are reached.

    Parameters
    ----------
    products : ScalapackProducts
        The products of both sides; every rank of the job calls this.

    Returns
    -------
    ProductComparison or None
        The record on rank 0, None on the others.

    Raises
    ------
    WrongResult
        On all ranks, when a product is wrong.
    """
    wrong = products.find_wrong_result()
    if wrong:
        raise WrongResult(wrong)
    comm, subjects = products.comm, products.subjects()
    seconds = _measure_seconds(products, subjects, calls, limits)
    if comm.rank > 0:
        return None
    return ProductComparison(
        products.shape, products.dtype, comm.size, launcher.cores(), calls,
        [subject.name for subject in subjects], list(products.ours),
        [pgemm.block for pgemm in products.theirs], seconds, products.gemm.file,
        fortran_blas.describe_loaded())


def _measure_seconds(products: ScalapackProducts, subjects: list[Side], calls: int,
                     limits: Limits) -> np.ndarray:
    """Measure makespans of a call, (repetitions, subjects)."""
    comm, backend = products.comm, next(iter(products.ours.values())).grid.backend
    clock, names = Clock(comm), [subject.name for subject in subjects]

    def sample(subject: Side) -> Sample:
        own = subject.gemm
        with fortran_blas.use_gemm(backend, own) if own else contextlib.nullcontext():
            found = time_side(repeat_calls(subject.step, calls), comm, lambda: None, clock)
        return Sample(found.times / calls)

    ours, theirs = names[:len(products.ours)], names[len(products.ours):][:len(products.theirs)]
    found, _ = compare_in_turns(
        {subject.name: partial(sample, subject) for subject in subjects}, limits, products.seed,
        comm, warmup=0, ratios=[(other, own) for own in ours for other in theirs])
    return np.array([[one.seconds for one in found[name]] for name in names]).T
