"""Measure the 3-D product beside ScaLAPACK's PSGEMM and PDGEMM, in one run.

ScaLAPACK is called through ctypes, on the same ranks, with its matrices divided
block-cyclically over its own grid.  It moves them by MPI; the 3-D product is measured by MPI, too,
and in shared memory.  Both sides multiply locally with one function, from the BLAS that ScaLAPACK
calls.  All are verified.  Every repetition measures all of them in random order; figures are
medians of ratios within repetitions.
"""

import contextlib
import ctypes
import math
import os
import re
from ctypes.util import find_library
from functools import partial
from pathlib import Path
from typing import Callable, Iterator, Sequence

import numpy as np
from threadpoolctl import threadpool_info

from bench.agreement import make_on_each_rank
from bench.checks import freivalds
from bench.checks.passed import require_passed
from bench.errors import UsageError, as_usage_error
from bench.experiments.products.matmul import check_results
from bench.experiments.products.problem import LocalProducts, Problem, product_grid
from bench.instruments.clock import Clock
from bench.instruments.sampling import Sample, compare_in_turns, repeat_calls, time_side
from bench.instruments.timing import Limits
from bench.records.model_run import transport_names
from bench.records.measurements import Check

ROUTINES = {"float32": ("sgemm_", ctypes.c_float), "float64": ("dgemm_", ctypes.c_double)}
INSTALL = ("ScaLAPACK is not here: apt-get install libscalapack-mpich2.2 libopenblas0-pthread, "
           "or libscalapack-openmpi2.2 where mpi4py uses Open MPI")


def load_scalapack(find: Callable[[str], str | None] = find_library) -> ctypes.CDLL:
    """Load ScaLAPACK, which `find` finds, bound to the MPI library that mpi4py has loaded.

    Raises UsageError when none that fits the MPI library in use is installed.
    """
    loaded = re.findall(r"/\S*/libmpi\S*\.so\S*",
                        os.fsdecode(Path("/proc/self/maps").read_bytes()))
    if not loaded:
        raise UsageError(f"the MPI library in use was not found; {INSTALL}")
    # A globally loaded library takes precedence over ScaLAPACK's own MPI library.
    mpi = ctypes.CDLL(loaded[0], ctypes.RTLD_GLOBAL)
    text = ctypes.create_string_buffer(8192)
    mpi.MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
    kind = "openmpi" if b"Open MPI" in text.value else "mpich"
    name = find(f"scalapack-{kind}")
    if name is None:
        raise UsageError(INSTALL)
    return ctypes.CDLL(name, ctypes.RTLD_GLOBAL)


class FortranGemm:
    """Compute C = A B of "float32" or "float64" with the function that ScaLAPACK calls.

    `library` is ScaLAPACK, with symbols visible to all libraries; `file` the name of the library
    that has the function.  Raises UsageError when ScaLAPACK's calls bind to another library: the
    first loaded one with a function of that name.
    """

    def __init__(self, library: ctypes.CDLL, dtype: str) -> None:
        name, self._number = ROUTINES[dtype]
        self._call, bound = (getattr(lib, name) for lib in (library, ctypes.CDLL(None)))
        files = [library_name(function) for function in (self._call, bound)]
        if address_of(self._call) != address_of(bound):
            raise UsageError(f"{name} of ScaLAPACK's BLAS is in {files[0]}, but its calls end in "
                             f"{files[1]}, which was loaded before")
        self._call.restype = None
        self.file, self.dtype = files[0], np.dtype(dtype)

    def __call__(self, a: np.ndarray, b: np.ndarray, out: np.ndarray,
                 progress: None = None) -> np.ndarray:
        """Compute A B in `out`; rows of all three are contiguous, or columns of A and B.

        Collectives in flight make no `progress` meanwhile.
        """
        if {a.dtype, b.dtype, out.dtype} != {self.dtype} or not out.flags.c_contiguous:
            raise ValueError(f"{a.dtype} times {b.dtype} into {out.dtype}: {self.dtype} in rows "
                             f"would do")
        (m, n), k = a.shape, b.shape[1]
        (first, lda), (second, ldb) = map(_stored, (a, b))
        # Fortran sees rows as columns, so this is C^T = B^T A^T there.
        sizes = [ctypes.byref(ctypes.c_int(size)) for size in (k, m, n)]
        one, zero = (ctypes.byref(self._number(number)) for number in (1, 0))
        self._call(second, first, *sizes, one, _place(b), ldb, _place(a), lda, zero, _place(out),
                   ctypes.byref(ctypes.c_int(max(1, k))))
        return out


