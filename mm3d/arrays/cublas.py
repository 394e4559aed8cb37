"""Products by cuBLAS, called in a way that a CUDA graph can record.

CuPy's wrappers of cuBLAS raise NotImplementedError while a stream is captured, since they set the
stream before each call (cupy/cupy#6290), and setting the stream takes the workspace away.  Here
cuBLAS is called through ctypes, with a handle of its own: its stream and its workspace are set
once, so that a product neither waits nor allocates.  Factors alpha and beta lie in host memory;
a graph records their values (cuBLAS, section "CUDA Graphs Support").
"""

import ctypes
from typing import Any

import numpy as np

Array = Any

# Bytes of workspace that NVIDIA recommends (cublasSetWorkspace): from Hopper on, and before.
WORKSPACE, EARLIER = 32 << 20, 4 << 20
HOPPER = 90
LARGEST = 2 ** 31 - 1    # of a size or a step

# cudaDataType
KINDS = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}

_int, _long, _void = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p
FUNCTIONS = {
    "cublasGetStatusString": (_int,),
    "cublasSetStream_v2": (_void, _void),
    "cublasSetWorkspace_v2": (_void, _void, ctypes.c_size_t),
    "cublasGemmStridedBatchedEx": (
        _void, _int, _int, _int, _int, _int, _void, _void, _int, _int, _long, _void, _int, _int,
        _long, _void, _void, _int, _int, _long, _int, _int, _int)}


class Cublas:
    """cuBLAS on the stream of a backend.

    Parameters
    ----------
    backend : CupyBackend
        Whose arrays are multiplied; its stream is the one that computes.
    binding : module
        CuPy's binding, ``cupy_backends.cuda.libs.cublas``.  The functions are those of the very
        library that it is linked to, wherever that was found.
    capability : int
        The GPU's compute capability, such as 90.

    Raises
    ------
    ValueError
        When that library lacks a function.
    RuntimeError
        When cuBLAS refuses the stream or the workspace.
    """

    def __init__(self, backend: Any, binding: Any, capability: int) -> None:
        self.backend, self.binding = backend, binding
        library = ctypes.CDLL(binding.__file__)
        try:
            for name, arguments in FUNCTIONS.items():
                getattr(library, name).argtypes = arguments
        except AttributeError as error:
            raise ValueError(f"the cuBLAS that CuPy uses has no {name}: pip install -U "
                             "'cupy-cuda13x[ctk]', or cupy-cuda12x") from error
        self._status = library.cublasGetStatusString
        self._status.restype = ctypes.c_char_p
        self.library, self.handle = library, binding.create()
        self._call("cublasSetStream_v2", backend.stream.ptr)
        size = WORKSPACE if capability >= HOPPER else EARLIER
        self.workspace = backend.empty((size,), np.uint8)    # alive as long as the handle
        self._call("cublasSetWorkspace_v2", backend.pointer(self.workspace), size)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(self.handle, *arguments)
        if status:
            raise RuntimeError(f"{name}: {self._status(status).decode()} (status {status})")

    def gemms(self, a: Array, b: Array, out: Array, add: bool = False) -> None:
        """C = A B for each of the matrices along the first dimension, or C += A B.

        Parameters
        ----------
        a, b : Array
            (count, m, k) and (count, k, n) of one type, rows or columns contiguous; others are
            copied.
        out : Array
            (count, m, n) with contiguous rows, of their type or, where they have 16 bits, of
            float32.
        add : bool
            Whether the products are added to what `out` holds.

        Raises
        ------
        ValueError
            When the rows of `out` are not contiguous, or a size is beyond 32 bits.
        """
        (count, m, k), n = a.shape, b.shape[2]
        if out.strides[2] != out.itemsize and n > 1:
            raise ValueError("the rows of a product must be contiguous")
        # cuBLAS stores by columns: what it is told is C^T = B^T A^T.
        factors, turned = [], []
        for factor in (b, a):
            factor, turn, step = self._by_columns(factor)
            turned.append(turn)
            factors += [self.backend.pointer(factor), KINDS[str(factor.dtype)], step,
                        factor.strides[0] // factor.itemsize]
        row = max(n, out.strides[1] // out.itemsize)
        if max(count, m, n, k, row, factors[2], factors[6]) > LARGEST:
            raise ValueError(f"{count} products of {m} x {k} by {k} x {n}: cuBLAS takes sizes and "
                             f"steps up to {LARGEST}")
        sums = np.float64 if a.dtype == np.float64 else np.float32
        alpha, beta = np.ones((), sums), np.full((), add, sums)
        self._call("cublasGemmStridedBatchedEx", *turned, n, m, k, alpha.ctypes.data, *factors,
                   beta.ctypes.data, self.backend.pointer(out), KINDS[str(out.dtype)], row,
                   out.strides[0] // out.itemsize, count, self._sums(a.dtype),
                   self.binding.CUBLAS_GEMM_DEFAULT)

    def _by_columns(self, a: Array) -> tuple[Array, int, int]:
        """Matrices for cuBLAS: themselves or a copy, 1 if their rows are not contiguous (they
        are to be read transposed), and the step between their rows or columns."""
        size, (_, rows, columns) = a.itemsize, a.strides
        if a.shape[2] == 1 or columns == size and rows >= a.shape[2] * size:
            return a, 0, max(a.shape[2], rows // size)
        if a.shape[1] == 1 or rows == size and columns >= a.shape[1] * size:
            return a, 1, max(a.shape[1], columns // size)
        return self.backend.contiguous(a), 0, a.shape[2]

    def _sums(self, dtype: Any) -> int:
        """cuBLAS' name for how products of such factors are computed."""
        if dtype == np.float64:
            return self.binding.CUBLAS_COMPUTE_64F
        if dtype == np.float32 and self.backend.tf32:
            return self.binding.CUBLAS_COMPUTE_32F_FAST_TF32
        return self.binding.CUBLAS_COMPUTE_32F
