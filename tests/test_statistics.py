"""Confidence intervals and the rank-sum test against known cases."""
import math

import numpy as np
import pytest

from mm3d import statistics
from mm3d.statistics import Interval, holm, median_interval, rank_sum, ratio_interval


@pytest.mark.parametrize("n, low, confidence", [
    # The least j-th sample with 1 - 2 P(Bin(n, 1/2) < j) >= 95 %: tabulated binomials.
    (6, 1, 1 - 2 / 64), (8, 1, 1 - 2 / 256), (9, 2, 1 - 2 * 10 / 512),
    (10, 2, 1 - 2 * 11 / 1024), (20, 6, 1 - 2 * 21700 / 2 ** 20),
    (25, 8, 0.9567147493362427), (100, 40, 0.9647997997822952)])
def test_the_interval_of_known_sizes(n, low, confidence):
    samples = np.random.default_rng(0).permutation(np.arange(1.0, n + 1))
    found = median_interval(samples)
    assert (found.low, found.high) == (low, n + 1 - low)
    assert found.median == (n + 1) / 2
    assert found.confidence == pytest.approx(confidence, rel=1e-12)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_few_samples_have_less_confidence_and_say_so(n):
    found = median_interval(range(n))
    assert (found.low, found.high) == (0, n - 1)
    assert found.confidence == max(0, 1 - 2 * 0.5 ** n) < 0.95
    assert not found.within(math.inf)


def test_each_confidence_is_the_least_that_suffices():
    for n in range(6, 60):
        found = median_interval(np.arange(n))
        j = int(found.low) + 1
        tail = [2 * sum(math.comb(n, i) for i in range(k)) / 2 ** n for k in (j, j + 1)]
        assert 1 - tail[0] >= 0.95 > 1 - tail[1]


def test_thousands_of_samples():
    n = 5000
    found = median_interval(np.arange(n))
    # Normal approximation of the binomial: n/2 -+ 1.96 sqrt(n)/2.
    assert found.low == pytest.approx(n / 2 - 0.98 * math.sqrt(n), abs=2)
    assert 0.95 <= found.confidence < 0.952


@pytest.mark.parametrize("n", [6, 11, 30])
def test_coverage_of_a_skewed_distribution(n):
    random = np.random.default_rng(n)
    trials = 4000
    found = [median_interval(sample) for sample in random.lognormal(0, 1, (trials, n))]
    covered = np.mean([interval.low <= 1 <= interval.high for interval in found])
    expected = found[0].confidence
    error = math.sqrt(expected * (1 - expected) / trials)
    assert covered == pytest.approx(expected, abs=4 * error)


def test_the_width_is_relative():
    assert Interval(2.0, 1.9, 2.1, 0.96).width == pytest.approx(0.1)
    assert Interval(2.0, 1.9, 2.1, 0.96).within(0.11)
    assert not Interval(2.0, 1.9, 2.1, 0.96).within(0.09)
    assert Interval(0.0, 0.0, 0.0, 0.96).width == math.inf


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [math.inf]])
def test_no_median(bad):
    with pytest.raises(ValueError, match="at least one, all of them finite"):
        median_interval(bad)


@pytest.mark.parametrize("first, second, p", [
    ([1, 2, 3], [4, 5, 6], 2 / 20), ([4, 5, 6], [1, 2, 3], 2 / 20),
    ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], 2 / 252), ([1, 4], [2, 3], 1.0),
    ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12], 2 / 924),
    # Rank sums of two of {1, 2, 3, 4, 5}: 3 or less, 9 or more, in 2 of 10 ways.
    ([1, 2], [3, 4, 5], 2 / 10), ([1, 3], [2, 4, 5], 4 / 10),
    # Ties: mid-ranks 1.5, 1.5, 3.5, 3.5; the extreme sums in 2 of 6 ways.
    ([1, 1], [2, 2], 2 / 6), ([5, 5], [5, 5, 5], 1.0)])
def test_rank_sum_of_known_samples(first, second, p):
    assert rank_sum(first, second) == pytest.approx(p, rel=1e-12)


