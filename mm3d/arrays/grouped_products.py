"""Multiply groups of rows, each by a matrix of its own: C_e = A_e B_e, A_e B_e^T and A_e^T B_e.

Rows lie in one array, and one product is made for each `Segment` of rows of one group.  A group
without rows takes part in none.
"""

from dataclasses import dataclass
from typing import Callable, Sequence

from mm3d.arrays.backend import Array, accumulation_dtype, backend_of


@dataclass(frozen=True)
class Segment:
    """Describe consecutive rows of one group."""

    group: int    # number of the group
    # The first row, and the one after the last.
    start: int
    stop: int


def segments_of(groups: Sequence[int], lengths: Sequence[int]) -> list[Segment]:
    """Return the segments of groups whose rows follow each other, without empty segments."""
    found, start = [], 0
    for group, length in zip(groups, map(int, lengths), strict=True):
        if length:
            found.append(Segment(group, start, start + length))
        start += length
    return found


def cut_segments(segments: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """Return the parts of segments inside the rows from `start` to `stop`, counted from `start`.
    """
    cut = (Segment(one.group, max(one.start, start) - start, min(one.stop, stop) - start)
           for one in segments)
    return [one for one in cut if one.stop > one.start]


def grouped_matmul(a: Array, b: Array, segments: Sequence[Segment]) -> Array:
    """Compute A_e B_e for all groups e.

    a is (rows, n), each row in one segment; b is (groups, n, k), of its dtype.  The result is
    (rows, k).
    """
    library = backend_of(a)
    out = library.empty((a.shape[0], b.shape[2]), a.dtype)
    for one in segments:
        library.gemm(a[one.start:one.stop, :], b[one.group, :, :], out[one.start:one.stop, :])
    return out


def grouped_matmul_nt(a: Array, b: Array, segments: Sequence[Segment]) -> Array:
    """Compute A_e B_e^T of (rows, k) and (groups, n, k); parameters as in `grouped_matmul`."""
    library = backend_of(a)
    out = library.empty((a.shape[0], b.shape[1]), a.dtype)
    for one in segments:
        library.gemm(a[one.start:one.stop, :], b[one.group, :, :].T, out[one.start:one.stop, :])
    return out


def grouped_matmul_tn(a: Array, b: Array, segments: Sequence[Segment], groups: int,
                      empty: Callable[..., Array] | None = None,
                      accumulate_float32: bool = False) -> Array:
    """Compute A_e^T B_e of (rows, n) and (rows, k) for all groups e.

    `empty` and `accumulate_float32` are as in `mm3d.arrays.products.matmul_tn`.  The result is
    (groups, n, k), zero for groups without rows.
    """
    library = backend_of(a)
    dtype = accumulation_dtype(a) if accumulate_float32 else a.dtype
    out = (empty or library.empty)((groups, a.shape[1], b.shape[1]), dtype)
    written: set[int] = set()
    for one in segments:
        rows, place = slice(one.start, one.stop), out[one.group, :, :]
        if one.group in written:
            term = library.empty(place.shape, dtype)
            library.gemm(a[rows, :].T, b[rows, :], term)
            place += term
        else:
            library.gemm(a[rows, :].T, b[rows, :], place)
            written.add(one.group)
    for group in set(range(groups)) - written:
        out[group, :, :] = 0
    return out
