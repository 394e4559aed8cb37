"""Sum NumPy arrays; numbers of 16 bits are added in float32 and rounded once.

In float16 itself 2048 + 1 is 2048, and 40000 + 40000 is infinite.
"""

from typing import Sequence

import numpy as np


def add_terms(terms: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Sum two or more terms into `out`, in their order; `out` may be the first of them."""
    first, total = terms[0], accumulator(out)
    if total is not out:
        total[...] = first
        first = total
    np.add(first, terms[1], out=total)
    for term in terms[2:]:
        np.add(total, term, out=total)
    store_rounded(total, out)


def widen(a: np.ndarray) -> np.ndarray:
    """Convert `a` to float32 if its numbers have 16 bits; otherwise return `a` itself."""
    return a.astype(np.float32) if _narrow(a) else a


def accumulator(out: np.ndarray) -> np.ndarray:
    """Allocate memory for a sum that is rounded to `out`; `out` itself if nothing is rounded."""
    return np.empty(out.shape, np.float32) if _narrow(out) else out


def store_rounded(total: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Round the sum `total`, held in the `accumulator` of `out`, to `out`, and return `out`."""
    if total is not out:
        out[...] = total
    return out


def _narrow(a: np.ndarray) -> bool:
    return a.dtype.itemsize == 2 and a.dtype.name in ("float16", "bfloat16")
