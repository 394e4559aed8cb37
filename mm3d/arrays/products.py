"""Local matrix products: C = AB, AB^T and A^T B on one rank's arrays."""

import math
from typing import Any, Callable

from mm3d.arrays.backend import Progress, backend_of, accumulation_dtype


Array = Any


def matmul(a: Array, b: Array, empty: Callable[..., Array] | None = None,
           progress: Progress = None) -> Array:
    """C = A B: (..., n) times (n, ...); the last dimension of A meets the first of B.

    `empty` makes the array of the result, from its shape and dtype; for `progress` see
    `Backend.gemm`.
    """
    n = b.shape[0]
    return _gemm((math.prod(a.shape[:-1]), n), a, (n, math.prod(b.shape[1:])), b,
                 a.shape[:-1] + b.shape[1:], empty, progress)


def matmul_nt(a: Array, b: Array, empty: Callable[..., Array] | None = None,
              progress: Progress = None) -> Array:
    """C = A B^T: (..., k) times (n, k); k may be several dimensions, all but B's first."""
    n, inner = b.shape[0], b.shape[1:]
    rows = a.shape[:len(a.shape) - len(inner)]
    k = math.prod(inner)
    return _gemm((math.prod(rows), k), a, (n, k), b, rows + (n,), empty, progress, right=True)


def matmul_tn(a: Array, b: Array, empty: Callable[..., Array] | None = None,
              accumulate_float32: bool = False, progress: Progress = None) -> Array:
    """C = A^T B: (m, n) and (m, ...); m may be several dimensions, all but A's last.

    With `accumulate_float32` C has the `accumulation_dtype` of A.
    """
    n, m = a.shape[-1], math.prod(a.shape[:-1])
    outer = b.shape[len(a.shape) - 1:]
    return _gemm((m, n), a, (m, math.prod(outer)), b, (n,) + outer, empty, progress, left=True,
                 accumulate_float32=accumulate_float32)


def _gemm(rows: tuple[int, int], a: Array, columns: tuple[int, int], b: Array,
          shape: tuple[int, ...], empty: Callable[..., Array] | None, progress: Progress,
          left: bool = False, right: bool = False,
          accumulate_float32: bool = False) -> Array:
    """The product of `a` and `b` as matrices of the two shapes, transposed if `left`, `right`."""
    backend = backend_of(a)
    c = (empty or backend.empty)(shape, accumulation_dtype(a) if accumulate_float32 else a.dtype)
    flat = (rows[1] if left else rows[0], columns[0] if right else columns[1])
    if a.shape != rows:
        a = backend.xp.reshape(a, rows)
    if b.shape != columns:
        b = backend.xp.reshape(b, columns)
    out = c if c.shape == flat else backend.xp.reshape(c, flat)
    a, b = a.T if left else a, b.T if right else b
    if progress is None:
        backend.gemm(a, b, out)
    else:
        backend.gemm(a, b, out, progress=progress)
    return c
