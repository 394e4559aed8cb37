"""Multiply matrices on one rank's arrays: C = A B, A B^T and A^T B."""

import math
from typing import Any, Callable

from mm3d.arrays.backend import Array, Progress, accumulation_dtype, backend_of, reshape


def matmul(a: Array, b: Array, empty: Callable[..., Array] | None = None,
           progress: Progress = None) -> Array:
    """Compute C = A B of A, (..., k), and B, (k, ...), of one dtype.

    C has the leading dimensions of A, then the trailing ones of B.  `empty` allocates it from its
    shape and dtype, by default the backend does; `progress` is as in `Backend.gemm`.
    """
    k, rows, outer = b.shape[0], a.shape[:-1], b.shape[1:]
    return _multiply(reshape(a, (math.prod(rows), k)), reshape(b, (k, math.prod(outer))),
                     rows + outer, a.dtype, empty, progress)


def matmul_nt(a: Array, b: Array, empty: Callable[..., Array] | None = None,
              progress: Progress = None) -> Array:
    """Compute C = A B^T of A, (..., k), and B, (n, k).

    k stands for all dimensions of B but the first.  Other parameters as in `matmul`.
    """
    n, inner = b.shape[0], b.shape[1:]
    rows = a.shape[:len(a.shape) - len(inner)]
    k = math.prod(inner)
    return _multiply(reshape(a, (math.prod(rows), k)), reshape(b, (n, k)).T, rows + (n,),
                     a.dtype, empty, progress)


def matmul_tn(a: Array, b: Array, empty: Callable[..., Array] | None = None,
              accumulate_float32: bool = False, progress: Progress = None) -> Array:
    """Compute C = A^T B of A, (k, n), and B, (k, ...).

    k stands for all dimensions of A but the last.  With `accumulate_float32` C has the
    `accumulation_dtype` of A.  Other parameters as in `matmul`.
    """
    n, k = a.shape[-1], math.prod(a.shape[:-1])
    outer = b.shape[len(a.shape) - 1:]
    return _multiply(reshape(a, (k, n)).T, reshape(b, (k, math.prod(outer))), (n,) + outer,
                     accumulation_dtype(a) if accumulate_float32 else a.dtype, empty, progress)


def _multiply(a: Array, b: Array, shape: tuple[int, ...], dtype: Any,
              empty: Callable[..., Array] | None, progress: Progress) -> Array:
    """Multiply two matrices into a new array of `shape`."""
    backend = backend_of(a)
    c = (empty or backend.empty)(shape, dtype)
    backend.gemm(a, b, reshape(c, (a.shape[0], b.shape[1])), progress)
    return c
