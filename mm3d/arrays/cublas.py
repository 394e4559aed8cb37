"""Multiply matrices by cuBLAS, called in a way that a CUDA graph can record.

CuPy's wrappers of cuBLAS raise NotImplementedError while a stream is captured, since they set the
stream before each call (cupy/cupy#6290), which resets the workspace.  Here cuBLAS is called
through ctypes, with a handle of its own, whose stream and workspace are set once, so that a
product neither waits nor allocates.  The factors alpha and beta are in host memory; a graph
records their values (cuBLAS, section "CUDA Graphs Support").
"""

import ctypes
from typing import Any

import numpy as np

Array = Any

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
    "cublasGemmStridedBatchedEx": (
        _void, _int, _int, _int, _int, _int, _void, _void, _int, _int, _long, _void, _int, _int,
        _long, _void, _void, _int, _int, _long, _int, _int, _int)}


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
        self._call("cublasSetMathMode", SUM_WIDE)
        self._call("cublasSetStream_v2", backend.stream.ptr)
        size = HOPPER_WORKSPACE_BYTES if capability >= HOPPER_CAPABILITY else WORKSPACE_BYTES
        self.workspace = backend.empty((size,), np.uint8)    # alive as long as the handle
        self._call("cublasSetWorkspace_v2", backend.pointer(self.workspace), size)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(self.handle, *arguments)
        if status:
            raise RuntimeError(f"{name}: {self._status(status).decode()} (status {status})")

    def gemms(self, a: Array, b: Array, out: Array, add: bool = False) -> None:
        """Compute C = A B, or C += A B, for each matrix along the first dimension.

        Parameters
        ----------
        a, b : Array
            (count, m, k) and (count, k, n) of one type, rows or columns contiguous; others are
            copied.
        out : Array
            (count, m, n) with contiguous rows, of the type of `a`, or of float32 if that has 16
            bits.
        add : bool
            Whether to add the products to the contents of `out`.

        Raises
        ------
        ValueError
            When the rows of `out` are not contiguous, or a size exceeds 32 bits.
        """
        (count, m, k), n = a.shape, b.shape[2]
        if out.strides[2] != out.itemsize and n > 1:
            raise ValueError("the rows of a product must be contiguous")
        # cuBLAS stores matrices by columns, so it computes C^T = B^T A^T.
        factors, transposed = [], []
        for factor in (b, a):
            factor, transpose, stride = self._by_columns(factor)
            transposed.append(transpose)
            factors += [self.backend.pointer(factor), CUDA_DATA_TYPES[str(factor.dtype)], stride,
                        factor.strides[0] // factor.itemsize]
        row = max(n, out.strides[1] // out.itemsize)
        if max(count, m, n, k, row, factors[2], factors[6]) > MAX_SIZE:
            raise ValueError(f"{count} products of {m} x {k} by {k} x {n}: cuBLAS takes sizes and "
                             f"strides up to {MAX_SIZE}")
        sums = np.float64 if a.dtype == np.float64 else np.float32
        alpha, beta = np.ones((), sums), np.full((), add, sums)
        self._call("cublasGemmStridedBatchedEx", *transposed, n, m, k, alpha.ctypes.data, *factors,
                   beta.ctypes.data, self.backend.pointer(out), CUDA_DATA_TYPES[str(out.dtype)],
                   row, out.strides[0] // out.itemsize, count, self._compute_type(a.dtype),
                   self.binding.CUBLAS_GEMM_DEFAULT)

    def _by_columns(self, a: Array) -> tuple[Array, int, int]:
        """Return matrices as cuBLAS takes them, copied if neither rows nor columns are contiguous.

        With them 1 if their columns are contiguous, so that they are read transposed, else 0, and
        their leading dimension: the stride between rows or columns, in elements.
        """
        size, (_, rows, columns) = a.itemsize, a.strides
        if a.shape[2] == 1 or columns == size and rows >= a.shape[2] * size:
            return a, 0, max(a.shape[2], rows // size)
        if a.shape[1] == 1 or rows == size and columns >= a.shape[1] * size:
            return a, 1, max(a.shape[1], columns // size)
        return self.backend.contiguous(a), 0, a.shape[2]

    def _compute_type(self, dtype: Any) -> int:
        """Return cuBLAS' code for the type in which products of factors of `dtype` are summed."""
        if dtype == np.float64:
            return self.binding.CUBLAS_COMPUTE_64F
        if dtype == np.float32 and self.backend.tf32:
            return self.binding.CUBLAS_COMPUTE_32F_FAST_TF32
        return self.binding.CUBLAS_COMPUTE_32F
