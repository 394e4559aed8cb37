"""Confidence intervals and tests against known cases, SciPy and brute force."""
import itertools
import math

import numpy as np
import pytest
import scipy    # its parts are imported by what uses them first

from bench.statistics import (Interval, adjust_by_holm, compare_runs, median_interval,
                              rank_sum_p)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_few_samples_have_less_confidence_and_say_so(n):
    found = median_interval(range(n))
    assert (found.low, found.high) == (0, n - 1)
    assert found.confidence == max(0, 1 - 2 * 0.5 ** n) < 0.95
    assert not found.within(math.inf)


def test_the_interval_is_that_of_scipy():
    random = np.random.default_rng(5)
    for n in (6, 7, 12, 33, 70, 5000):
        samples = random.lognormal(0, 1, n)
        found = median_interval(samples)
        scipys = scipy.stats.quantile_test(samples, p=0.5).confidence_interval(0.95)
        assert (found.low, found.high) == tuple(scipys)
        assert found.median == np.median(samples)
        below = np.searchsorted(np.sort(samples), found.low)
        assert found.confidence == pytest.approx(1 - 2 * scipy.stats.binom.cdf(below, n, 0.5))


def test_the_width_is_relative():
    assert Interval(2.0, 1.9, 2.1, 0.96).width == pytest.approx(0.1)
    assert Interval(2.0, 1.9, 2.1, 0.96).within(0.11)
    assert not Interval(2.0, 1.9, 2.1, 0.96).within(0.09)
    assert Interval(0.0, 0.0, 0.0, 0.96).width == math.inf


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [math.inf]])
def test_no_median(bad):
    with pytest.raises(ValueError, match="at least one, all of them finite"):
        median_interval(bad)


def test_rank_sum_is_mann_and_whitneys():
    """Without ties by SciPy's exact distribution."""
    random = np.random.default_rng(1)
    for first, second in random.integers(1, 20, (12, 2)):
        groups = random.normal(0, 1, first), random.normal(0.7, 1, second)
        exact = scipy.stats.mannwhitneyu(*groups, method="exact").pvalue
        assert rank_sum_p(*groups) == pytest.approx(exact, rel=1e-9)


def test_rank_sum_is_exact_with_ties():
    """By SciPy's count of all ways to divide the samples."""
    random = np.random.default_rng(2)
    for first, second in [(3, 3), (2, 6), (4, 5), (5, 2)]:
        groups = random.integers(0, 4, first), random.integers(0, 5, second)
        ranks = scipy.stats.rankdata(np.concatenate(groups))
        middle = first * ranks.mean()
        counted = scipy.stats.permutation_test(
            (ranks[:first], ranks[first:]), lambda one, other: abs(one.sum() - middle),
            vectorized=False, alternative="greater", n_resamples=math.inf)
        assert rank_sum_p(*groups) == pytest.approx(counted.pvalue)


def test_the_approximation_continues_the_exact_values():
    random = np.random.default_rng(3)
    first, second = random.normal(0, 1, 40), random.normal(0.5, 1, 40).round(1)
    exact, approximate = rank_sum_p(first, second), rank_sum_p(first, second, max_exact=10)
    assert approximate == pytest.approx(exact, rel=0.05)
    normal = scipy.stats.mannwhitneyu(first, second, method="asymptotic").pvalue
    assert approximate == pytest.approx(normal, rel=1e-9)


def test_an_empty_group():
    with pytest.raises(ValueError, match="at least one"):
        rank_sum_p([], [1.0])


def test_the_ratio_of_runs_is_welchs():
    """One case: t, degrees of freedom and bounds as computed by hand from the logarithms."""
    first, second = [1.0, 1.02, 1.01], [1.10, 1.16, 1.20, 1.12]
    found, = compare_runs([(first, second)])
    a, b = np.log(first), np.log(second)
    parts = a.var(ddof=1) / 3, b.var(ddof=1) / 4
    pooled = (2 * a.var(ddof=1) + 3 * b.var(ddof=1)) / 5
    error = math.sqrt(max(sum(parts), pooled * (1 / 3 + 1 / 4)))
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 3)
    assert found.ratio == pytest.approx(math.exp(b.mean() - a.mean()))
    t = scipy.stats.t(freedom)
    assert found.p == pytest.approx(2 * t.sf(abs(b.mean() - a.mean()) / error))
    assert math.log(found.high / found.ratio) / error == pytest.approx(t.ppf(0.975), rel=1e-6)
    assert found.low * found.high == pytest.approx(found.ratio ** 2)


