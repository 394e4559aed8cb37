"""Sums of NumPy arrays; numbers of 16 bits are added in float32 and rounded once.

Added in their own type 2048 + 1 is 2048 in float16, and 40000 + 40000 infinite, whatever is
added afterwards.
"""

from typing import Sequence

import numpy as np


def add(terms: Sequence[np.ndarray], out: np.ndarray) -> None:
    """`out`, which may be the first of two terms or more, becomes their sum, in their order."""
    first, total = terms[0], accumulator(out)
    if total is not out:
        total[...] = first
        first = total
    np.add(first, terms[1], out=total)
    for term in terms[2:]:
        np.add(total, term, out=total)
    store_rounded(total, out)


def upcast(a: np.ndarray) -> np.ndarray:
    """`a` in float32 if its numbers have 16 bits, otherwise itself."""
    return a.astype(np.float32) if _narrow(a) else a


def accumulator(out: np.ndarray) -> np.ndarray:
    """Memory for a sum that is to be rounded to `out`: that itself if nothing is rounded."""
    return np.empty(out.shape, np.float32) if _narrow(out) else out


def store_rounded(total: np.ndarray, out: np.ndarray) -> np.ndarray:
    """`out` with the sum `total`, which was made in the `accumulator` for it."""
    if total is not out:
        out[...] = total
    return out


def _narrow(a: np.ndarray) -> bool:
    return a.dtype.itemsize == 2 and a.dtype.name in ("float16", "bfloat16")
