"""Multiply matrices by cuBLAS, called in a way that a CUDA graph can record.

CuPy's wrappers of cuBLAS raise NotImplementedError while a stream is captured, since they set the
stream before each call (cupy/cupy#6290), which resets the workspace.  Here cuBLAS is called
through ctypes, with a handle of its own, whose stream and workspace are set once, so that a
product neither waits nor allocates.  The factors alpha and beta are in host memory; a graph
records their values (cuBLAS, section "CUDA Graphs Support").  All that depends on types alone is
found once: small products take less time than the host's work for a call.
"""

import ctypes
from typing import Any

import numpy as np

from mm3d.arrays.backend import DTYPES, Array

# Workspaces that NVIDIA recommends (cublasSetWorkspace), from Hopper on and before.
HOPPER_WORKSPACE_BYTES, WORKSPACE_BYTES = 32 << 20, 4 << 20
HOPPER_CAPABILITY = 90    # compute capability of the first Hopper GPU
# CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: cuBLAS rounds no part of a sum that it divides
# to the 16 bits of the result.
SUM_WIDE = 16
MAX_SIZE = 2 ** 31 - 1    # of a dimension or a stride: cuBLAS takes 32-bit integers

CUDA_DATA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}    # cudaDataType

_int, _long, _void = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p
ARGUMENT_TYPES = {
    "cublasGetStatusString": (_int,),
    "cublasSetMathMode": (_void, _int),
    "cublasSetStream_v2": (_void, _void),
    "cublasSetWorkspace_v2": (_void, _void, ctypes.c_size_t),
    # Without declarations ctypes passes integers as int in half the time; others have a type.
    "cublasGemmStridedBatchedEx": None}


class Cublas:
    """Call cuBLAS on the stream of a backend.

    Parameters
    ----------
    backend : CupyBackend
        The backend of the arrays that are multiplied; products run on its `stream`.
    binding : module
        CuPy's binding, ``cupy_backends.cuda.libs.cublas``.  The functions called are those of the
        library that it is linked to.
    capability : int
        The GPU's compute capability, such as 90.

    Raises
    ------
    ValueError
        When that library lacks a function.
    RuntimeError
        When cuBLAS refuses the stream, the workspace or the mode.
    """

    def __init__(self, backend: Any, binding: Any, capability: int) -> None:
        self.backend, self.binding = backend, binding
        library = ctypes.CDLL(binding.__file__)
        try:
            for name, arguments in ARGUMENT_TYPES.items():
                getattr(library, name).argtypes = arguments
        except AttributeError as error:
            raise ValueError(f"the cuBLAS that CuPy uses has no {name}: pip install -U "
                             "'cupy-cuda13x[ctk]', or cupy-cuda12x") from error
        self._status = library.cublasGetStatusString
        self._status.restype = ctypes.c_char_p
        self.library, self.handle = library, binding.create()
        self._handle = _void(self.handle)
        self._call("cublasSetMathMode", SUM_WIDE)
        self._call("cublasSetStream_v2", backend.stream.ptr)
        size = HOPPER_WORKSPACE_BYTES if capability >= HOPPER_CAPABILITY else WORKSPACE_BYTES
        self.workspace = backend.empty((size,), np.uint8)    # alive as long as the handle
        self._call("cublasSetWorkspace_v2", backend.pointer(self.workspace), size)
        self._zero_one = [np.arange(2, dtype=name) for name in ("float32", "float64")]
        self._types = {dtype: self._describe_type(dtype)
                       for dtype in (*map(np.dtype, DTYPES), *backend.more_dtypes)}

    def _describe_type(self, dtype: np.dtype) -> tuple[int, int, _void, _void]:
        """Return cuBLAS' codes for a type and the type of its sums, and where these are 0 and 1.
        """
        wide = dtype == np.float64
        sums = self.binding.CUBLAS_COMPUTE_64F if wide else self.binding.CUBLAS_COMPUTE_32F
        place = self._zero_one[wide]
        zero, one = (_void(place.ctypes.data + n * place.itemsize) for n in range(2))
        return CUDA_DATA_TYPES[str(dtype)], sums, zero, one

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(self._handle, *arguments)
        if status:
            raise RuntimeError(f"{name}: {self._status(status).decode()} (status {status})")

    def gemms(self, a: Array, b: Array, out: Array, add: bool = False) -> None:
        """Compute C = A B, or C += A B, of one matrix each or for each along a first dimension.

        Parameters
        ----------
        a, b : Array
            ([count,] m, k) and ([count,] k, n) of one type, rows or columns contiguous; others
            are copied.
        out : Array
            ([count,] m, n) with contiguous rows, of the type of `a`, or of float32 if that has 16
            bits.
        add : bool
            Whether to add the products to the contents of `out`.

        Raises
        ------
        ValueError
            When the rows of `out` are not contiguous, or a size exceeds 32 bits.
        """
        (*several, m, n), strides, size, k = out.shape, out.strides, out.itemsize, a.shape[-1]
        if strides[-1] != size and n > 1:
            raise ValueError("the rows of a product must be contiguous")
        count, row = several[0] if several else 1, max(n, strides[-2] // size)
        # cuBLAS stores matrices by columns, so it computes C^T = B^T A^T.
        b, b_transposed, b_row, b_next = self._by_columns(b)
        a, a_transposed, a_row, a_next = self._by_columns(a)
        if max(count, m, n, k, row, a_row, b_row) > MAX_SIZE:
            raise ValueError(f"{count} products of {m} x {k} by {k} x {n}: cuBLAS takes sizes and "
                             f"strides up to {MAX_SIZE}")
        types, point = self._types, self.backend.pointer
        kind, sums, zero, one = types[a.dtype]
        if self.backend.tf32 and a.dtype == np.float32:
            sums = self.binding.CUBLAS_COMPUTE_32F_FAST_TF32
        self._call("cublasGemmStridedBatchedEx", b_transposed, a_transposed, n, m, k, one,
                   _void(point(b)), types[b.dtype][0], b_row, _long(b_next),
                   _void(point(a)), kind, a_row, _long(a_next), one if add else zero,
                   _void(point(out)), types[out.dtype][0], row, _long(strides[0] // size), count,
                   sums, self.binding.CUBLAS_GEMM_DEFAULT)

    def _by_columns(self, a: Array) -> tuple[Array, int, int, int]:
        """Return matrices as cuBLAS takes them, copied if neither rows nor columns are contiguous.

        With them 1 if their columns are contiguous, so that they are read transposed, else 0; and
        in elements their leading dimension, the stride between rows or columns, and the stride
        between matrices, which is not read if there is one alone.
        """
        size, (rows, columns), strides = a.itemsize, a.shape[-2:], a.strides
        (row, column), following = strides[-2:], strides[0] // size
        if columns == 1 or column == size and row >= columns * size:
            return a, 0, max(columns, row // size), following
        if rows == 1 or row == size and column >= rows * size:
            return a, 1, max(rows, column // size), following
        return self.backend.contiguous(a), 0, columns, rows * columns
