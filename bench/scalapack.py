"""The verb ``scalapack``: the 3-D product beside ScaLAPACK's PSGEMM and PDGEMM, in one run.

ScaLAPACK is called where it lies, through ctypes, on the same ranks, with its matrices dealt
block-cyclically over its own grid.  It moves them by MPI; the 3-D product is measured by MPI, too,
and in shared memory.  Local products of all of them are made by one function, that of the BLAS
which ScaLAPACK calls (`bench.blas`).  All are verified.  In every repetition all are measured in
random order, and the figures are medians of the ratios within repetitions.
"""

import contextlib
import ctypes
import math
import os
import re
from ctypes.util import find_library
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import numpy as np

from bench import blas, operands, residual
from bench.cases import UsageError
from bench.formats import Column, Notes, Part, Rows, Table, render
from bench.job import everywhere
from bench.matmul import verified
from bench.products import Problem, Replay
from bench.sampling import failed, limits_of, several
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


class Subject(NamedTuple):
    """One of the things that take turns: its name, what does it once, and the function that
    makes its matrix products where that is not its own choice."""

    name: str
    step: Callable[[], object]
    gemm: Callable | None = None


def scalapack(arguments, comm) -> int:
    """Measure and print every shape; 0 when all were right.

    Raises
    ------
    UsageError
        When there is no ScaLAPACK, its BLAS cannot be called, or an argument cannot be meant.
    """
    limits = limits_of(arguments)
    lib, status = everywhere(library, comm), 0
    gemm = everywhere(lambda: blas.Gemm(lib, arguments.dtype), comm)
    for shape in arguments.shape:
        problems = {}
        try:
            for transport in ("", "mpi"):    # as usual, and as ScaLAPACK
                with through(transport):
                    problem = Problem("3d", "ab", comm, arguments.grid, shape, arguments.dtype,
                                      arguments.seed, "numpy")
                problems.setdefault(operands.transport(problem.grid), problem)
        except ValueError as error:
            raise UsageError(str(error)) from error
        rivals = [Pgemm(lib, comm, shape, arguments.dtype, block, arguments.seed)
                  for block in arguments.block]
        status = max(status, _one(problems, rivals, gemm, shape, arguments, limits))
        for rival in rivals:
            rival.free()
        for problem in problems.values():
            problem.grid.free()
    return status


@contextlib.contextmanager
def through(transport: str) -> Iterator[None]:
    """Let grids that are made meanwhile use a transport; as usual if it is ""."""
    before = os.environ.get("MM3D_TRANSPORT")
    if transport:
        os.environ["MM3D_TRANSPORT"] = transport
    try:
        yield
    finally:
        if transport:
            del os.environ["MM3D_TRANSPORT"]
            os.environ |= {"MM3D_TRANSPORT": before} if before is not None else {}


def _one(problems: dict[str, Problem], rivals: list[Pgemm], gemm: blas.Gemm,
         shape: tuple[int, int, int], arguments, limits: timing.Limits) -> int:
    """Verify, measure and print one shape; 0 unless something is wrong."""
    grid = next(iter(problems.values())).grid
    comm, clock = grid.comm, timing.Clock(grid.comm)
    wrong = _wrong(problems, rivals, gemm, arguments)
    if wrong:
        return failed(f"{shape} {arguments.dtype}", wrong, comm)
    subjects = _subjects(problems, rivals, gemm)
    order, kept = np.random.default_rng(arguments.seed), []
    for _ in timing.Repetitions(limits, comm, lambda: [
            median_interval(line) for ratios in ahead(np.array(kept), len(problems), len(rivals))
            for line in ratios.T]):
        seconds = np.empty(len(subjects))
        for kind in order.permutation(len(subjects)):
            step, own = subjects[kind].step, subjects[kind].gemm
            with blas.multiplying(grid.backend, own) if own else contextlib.nullcontext():
                timing.wait_patiently(comm)
                times, _ = timing.spans(several(step, arguments.calls), comm, lambda: None, clock)
            seconds[kind] = times.max() / arguments.calls
        kept.append(seconds)
    if comm.rank == 0:
        print(render(_parts(problems, rivals, gemm, subjects, shape, arguments, np.array(kept))),
              "", sep="\n", flush=True)
    return 0


