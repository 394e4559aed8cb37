"""Multiply matrices on one rank's arrays: C = A B, A B^T and A^T B."""

import math
from typing import Callable

from mm3d.arrays.backend import Array, Progress, accumulation_dtype, backend_of


def matmul(a: Array, b: Array, empty: Callable[..., Array] | None = None,
           progress: Progress = None) -> Array:
    """Compute C = A B; the last dimension of A is summed with the first of B.

    Parameters
    ----------
    a, b : Array
        (..., k) and (k, ...), of one dtype.
    empty : callable, optional
        Allocates C from its shape and dtype; by default the backend does.
    progress : callable, optional
        See `Backend.gemm`.

    Returns
    -------
    Array
        The leading dimensions of A, then the trailing ones of B.
    """
    k = b.shape[0]
    return _gemm((math.prod(a.shape[:-1]), k), a, (k, math.prod(b.shape[1:])), b,
                 a.shape[:-1] + b.shape[1:], empty, progress)


def matmul_nt(a: Array, b: Array, empty: Callable[..., Array] | None = None,
              progress: Progress = None) -> Array:
    """Compute C = A B^T of A, (..., k), and B, (n, k), where k may be several dimensions.

    k stands for all dimensions of B but the first.  Other parameters as in `matmul`.
    """
    n, inner = b.shape[0], b.shape[1:]
    rows = a.shape[:len(a.shape) - len(inner)]
    k = math.prod(inner)
    return _gemm((math.prod(rows), k), a, (n, k), b, rows + (n,), empty, progress, right=True)


def matmul_tn(a: Array, b: Array, empty: Callable[..., Array] | None = None,
              accumulate_float32: bool = False, progress: Progress = None) -> Array:
    """Compute C = A^T B of A, (k, n), and B, (k, ...), where k may be several dimensions.

    k stands for all dimensions of A but the last.  With `accumulate_float32` C has the
    `accumulation_dtype` of A.  Other parameters as in `matmul`.
    """
    n, k = a.shape[-1], math.prod(a.shape[:-1])
    outer = b.shape[len(a.shape) - 1:]
    return _gemm((k, n), a, (k, math.prod(outer)), b, (n,) + outer, empty, progress, left=True,
                 accumulate_float32=accumulate_float32)


def _gemm(a_shape: tuple[int, int], a: Array, b_shape: tuple[int, int], b: Array,
          shape: tuple[int, ...], empty: Callable[..., Array] | None, progress: Progress,
          left: bool = False, right: bool = False,
          accumulate_float32: bool = False) -> Array:
    """Multiply `a`, transposed if `left`, by `b`, transposed if `right`, as these matrices."""
    backend = backend_of(a)
    c = (empty or backend.empty)(shape, accumulation_dtype(a) if accumulate_float32 else a.dtype)
    c_shape = (a_shape[1] if left else a_shape[0], b_shape[0] if right else b_shape[1])
    if a.shape != a_shape:
        a = backend.xp.reshape(a, a_shape)
    if b.shape != b_shape:
        b = backend.xp.reshape(b, b_shape)
    out = c if c.shape == c_shape else backend.xp.reshape(c, c_shape)
    a, b = a.T if left else a, b.T if right else b
    if progress is None:
        backend.gemm(a, b, out)
    else:
        backend.gemm(a, b, out, progress=progress)
    return c