def test_the_ratio_of_runs_is_scipys_where_the_smaller_side_varies_more():
    """There the error of the case is its own, and the test is Welch's as it stands."""
    first, second = [1.0, 1.12], [1.101, 1.102, 1.1, 1.103]
    found, = compare_runs([(first, second)])
    welch = scipy.stats.ttest_ind(np.log(second), np.log(first), equal_var=False)
    assert found.p == pytest.approx(welch.pvalue, rel=1e-6)
    assert (found.low, found.high) == pytest.approx(
        tuple(np.exp(welch.confidence_interval(0.95))), rel=1e-6)


def test_runs_that_agree_by_accident_do_not_shrink_the_error():
    """Three runs that are equal to a millionth, among cases that vary by 3 %."""
    noisy = ([1.0, 1.03, 1.06], [1.02, 1.05, 0.99])
    lucky = ([1.000001, 1.0, 1.000002], [1.01, 1.010001, 1.010002])
    assert compare_runs([lucky])[0].p < 1e-6
    assert compare_runs([lucky, noisy, noisy])[0].p > 0.5


def run_medians(random, noise, cases, runs=3):
    """Medians of two sides of runs of the same code; a run may disturb all of its cases."""
    alike = noise(random, (2, runs, 1)) / 2
    return [tuple(np.exp(alike + noise(random, (2, runs, 1)))[..., 0]) for _ in range(cases)]


def outliers(random, shape):
    """One run in ten is a fifth slower."""
    return random.normal(0, 0.02, shape) + 0.2 * (random.random(shape) < 0.1)


def two_speeds(random, shape):
    """Every second run is a tenth slower, as an unlucky placement makes it."""
    return random.normal(0, 0.005, shape) + 0.1 * (random.random(shape) < 0.5)


@pytest.mark.parametrize("noise", [lambda random, shape: random.normal(0, 0.03, shape),
                                   outliers, two_speeds])
@pytest.mark.parametrize("cases", [1, 4])
def test_runs_of_the_same_code_are_told_apart_as_rarely_as_stated(noise, cases):
    random = np.random.default_rng(8)
    alarms = np.mean([min(one.p for one in compare_runs(run_medians(random, noise, cases))) < 0.05
                      for _ in range(120)])
    assert alarms <= 0.05


def test_a_slowdown_is_found_by_three_runs_a_side():
    random = np.random.default_rng(10)
    found = []
    for _ in range(60):
        pairs = [tuple(np.exp(random.normal(0, 0.01, (2, 3)))) for _ in range(4)]
        pairs[1] = pairs[1][0], 1.15 * pairs[1][1]
        judged = compare_runs(pairs)
        found.append(judged[1].p < 0.05 and judged[1].ratio > 1.1)
    assert np.mean(found) > 0.7


@pytest.mark.parametrize("bad", [[1.0], [1.0, 0.0], [1.0, math.nan], []])
def test_runs_that_cannot_be_told_apart(bad):
    with pytest.raises(ValueError, match="two or more finite medians"):
        compare_runs([([1.0, 2.0], bad)])


def test_holm_closes_bonferronis_test():
    """A value is the greatest that Bonferroni gives for any choice of tests with this one."""
    random = np.random.default_rng(6)
    for count, power in ((0, 1), (1, 3), (2, 0.2), (3, 3), (6, 3)):    # few are more than 1/2
        values = random.random(count) ** power
        choices = [c for k in range(1, count + 1)
                   for c in itertools.combinations(range(count), k)]
        closed = [max(min(1, len(c) * min(values[list(c)])) for c in choices if one in c)
                  for one in range(count)]
        assert adjust_by_holm(list(values)) == pytest.approx(closed)
