"""Call the matrix products of ScaLAPACK's BLAS, so that both sides multiply with it."""

import ctypes
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_info

from bench.errors import UsageError

ROUTINES = {"float32": ("sgemm_", ctypes.c_float), "float64": ("dgemm_", ctypes.c_double)}


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
