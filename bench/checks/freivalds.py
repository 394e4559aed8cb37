"""Check a distributed product without gathering a matrix.

A random vector is multiplied with both sides in float64 (Freivalds 1979), and some rows are
computed in full.  Each difference is compared with the componentwise bound of a matrix product,
a multiple of eps |A||B| (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.5).
"""

from dataclasses import dataclass, replace

import numpy as np

from bench.checks.sharded_matrices import row_chunks
from bench.checks.tolerances import EPS
from bench.records.measurements import Check

# The bound grows with the number of terms in the worst case; errors found in practice are far
# below one eps, and a missing or doubled term is far above eight.
MULTIPLE = 8
ROWS = 4


@dataclass(frozen=True)
class DistributedMatrix:
    """A matrix whose every element lies on exactly one rank.

    `place` is that of this rank's block, its rows and its columns, in the matrix of global shape.
    """

    block: np.ndarray
    place: tuple[slice | np.ndarray, slice | np.ndarray]
    shape: tuple[int, int]
    comm: object

    @property
    def T(self) -> "DistributedMatrix":
        """Return the transposed matrix."""
        return replace(self, block=self.block.T, place=self.place[::-1], shape=self.shape[::-1])

    def times(self, x: np.ndarray, absolute: bool = False) -> np.ndarray:
        """Multiply by a global matrix of few columns in float64, the same on every rank.

        With `absolute` the absolute values of this matrix are multiplied instead.
        """
        out = np.zeros((self.shape[0], x.shape[1]))
        rows, columns = self.place
        out[rows] = np.concatenate([part @ x[columns] for part in row_chunks(
            self.block, absolute)])
        total = np.empty_like(out)
        self.comm.Allreduce(out, total)
        return total


def check_product(name: str, left: DistributedMatrix, right: DistributedMatrix,
                  result: DistributedMatrix, seed: int, dtype: str,
                  eps: float | None = None) -> list[Check]:
    """Compare C, `result`, with the product of A and B; every rank calls this with its blocks.

    `eps` is the relative rounding error of the factors; that of `dtype` unless given.  Errors are
    multiples of |A||B|, and the checks the same on every rank.
    """
    random = np.random.default_rng(seed)
    tolerance = MULTIPLE * (eps or EPS[dtype])
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


def _ratio(difference: np.ndarray, bound: np.ndarray) -> float:
    """Return the greatest difference as a multiple of its bound; NaN if one is NaN."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(difference == 0, 0.0, np.abs(difference) / bound)
    return float(ratio.max())
