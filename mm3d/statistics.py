"""Nonparametric statistics of run times, which are neither normal nor symmetric.

The interval is that of Le Boudec, "Performance Evaluation of Computer and Communication Systems"
(2010), section 2.2, which Hoefler and Belli, "Scientific benchmarking of parallel computing
systems" (SC'15), recommend; the test is Wilcoxon's rank-sum test (Mann and Whitney 1947).
"""

import math
from typing import NamedTuple, Sequence

import numpy as np

CONFIDENCE = 0.95
# The exact distribution of a rank sum is counted up to so many samples in both groups together.
EXACT = 100


class Interval(NamedTuple):
    """A median and the interval of order statistics that holds the true one.

    Attributes
    ----------
    median, low, high : float
        In the unit of the samples.
    confidence : float
        The probability that the interval holds the median of the distribution, when samples are
        independent: at least what was asked for, or less when there are too few samples.
    """

    median: float
    low: float
    high: float
    confidence: float

    @property
    def width(self) -> float:
        """``high - low`` as a fraction of the median."""
        return (self.high - self.low) / abs(self.median) if self.median else math.inf

    def within(self, width: float, confidence: float = CONFIDENCE) -> bool:
        """Whether the interval has the confidence and is no wider than this fraction."""
        return self.confidence >= confidence and self.width <= width


def median_interval(samples: Sequence[float] | np.ndarray,
                    confidence: float = CONFIDENCE) -> Interval:
    """The median of `samples` and an interval that holds the distribution's median.

    The number of samples below the true median is binomial (n, 1/2), whatever the distribution:
    the j-th least and the j-th greatest sample enclose it with the probability
    1 - 2 P(Bin(n, 1/2) < j).  The largest j that gives `confidence` is taken; with fewer than six
    samples none gives 95 %, and the interval is that of the least and the greatest, with the
    confidence that it has.

    Parameters
    ----------
    samples : sequence of float
        At least one, independent of each other.
    confidence : float
        The least probability, below 1.

    Raises
    ------
    ValueError
        When there are no samples, or one of them is not a finite number.
    """
    ordered = np.sort(np.asarray(samples, np.float64).ravel())
    n = ordered.size
    if n == 0 or not np.isfinite(ordered).all():
        raise ValueError(f"the median of {n} samples: at least one, all of them finite, would do")
    # P(Bin(n, 1/2) < j) is below / 2^n, in whole numbers, which neither round nor underflow.
    j, term, below = 1, 1, 1
    while 2 * (j + 1) <= n + 1:
        term = term * (n - j + 1) // j
        if 1 - 2 * (below + term) / 2 ** n < confidence:
            break
        j, below = j + 1, below + term
    return Interval(float(np.median(ordered)), float(ordered[j - 1]), float(ordered[n - j]),
                    max(0.0, 1 - 2 * below / 2 ** n))


def rank_sum(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> float:
    """The two-sided p value of the hypothesis that both groups are from one distribution.

    Exact, ties included, up to `EXACT` samples in all: the share of all ways to divide the ranks
    that are at least as far from the expected rank sum.  Beyond, the normal approximation.

    Raises
    ------
    ValueError
        When a group is empty.
    """
    groups = sorted((np.asarray(group, np.float64).ravel() for group in (first, second)), key=len)
    n, total = len(groups[0]), sum(map(len, groups))
    if n == 0:
        raise ValueError("a group of no samples cannot be compared: each needs at least one")
    _, place, count = np.unique(np.concatenate(groups), return_inverse=True, return_counts=True)
    # Twice the mid-ranks, so that they are whole numbers also where samples are equal.
    ranks = (2 * np.cumsum(count) - count + 1)[place]
    distance = abs(int(ranks[:n].sum()) - n * (total + 1))
    if total > EXACT:
        ties = float((count.astype(np.float64) ** 3 - count).sum())
        variance = n * (total - n) / 12 * (total + 1 - ties / (total * (total - 1)))
        if variance == 0:
            return 1.0
        z = max(0.0, distance / 2 - 0.5) / math.sqrt(variance)
        return math.erfc(z / math.sqrt(2))
    # ways[k, s]: how many choices of k ranks have the sum s.
    ways = np.zeros((n + 1, int(ranks.sum()) + 1))
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, :-rank].copy()
    sums = np.arange(ways.shape[1])
    far = np.abs(sums - n * (total + 1)) >= distance
    return min(1.0, float(ways[n, far].sum() / ways[n].sum()))