def _wrong(problems: dict[str, Problem], rivals: list[Pgemm], gemm: blas.Gemm,
           arguments) -> str | None:
    """What is wrong of the first results; nothing when all are right."""
    for problem in problems.values():
        with blas.multiplying(problem.grid.backend, gemm):
            result = problem.forward()
        wrong = residual.failure(verified(problem, result, arguments.seed))
        if wrong:
            return wrong
    for rival in rivals:
        rival()
        worst = rival.error(arguments.seed)
        if not worst <= residual.MULTIPLE * np.finfo(arguments.dtype).eps:
            return f"ScaLAPACK in blocks of {rival.block} is off by {worst:.2g} |A||B|"
    return None


def _subjects(problems: dict[str, Problem], rivals: list[Pgemm],
              gemm: blas.Gemm) -> list[Subject]:
    """The 3-D product by each transport, ScaLAPACK's in blocks of several sizes, and the local
    products of the first alone, by the BLAS of all these and by NumPy's own."""
    first = next(iter(problems.values()))
    local = Replay(first.forward, first.grid.backend, first.dtype)
    grid = " x ".join(map(str, first.grid.shape.values()))
    return [*(Subject(f"3d on {grid}, transport {name}", problem.forward, gemm)
              for name, problem in problems.items()),
            *(Subject(f"ScaLAPACK on {rival.grid[0]} x {rival.grid[1]}, blocks of {rival.block}",
                      rival) for rival in rivals),
            Subject(f"local products of 3d alone, by {gemm.file}",
                    lambda: [gemm(*call) for call in local.calls]),
            Subject("the same, by NumPy's own BLAS", local)]


def ahead(seconds: np.ndarray, ours: int, rivals: int) -> list[np.ndarray]:
    """ScaLAPACK's seconds over those of the 3-D product by each of its transports, (repetitions,
    block sizes), from those of (repetitions, subjects)."""
    return [seconds[:, ours:ours + rivals] / seconds[:, [k]] for k in range(ours)]


def _parts(problems: dict[str, Problem], rivals: list[Pgemm], gemm: blas.Gemm,
           subjects: list[Subject], shape: tuple[int, int, int], arguments,
           seconds: np.ndarray) -> list[Part]:
    """What was measured, for people."""
    times, ours = np.median(seconds, axis=0), len(problems)
    rows: Rows = []
    for k, (subject, time) in enumerate(zip(subjects, times)):
        cells = [subject.name, f"{1e3 * time:#.4g}", f"{2e-9 * math.prod(shape) / time:.1f}"]
        for ratios in ahead(seconds, ours, len(rivals)):
            median, low, high, _ = (median_interval(ratios[:, k - ours])
                                    if 0 <= k - ours < len(rivals) else (None,) * 4)
            cells += ["", ""] if median is None else [f"{median:.2f}", f"{low:.2f} - {high:.2f}"]
        rows.append(cells)
    columns = [Column("", "C = A B"), Column("time", "(ms)"), Column("rate", "(GFLOP/s)"),
               *(Column(which, "", f"3d, {name}, is ahead") for name in problems
                 for which in ("median", "95 %"))]
    size = problems[next(iter(problems))].grid.size
    title = (f"{' x '.join(map(str, shape))} {arguments.dtype}, {size} ranks on "
             f"{environment.cores()} cores")
    return [Table(title, columns, rows), Notes("About these figures:", [
        f"{len(seconds)} repetitions of {arguments.calls} calls each, in random order; times are "
        f"makespans a call, rates of all ranks.",
        f"The 3-D product and ScaLAPACK multiply by one function, of {gemm.file}. ScaLAPACK moves "
        f"by MPI.", "Loaded: " + "; ".join(f"{file}: {what}" for file, what in
                                           blas.loaded().items()) + "."])]