def test_rank_sum_is_exact_by_counting():
    import itertools
    first, second = [0.3, 1.2, 1.2, 4.0], [0.1, 1.2, 2.0, 5.0, 6.0]
    pooled = np.array(first + second)
    ranks = np.array([(pooled < x).sum() + ((pooled == x).sum() + 1) / 2 for x in pooled])
    sums = np.array([ranks[list(c)].sum() for c in itertools.combinations(range(9), 4)])
    distance = abs(ranks[:4].sum() - 20)
    assert rank_sum(first, second) == pytest.approx(np.mean(np.abs(sums - 20) >= distance))


def test_the_approximation_continues_the_exact_values(monkeypatch):
    random = np.random.default_rng(3)
    first, second = random.normal(0, 1, 40), random.normal(0.5, 1, 40).round(1)
    exact = rank_sum(first, second)
    monkeypatch.setattr(statistics, "EXACT", 10)
    assert rank_sum(first, second) == pytest.approx(exact, rel=0.05)


def test_false_alarms_are_as_rare_as_stated():
    random = np.random.default_rng(4)
    alarms = np.mean([rank_sum(*random.exponential(1, (2, 10))) < 0.05 for _ in range(1500)])
    assert 0.03 < alarms <= 0.06


def test_an_empty_group():
    with pytest.raises(ValueError, match="at least one"):
        rank_sum([], [1.0])


@pytest.mark.parametrize("n, below", [(5, 2), (6, 5), (8, 13), (10, 23), (20, 127)])
def test_the_interval_of_ratios_has_tabulated_bounds(n, below):
    """The critical values of Mann and Whitney's U at 5 %, two-sided, for n against n."""
    random = np.random.default_rng(n)
    first, second = random.lognormal(0, 1, (2, n))
    found = ratio_interval(first, second)
    ratios = np.sort([b / a for a in first for b in second])
    assert (found.low, found.high) == (ratios[below], ratios[-below - 1])
    assert 0.95 <= found.confidence < 0.98
    assert found.low <= found.median <= found.high


def test_the_interval_of_ratios_is_what_the_test_leaves_open():
    random = np.random.default_rng(5)
    first, second = random.lognormal(0, 0.2, 9), 1.3 * random.lognormal(0, 0.2, 11)
    found = ratio_interval(first, second)
    for factor, inside in ((found.low * 1.0001, True), (found.low * 0.9999, False),
                           (found.high * 0.9999, True), (found.high * 1.0001, False)):
        assert (rank_sum(factor * first, second) > 1 - found.confidence) == inside
    assert ratio_interval(first, 2 * first).median == pytest.approx(2)


def test_few_or_many_samples_of_a_ratio(monkeypatch):
    few = ratio_interval([1.0, 2.0, 3.0], [2.0, 4.0])
    assert few == (pytest.approx(math.sqrt(8 / 3)), 2 / 3, 4.0, pytest.approx(1 - 2 / 10))
    random = np.random.default_rng(6)
    first, second = random.lognormal(0, 0.3, (2, 40))
    exact = ratio_interval(first, second)
    monkeypatch.setattr(statistics, "EXACT", 10)
    assert ratio_interval(first, second)[:3] == pytest.approx(exact[:3], rel=0.01)
    for bad in ([], [0.0], [math.nan]):
        with pytest.raises(ValueError, match="finite and greater"):
            ratio_interval([1.0], bad)


def test_the_interval_of_ratios_covers_as_often_as_stated():
    random = np.random.default_rng(7)
    found = [ratio_interval(*random.exponential(1, (2, 7))) for _ in range(3000)]
    covered = np.mean([interval.low <= 1 <= interval.high for interval in found])
    expected = found[0].confidence
    assert covered == pytest.approx(expected, abs=4 * math.sqrt(expected * 0.05 / 3000))


def test_holm_corrects_known_values():
    """The example of Holm's step-down: 4 x 0.005, 3 x 0.01, then 2 x 0.03 holds back 0.04."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []
