"""Nonparametric statistics of run times, which are neither normal nor symmetric.

The interval is that of Le Boudec, "Performance Evaluation of Computer and Communication Systems"
(2010), section 2.2, which Hoefler and Belli, "Scientific benchmarking of parallel computing
systems" (SC'15), recommend; the test is Wilcoxon's rank-sum test (Mann and Whitney 1947).
"""

import math
from statistics import NormalDist
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
    ways = _ways(ranks, n)
    far = np.abs(np.arange(ways.size) - n * (total + 1)) >= distance
    return min(1.0, float(ways[far].sum() / ways.sum()))


def _ways(ranks: np.ndarray, n: int) -> np.ndarray:
    """How many choices of `n` of the `ranks` have each sum."""
    ways = np.zeros((n + 1, int(ranks.sum()) + 1))
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, :-rank].copy()
    return ways[n]


def ratio_interval(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray,
                   confidence: float = CONFIDENCE) -> Interval:
    """By what factor `second` is greater than `first`, and what the rank-sum test leaves open.

    The estimate of Hodges and Lehmann (1963) on logarithms: the median of all ratios of a sample
    of `second` to one of `first`.  The interval is Moses': the factors by which `first` could be
    multiplied and the rank-sum test still not tell it from `second`.  It supposes that the two
    distributions differ by a factor, and nothing else of them.

    Parameters
    ----------
    first, second : sequence of float
        At least one each, all greater than 0.
    confidence : float
        The least probability; with too few samples the interval is that of all ratios, with the
        confidence that it has.

    Raises
    ------
    ValueError
        When a group is empty, or a sample is not a finite number greater than 0.
    """
    groups = [np.asarray(group, np.float64).ravel() for group in (first, second)]
    if not all(group.size and np.isfinite(group).all() and (group > 0).all() for group in groups):
        raise ValueError("the ratio of two groups needs samples of both, finite and greater "
                         "than 0")
    n, m = map(len, groups)
    ratios = np.sort(np.divide.outer(groups[1], groups[0]).ravel())
    if n + m > EXACT:
        spread = math.sqrt(n * m * (n + m + 1) / 12)
        below = NormalDist(n * m / 2, spread).inv_cdf((1 - confidence) / 2)
        j, reached = max(1, math.floor(below)), confidence
    else:
        ways = _ways(np.arange(1, n + m + 1), n)[n * (n + 1) // 2:]
        # beyond[j - 1] is the probability that fewer than j ratios are below the true one.
        beyond = np.cumsum(ways) / ways.sum()
        j = max(1, int(np.searchsorted(beyond, (1 - confidence) / 2, side="right")))
        reached = 1 - 2 * float(beyond[j - 1])
    return Interval(math.exp(float(np.median(np.log(ratios)))), float(ratios[j - 1]),
                    float(ratios[n * m - j]), max(0.0, reached))


def holm(values: Sequence[float]) -> list[float]:
    """The p values of many tests, raised so that all of them together may be read at one level.

    Holm's (1979): the least times their number, the next times one less, and so on, none below
    one before it.  The probability of a single false alarm among all is then at most the level,
    whatever the tests have to do with each other.
    """
    adjusted, greatest = [0.0] * len(values), 0.0
    for k, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        greatest = max(greatest, min(1.0, (len(values) - k) * values[index]))
        adjusted[index] = greatest
    return adjusted
