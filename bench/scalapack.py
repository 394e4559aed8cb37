"""The verb ``scalapack``: the 3-D product beside ScaLAPACK's PSGEMM and PDGEMM, in one run.

ScaLAPACK is called where it lies, through ctypes, on the same ranks, with its matrices dealt
block-cyclically over its own grid; both products are verified.  In every repetition all are
measured in random order, and the figures are medians of the ratios within repetitions.
"""

import ctypes
import math
import re
from ctypes.util import find_library
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_info

from bench import operands, residual
from bench.cases import UsageError
from bench.formats import Column, Notes, Part, Rows, Table, render
from bench.job import everywhere
from bench.matmul import verified
from bench.products import Problem
from bench.sampling import failed, limits_of
from mm3d import environment, timing
from mm3d.statistics import median_interval

INSTALL = ("ScaLAPACK is not here: apt-get install libscalapack-mpich2.2 libopenblas0-pthread, "
           "or libscalapack-openmpi2.2 where mpi4py uses Open MPI")


class Missing(UsageError):
    """There is no ScaLAPACK that fits the MPI library in use."""


def library() -> ctypes.CDLL:
    """ScaLAPACK, calling the MPI library that mpi4py has loaded.

    Raises
    ------
    Missing
        When it is not installed.
    """
    loaded = re.findall(r"/\S*/libmpi\S*\.so\S*", Path("/proc/self/maps").read_text())
    if not loaded:
        raise Missing(f"the MPI library in use was not found; {INSTALL}")
    # What is loaded for all comes before ScaLAPACK's own MPI library.
    mpi = ctypes.CDLL(loaded[0], ctypes.RTLD_GLOBAL)
    text = ctypes.create_string_buffer(8192)
    mpi.MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
    kind = "openmpi" if b"Open MPI" in text.value else "mpich"
    name = find_library(f"scalapack-{kind}")
    if name is None:
        raise Missing(INSTALL)
    return ctypes.CDLL(name, ctypes.RTLD_GLOBAL)


