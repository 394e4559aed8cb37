"""Check a distributed product without gathering a matrix.

A random vector is multiplied with both sides in float64 (Freivalds 1979), and some rows are
computed in full.  Each difference is held against the componentwise bound of a matrix product,
a multiple of eps |A||B| (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.5).
"""

from dataclasses import dataclass, replace

import numpy as np

from bench.records.measurements import Check

# The bound grows with the number of terms in the worst case; what is found in practice is far
# below one eps, and a missing or doubled term far above eight.
MULTIPLE = 8
ROWS = 4
CHUNK = 256
# Distances of one from the next number; TensorFloat-32 rounds what it multiplies.
EPS = {"float64": 2.0 ** -52, "float32": 2.0 ** -23, "tf32": 2.0 ** -10, "float16": 2.0 ** -10,
       "bfloat16": 2.0 ** -7}


@dataclass(frozen=True)
class Distributed:
    """A matrix of which every element lies on exactly one rank.

    Attributes
    ----------
    block : ndarray
        This rank's part.
    place : tuple of slice
        Where it lies in the whole.
    shape : tuple of int
        Of the whole.
    comm : mpi4py.MPI.Intracomm
        The ranks.
    """

    block: np.ndarray
    place: tuple[slice, slice]
    shape: tuple[int, int]
    comm: object

    @property
    def T(self) -> "Distributed":
        """Return the transposed matrix."""
        return replace(self, block=self.block.T, place=self.place[::-1], shape=self.shape[::-1])

    def times(self, x: np.ndarray, absolute: bool = False) -> np.ndarray:
        """Multiply with whole columns in float64; the absolute values if `absolute`."""
        out = np.zeros((self.shape[0], x.shape[1]))
        rows, columns = self.place
        for start in range(0, self.block.shape[0], CHUNK):
            part = self.block[start:start + CHUNK].astype(np.float64)
            first = rows.start + start
            out[first:first + len(part)] = (np.abs(part) if absolute else part) @ x[columns]
        total = np.empty_like(out)
        self.comm.Allreduce(out, total)
        return total


def checks(name: str, left: Distributed, right: Distributed, result: Distributed, seed: int,
           dtype: str, eps: float | None = None) -> list[Check]:
    """Compare `result` with `left` times `right`, computed in `dtype`; the same on all ranks.

    `eps` is what products are rounded by, that of `dtype` if it is not given.
    """
    random = np.random.default_rng(seed)
    tolerance = MULTIPLE * (eps or float(np.finfo(dtype).eps))
    x = random.choice([-1.0, 1.0], (right.shape[1], 1))
    vector = _ratio(result.times(x) - left.times(right.times(x)),
                    left.times(right.times(np.abs(x), True), True))
    rows = random.choice(left.shape[0], min(ROWS, left.shape[0]), replace=False)
    chosen = np.zeros((left.shape[0], len(rows)))
    chosen[rows, np.arange(len(rows))] = 1
    exact = right.T.times(left.T.times(chosen))
    bound = right.T.times(left.T.times(chosen, True), True)
    sampled = _ratio(result.T.times(chosen) - exact, bound)
    return [Check(f"{name} times a random vector", vector, tolerance),
            Check(f"{len(rows)} rows of {name}", sampled, tolerance)]


def failure(found: list[Check]) -> str | None:
    """Say which checks did not pass; None when all did."""
    wrong = [check for check in found if not check.passed]
    if not wrong:
        return None
    worst = max(wrong, key=lambda check: np.nan_to_num(check.error, nan=np.inf))
    return (f"{worst.quantity}: off by {worst.error:.2g} |A||B|, tolerance {worst.tolerance:.2g} "
            f"({len(wrong)} of {len(found)} checks fail); no times were written")


def _ratio(difference: np.ndarray, bound: np.ndarray) -> float:
    """Compute the greatest difference as a multiple of its bound; NaN where there is one."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(difference == 0, 0.0, np.abs(difference) / bound)
    return float(ratio.max())
