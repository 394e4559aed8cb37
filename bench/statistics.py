"""Compute statistics of run times, which are neither normal nor symmetric, and of errors.

The interval is that of Le Boudec, "Performance Evaluation of Computer and Communication Systems"
(2010), section 2.2, which Hoefler and Belli, "Scientific benchmarking of parallel computing
systems" (SC'15), recommend; the test of repetitions is Wilcoxon's rank-sum test (Mann and Whitney
1947), that of a few whole runs Welch's t test (1947) on the logarithms of their medians.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Sequence

import numpy as np

CONFIDENCE = 0.95
# The distribution of a rank sum is exact up to this number of samples in both groups together.
MAX_EXACT = 100


class Interval(NamedTuple):
    """A median and an interval of order statistics around it, in the unit of the samples.

    `confidence` is the probability that the interval contains the median of the distribution, if
    samples are independent: at least `CONFIDENCE`, or less if there are too few samples.
    """

    median: float
    low: float
    high: float
    confidence: float

    @property
    def width(self) -> float:
        """``high - low`` as a fraction of the median."""
        return (self.high - self.low) / abs(self.median) if self.median else math.inf

    def within(self, width: float) -> bool:
        """Return whether the interval has `CONFIDENCE` and is no wider than this fraction."""
        return self.confidence >= CONFIDENCE and self.width <= width


@dataclass(frozen=True)
class Difference:
    """The ratio of the times of two sides of runs, with its interval and p value.

    `ratio` is the geometric mean of the second side over that of the first, `p` the p value of the
    hypothesis that it is 1.
    """

    ratio: float
    low: float
    high: float
    p: float


def median_interval(samples: Sequence[float] | np.ndarray) -> Interval:
    """Compute the median of one or more independent samples, and an interval for that of all.

    The number of samples below the true median is binomial (n, 1/2), whatever the distribution:
    the j-th least and the j-th greatest sample enclose it with the probability 1 - 2 P(Bin(n, 1/2)
    < j).  The largest j that gives `CONFIDENCE` is taken; with fewer than six samples none gives
    95 %, and the interval is that of the least and the greatest, with the confidence that it has.

    ValueError when there are no samples, or one of them is not a finite number.
    """
    ordered = np.sort(np.asarray(samples, np.float64).ravel())
    n = ordered.size
    if n == 0 or not np.isfinite(ordered).all():
        raise ValueError(f"the median of {n} samples: at least one, all of them finite, would do")
    # P(Bin(n, 1/2) < j) is below / 2^n, in whole numbers, which neither round nor underflow.
    j, term, below = 1, 1, 1
    while 2 * (j + 1) <= n + 1:
        term = term * (n - j + 1) // j
        if 1 - 2 * (below + term) / 2 ** n < CONFIDENCE:
            break
        j, below = j + 1, below + term
    return Interval(float(np.median(ordered)), float(ordered[j - 1]), float(ordered[n - j]),
                    max(0.0, 1 - 2 * below / 2 ** n))


def elapsed(times: np.ndarray) -> np.ndarray:
    """Compute the last end minus the first begin of (..., rank, begin and end).

    NaN, of ranks without a part, is ignored; it is the result where no rank has a part.
    """
    return np.fmax.reduce(times[..., 1], axis=-1) - np.fmin.reduce(times[..., 0], axis=-1)


def rank_sum_p(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray,
               max_exact: int = MAX_EXACT) -> float:
    """Compute the two-sided p value of Wilcoxon's rank-sum test that both groups are alike.

    Up to `max_exact` samples in all it is exact, also with ties: the share of all divisions of the
    ranks whose sum is at least as far from the expected one.  Beyond, it is that of a normal sum.

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
    if total > max_exact:
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
    """Count the choices of `n` of the `ranks` that have each sum."""
    ways = np.zeros((n + 1, int(ranks.sum()) + 1))
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, :-rank].copy()
    return ways[n]


def adjust_by_holm(values: Sequence[float]) -> list[float]:
    """Correct the p values of many tests, so that all together may be read at one level.

    Holm's method (1979): the least is multiplied by their number, the next by one less, and so on,
    and none is below one before it.  The probability of any false alarm is then at most the level,
    however the tests depend on each other.
    """
    adjusted, greatest = [0.0] * len(values), 0.0
    for k, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        greatest = max(greatest, min(1.0, (len(values) - k) * values[index]))
        adjusted[index] = greatest
    return adjusted


def geometric_mean_interval(samples: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Compute the bounds of an interval of the geometric mean, by Student's t on logarithms.

    Samples are two or more, greater than 0, independent of each other; their logarithms are
    normal.
    """
    from scipy.special import stdtrit    # not needed by ranks that only measure
    logs = np.log(np.asarray(samples, np.float64))
    half = stdtrit(logs.size - 1, (1 + CONFIDENCE) / 2) * logs.std(ddof=1) / math.sqrt(logs.size)
    return math.exp(logs.mean() - half), math.exp(logs.mean() + half)


def compare_runs(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[Difference]:
    """Compute for each pair of sides of runs the ratio of the times of the second over the first.

    A side has at least two medians in seconds, one a run.  Repetitions of one run share its
    placement, its neighbours and the clock speed of its minutes, and say nothing of the next run.
    Three runs a side are too few for a test of ranks, which cannot go below p = 0.1 then, so the
    logarithms of the medians are compared by Welch's t test, with Satterthwaite's degrees of
    freedom.  It keeps its level for normal logarithms, also where one side varies more than the
    other, and stays below it where a few runs are outliers, since these increase the error.  False
    alarms come from three runs of a side that agree by accident.  Therefore the error of a case is
    at least that of all cases together (the mean of the variances within the sides), still with
    the degrees of freedom of the case alone.  The p values are corrected for the number of cases
    by Holm's method, which holds for cases that are disturbed together, as those of one run are.
    Intervals are at `CONFIDENCE`.

    Runs are assumed to be independent: measure the sides in turns.  Otherwise changes of the
    machine from one hour to the next are in the ratio, but not in its interval.

    ValueError when a side has fewer than two runs, or a median is not a finite number greater than
    0.
    """
    sides = [[np.asarray(side, np.float64).ravel() for side in pair] for pair in pairs]
    for side in (side for pair in sides for side in pair):
        if side.size < 2 or not (np.isfinite(side).all() and (side > 0).all()):
            raise ValueError("runs can be told apart by two or more finite medians a side, all "
                             f"greater than 0, not by {side.tolist()}")
    logs = [[np.log(side) for side in pair] for pair in sides]
    freedom = sum(side.size - 1 for pair in logs for side in pair)
    common = sum(side.var() * side.size for pair in logs for side in pair) / max(1, freedom)
    found = [_welch(*pair, common) for pair in logs]
    corrected = adjust_by_holm([one.p for one in found])
    return [replace(one, p=p) for one, p in zip(found, corrected)]


def _welch(first: np.ndarray, second: np.ndarray, common: float) -> Difference:
    """Do Welch's test of two sets of logarithms whose variances are at least `common`."""
    own = np.array([side.var(ddof=1) / side.size for side in (first, second)])
    freedom = (float(own.sum() ** 2 / sum(v ** 2 / (side.size - 1) for v, side in
                                          zip(own, (first, second))))
               if own.sum() > 0 else min(first.size, second.size) - 1)
    error = math.sqrt(max(own.sum(), common * (1 / first.size + 1 / second.size)))
    shift = float(second.mean() - first.mean())
    if error == 0:
        return Difference(math.exp(shift), math.exp(shift), math.exp(shift), float(shift == 0))
    from scipy.special import stdtr, stdtrit    # not needed by ranks that only measure
    reach = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
    return Difference(math.exp(shift), math.exp(shift - reach), math.exp(shift + reach),
                      2 * float(stdtr(freedom, -abs(shift / error))))


def bounds_of_one_more(sizes: Sequence[float], largest: Sequence[float], parts: np.ndarray,
                       level: float) -> tuple[float, float]:
    """Compute what the size and the largest element of one more normal error exceed.

    The probability of each is `level`.  Of each of at least three independent errors `sizes` has
    the root of the sum of squares, `largest` the largest absolute element, and `parts`, (errors,
    elements), its elements or the same part of them.  Both bounds are the largest size where an
    error is 0.

    The covariance of the elements is not known.  The squared size is about a number and a multiple
    of a chi-square, by its first three moments (Buckley and Eagleson, Austral.  J. Statist.  30A,
    1988), which traces of powers of the covariance give: the mean squared cosine of two errors,
    and the mean product of the three cosines of three.  As the scale is that of a few samples, an
    F distribution is used in place of the chi-square.  The largest element is that of n
    independent ones, where n is how many have the deviation of the largest.
    """
    from scipy.special import erf, fdtri, stdtrit    # not needed by ranks that only measure
    count, norms = len(parts), np.sqrt((parts * parts).sum(1))
    if not norms.all():
        return max(sizes), max(sizes)
    cosines = parts @ parts.T / np.outer(norms, norms)
    np.fill_diagonal(cosines, 0)
    pairs, triples = count * (count - 1), count * (count - 1) * (count - 2)
    second = (cosines ** 2).sum() / pairs
    third = max(0.0, np.trace(cosines @ cosines @ cosines) / triples)
    # Two deviations of either mean are added.
    free = 1 / second / (1 + 2 * np.sqrt(4 / pairs))
    alike = second ** 3 / (third + 2 * np.sqrt(6 * second ** 3 / triples)) ** 2
    free, alike = (float(np.clip(one, 1, parts.shape[1])) for one in (free, alike))
    size = np.sqrt(np.mean(np.square(sizes)) * (
        1 + (fdtri(alike, count * alike, 1 - level) - 1) * np.sqrt(min(1.0, alike / free))))
    squares = (parts * parts).mean(0)
    n = max(1.0, min(free, (squares ** 2).sum() ** 2 / (squares ** 4).sum()))
    x = np.linspace(0, 9, 4001)
    weights = np.diff(erf(x / np.sqrt(2)) ** n)    # of the largest of n of deviation 1
    square, fourth = ((weights * x[1:] ** power).sum() for power in (2, 4))
    like = 2 * square ** 2 / (fourth - square ** 2)    # how many squares it varies like
    most = np.sqrt(np.mean(np.square(largest)) / square) * stdtrit(
        count * like, 1 - level / (2 * n))
    return float(size), float(most)
