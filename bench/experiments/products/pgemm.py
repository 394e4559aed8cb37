"""Call ScaLAPACK's matrix products through ctypes."""

import ctypes
import math
import os
import re
from ctypes.util import find_library
from pathlib import Path
from typing import Callable

import numpy as np

from bench.checks import freivalds
from bench.errors import UsageError
from bench.experiments.products.fortran_blas import ROUTINES
from bench.records.measurements import Check

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


class Pgemm:
    """C = A B by ScaLAPACK, of random matrices divided in square blocks over an r x c grid.

    Parameters
    ----------
    shape : tuple of int
        M, N, K: C is M x K, the sum has N terms.
    dtype : str
        "float32" or "float64".
    block : int
        Rows and columns of a block.
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