class Pgemm:
    """C = A B by ScaLAPACK, of random matrices dealt in square blocks over an r x c grid.

    Parameters
    ----------
    lib : ctypes.CDLL
        ScaLAPACK.
    comm : mpi4py.MPI.Intracomm
        All ranks of the job.
    shape : tuple of int
        M, N, K: C is M x K, the sum has N terms.
    dtype : str
        "float32" or "float64".
    block : int
        Rows and columns of a block.
    seed : int
        Of the numbers.
    """

    def __init__(self, lib: ctypes.CDLL, comm, shape: tuple[int, int, int], dtype: str,
                 block: int, seed: int) -> None:
        self.comm, self.block = comm, block
        rows = max(n for n in range(1, math.isqrt(comm.size) + 1) if comm.size % n == 0)
        self.grid = rows, comm.size // rows
        self.context = ctypes.c_int()
        lib.Cblacs_get(-1, 0, ctypes.byref(self.context))
        lib.Cblacs_gridinit(ctypes.byref(self.context), b"R", *self.grid)
        self._exit = lib.Cblacs_gridexit
        self.place = divmod(comm.rank, self.grid[1])
        M, N, K = shape
        self.shapes = {"A": (M, N), "B": (N, K), "C": (M, K)}
        # Fortran's order: the transposed arrays lie in C order.
        self.blocks = {name: np.zeros(tuple(map(len, self._indices(name)))[::-1], dtype).T
                       for name in "ABC"}
        for name in "AB":
            draw = np.random.default_rng([seed, ord(name), comm.rank])
            self.blocks[name][...] = draw.standard_normal(self.blocks[name].shape)
        number = ctypes.c_float if dtype == "float32" else ctypes.c_double
        self._call = getattr(lib, "psgemm_" if dtype == "float32" else "pdgemm_")
        self._call.restype = None
        zero, one = ctypes.byref(number(0)), ctypes.byref(number(1))
        first = ctypes.byref(ctypes.c_int(1))

        def of(name: str) -> list:
            a = self.blocks[name]
            return [a.ctypes.data_as(ctypes.c_void_p), first, first, self._descriptor(lib, name)]

        self._arguments = [b"N", b"N", *(ctypes.byref(ctypes.c_int(n)) for n in (M, K, N)), one,
                           *of("A"), *of("B"), zero, *of("C")]

    def __call__(self) -> None:
        """Compute C."""
        self._call(*self._arguments)

    def free(self) -> None:
        """Give the grid back."""
        self._exit(self.context)

    def _indices(self, name: str) -> list[np.ndarray]:
        """Which rows and which columns this rank has."""
        return [np.flatnonzero(np.arange(extent) // self.block % ranks == mine)
                for extent, ranks, mine in zip(self.shapes[name], self.grid, self.place)]

    def _descriptor(self, lib: ctypes.CDLL, name: str) -> ctypes.Array:
        found, info = (ctypes.c_int * 9)(), ctypes.c_int()
        height = max(1, self.blocks[name].shape[0])
        numbers = [*self.shapes[name], self.block, self.block, 0, 0, self.context.value, height]
        lib.descinit_(found, *(ctypes.byref(ctypes.c_int(n)) for n in numbers),
                      ctypes.byref(info))
        if info.value:
            raise RuntimeError(f"descinit refuses argument {-info.value} of {name}: {numbers}")
        return found

    def error(self, seed: int) -> float:
        """The greatest error of C times a random vector, as a multiple of |A||B|."""
        x = np.random.default_rng(seed).choice([-1.0, 1.0], self.shapes["B"][1])
        found = self._times("C", x) - self._times("A", self._times("B", x))
        bound = self._times("A", self._times("B", np.abs(x), True), True)
        return float(np.max(np.abs(found) / bound))

    def _times(self, name: str, x: np.ndarray, absolute: bool = False) -> np.ndarray:
        block, (rows, columns) = self.blocks[name].astype(np.float64), self._indices(name)
        part, out = np.zeros(self.shapes[name][0]), np.empty(self.shapes[name][0])
        part[rows] = (np.abs(block) if absolute else block) @ x[columns]
        self.comm.Allreduce(part, out)
        return out


def scalapack(arguments, comm) -> int:
    """Measure and print every shape; 0 when all were right.

    Raises
    ------
    UsageError
        When there is no ScaLAPACK, or an argument cannot be meant.
    """
    limits = limits_of(arguments)
    lib, status = everywhere(library, comm), 0
    for shape in arguments.shape:
        try:
            problem = Problem("3d", "ab", comm, arguments.grid, shape, arguments.dtype,
                              arguments.seed, "numpy")
        except ValueError as error:
            raise UsageError(str(error)) from error
        rivals = [Pgemm(lib, comm, shape, arguments.dtype, block, arguments.seed)
                  for block in arguments.block]
        status = max(status, _one(problem, rivals, shape, arguments, limits))
        for rival in rivals:
            rival.free()
        problem.grid.free()
    return status


def _one(problem: Problem, rivals: list[Pgemm], shape: tuple[int, int, int], arguments,
         limits: timing.Limits) -> int:
    """Verify, measure and print one shape; 0 unless something is wrong."""
    comm, clock = problem.grid.comm, timing.Clock(problem.grid.comm)
    steps = [problem.forward, *rivals]
    problems = residual.failure(verified(problem, problem.forward(), arguments.seed))
    for rival in rivals:
        rival()
        worst = rival.error(arguments.seed)
        if not worst <= residual.MULTIPLE * np.finfo(arguments.dtype).eps:
            problems = f"ScaLAPACK in blocks of {rival.block} is off by {worst:.2g} |A||B|"
    if problems:
        return failed(f"{shape} {arguments.dtype}", problems, comm)
    order, kept = np.random.default_rng(arguments.seed), []
    ended_by, begun = "", clock.now()
    while not ended_by:
        seconds = np.empty(len(steps))
        for kind in order.permutation(len(steps)):
            timing.wait_patiently(comm)
            times, _ = timing.spans(lambda: [steps[kind]() for _ in range(arguments.calls)][:0],
                                    comm, lambda: None, clock)
            seconds[kind] = times.max() / arguments.calls
        kept.append(seconds)
        ended_by = comm.bcast(limits.reached(len(kept), clock.now() - begun, lambda: [
            median_interval(_ratios(kept)[:, kind]) for kind in range(len(rivals))]))
    if comm.rank == 0:
        print(render(_parts(problem, rivals, shape, arguments, np.array(kept))), "", sep="\n",
              flush=True)
    return 0


def _ratios(kept: list[np.ndarray]) -> np.ndarray:
    """ScaLAPACK's seconds over the 3-D product's, (repetitions, block sizes)."""
    seconds = np.array(kept)
    return seconds[:, 1:] / seconds[:, :1]


def _parts(problem: Problem, rivals: list[Pgemm], shape: tuple[int, int, int], arguments,
           seconds: np.ndarray) -> list[Part]:
    """What was measured, for people."""
    rates = 2e-9 * math.prod(shape) / np.median(seconds, axis=0)
    names = ["3d on " + " x ".join(map(str, problem.grid.shape.values()))] + [
        f"ScaLAPACK on {rival.grid[0]} x {rival.grid[1]}, blocks of {rival.block}"
        for rival in rivals]
    ahead = [["", ""]] + [[f"{median:.2f}", f"{low:.2f} - {high:.2f}"] for median, low, high, _ in
                          map(median_interval, _ratios(list(seconds)).T)]
    rows: Rows = [[name, f"{1e3 * time:#.4g}", f"{rate:.1f}", *found] for name, time, rate, found
                  in zip(names, np.median(seconds, axis=0), rates, ahead)]
    kernels = sorted({f"{blas['internal_api']} {blas['version']}, {blas.get('architecture')} "
                      f"kernels, {blas['num_threads']} thread(s)" for blas in threadpool_info()
                      if blas["user_api"] == "blas"})
    columns = [Column("", "C = A B"), Column("time", "(ms)"), Column("rate", "(GFLOP/s)"),
               Column("3d is ahead", "(median)"), Column("3d is ahead", "95 %")]
    title = (f"{' x '.join(map(str, shape))} {arguments.dtype}, {problem.grid.size} ranks on "
             f"{environment.cores()} cores, transport {operands.transport(problem.grid)}")
    return [Table(title, columns, rows), Notes("About these figures:", [
        f"{len(seconds)} repetitions of {arguments.calls} calls each, in random order; times are "
        f"makespans a call", " and ".join(kernels)])]