def _stored(a: np.ndarray) -> tuple[bytes, object]:
    """Return transposition flag and leading dimension of a matrix, which Fortran sees transposed.
    """
    rows, columns = (max(1, stride // a.itemsize) for stride in a.strides)
    if columns == 1 or a.shape[1] == 1:
        return b"N", ctypes.byref(ctypes.c_int(max(rows, a.shape[1], 1)))
    if rows == 1 or a.shape[0] == 1:
        return b"T", ctypes.byref(ctypes.c_int(max(columns, a.shape[0], 1)))
    raise ValueError(f"neither rows nor columns of a matrix with strides {a.strides} are "
                     f"contiguous")


def _place(a: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(a.ctypes.data)


def address_of(function) -> int:
    """Return the address of a function of a library."""
    return ctypes.cast(function, ctypes.c_void_p).value


def library_name(function) -> str:
    """Return the name of the library that contains a function."""
    class Info(ctypes.Structure):
        _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p),
                    ("name", ctypes.c_char_p), ("address", ctypes.c_void_p)]

    info = Info()
    found = ctypes.CDLL(None).dladdr(ctypes.c_void_p(address_of(function)), ctypes.byref(info))
    return Path(info.file.decode()).resolve().name if found else "unknown"


def describe_loaded() -> dict[str, str]:
    """Return a description of every BLAS that is loaded, by the name of its file."""
    return {Path(blas["filepath"]).name:
            f"{blas['internal_api']} {blas['version']}, {blas.get('architecture')} kernels, "
            f"{blas['num_threads']} thread{'s' * (blas['num_threads'] != 1)}"
            for blas in threadpool_info() if blas["user_api"] == "blas"}


class Pgemm:
    """C = A B by ScaLAPACK, of random matrices in square blocks over an r x c grid.

    A block has `block` rows; `shape` is M, N, K: C is M x K, the sum has N terms.
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
        name, number = ROUTINES[dtype]
        self._call = getattr(lib, f"p{name}")
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
        """Free the grid."""
        self._exit(self.context)

    def _indices(self, name: str) -> tuple[np.ndarray, ...]:
        """Return this rank's rows, and its columns."""
        return tuple(np.flatnonzero(np.arange(extent) // self.block % ranks == mine)
                     for extent, ranks, mine in zip(self.shapes[name], self.grid, self.place))

    def _descriptor(self, lib: ctypes.CDLL, name: str) -> ctypes.Array:
        found, info = (ctypes.c_int * 9)(), ctypes.c_int()
        height = max(1, self.blocks[name].shape[0])
        numbers = [*self.shapes[name], self.block, self.block, 0, 0, self.context.value, height]
        lib.descinit_(found, *(ctypes.byref(ctypes.c_int(n)) for n in numbers),
                      ctypes.byref(info))
        if info.value:
            raise RuntimeError(f"descinit refuses argument {-info.value} of {name}: {numbers}")
        return found

    def check(self, seed: int) -> list[Check]:
        """Check C as `bench.checks.freivalds.check_product`; every rank calls it."""
        A, B, C = (freivalds.DistributedMatrix(
            block, self._indices(name), self.shapes[name], self.comm)
            for name, block in self.blocks.items())
        return freivalds.check_product(f"C of ScaLAPACK in blocks of {self.block}", A, B, C, seed,
                                       str(C.block.dtype))


class ScalapackProducts:
    """The products of both sides at one size, on the same ranks.

    `library` and `gemm` are those of `load_libraries`; `grid` has the sizes of the directions of
    the 3-D product, None for a cube; each of `blocks`, rows and columns of ScaLAPACK's blocks, is
    a subject of its own.  Raises UsageError when the ranks do not fit the grid.
    """

    def __init__(self, library: ctypes.CDLL, gemm: FortranGemm, comm,
                 shape: tuple[int, int, int], grid: tuple[int, ...] | None,
                 blocks: Sequence[int], seed: int) -> None:
        self.gemm, self.comm, self.shape, self.seed = gemm, comm, shape, seed
        self.dtype = str(gemm.dtype)
        self.ours: dict[str, Problem] = {}
        with as_usage_error():
            for transport in ("", "mpi"):    # the default, and ScaLAPACK's
                with _use_transport(transport):
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
                   ) -> tuple[ctypes.CDLL, FortranGemm]:
    """Load ScaLAPACK by `load`, and the function of its BLAS for `dtype`, on every rank.

    Raises UsageError on all ranks, when one has no ScaLAPACK, or its BLAS cannot be called.
    """
    lib = make_on_each_rank(load, comm)
    return lib, make_on_each_rank(lambda: FortranGemm(lib, dtype), comm)


@contextlib.contextmanager
def _use_transport(transport: str) -> Iterator[None]:
    """Let new grids use a transport within the block."""
    before = dict(os.environ)
    if transport:
        os.environ["MM3D_TRANSPORT"] = transport
    try:
        yield
    finally:
        os.environ.pop("MM3D_TRANSPORT", None)
        os.environ.update(before)


def compare_products(products: ScalapackProducts, calls: int,
                     limits: Limits) -> dict[str, np.ndarray]:
    """Verify and measure all products in turns, until the limits are reached, on every rank.

    Returns makespans of a call by repetition, of each of `ScalapackProducts.subjects`.  Raises
    WrongResult on all ranks, when a product is wrong.
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
