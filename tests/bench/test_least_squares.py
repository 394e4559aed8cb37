"""Fits of few unknowns: against the conditions of an optimum, brute force and a global search."""
import itertools

import numpy as np
import pytest
import scipy    # its parts are imported by what uses them first

from bench.least_squares import solve_bounded, fit_line, solve_nonnegative
from bench.prediction.published.paper_fit import refine_fit


def problems(count=40):
    """Random right-hand sides, and columns of units that are far apart."""
    for seed in range(count):
        random = np.random.default_rng(seed)
        m, n = random.integers(2, 20), random.integers(1, 6)
        A = random.standard_normal((m, n)) if seed % 2 else random.random((m, n))
        yield A * 10.0 ** random.integers(-8, 8, n), random.standard_normal(m)


def by_subsets(A, b, needed=None):
    """The least residual of all choices of columns whose unknowns are positive."""
    least = np.inf if needed is not None else np.linalg.norm(b)
    for count in range(1, A.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(A.shape[1]), count)):
            c = np.linalg.lstsq(A[:, chosen], b, rcond=None)[0]
            if (c > 0).all() and (needed is None or needed in chosen):
                least = min(least, np.linalg.norm(A[:, chosen] @ c - b))
    return least


@pytest.mark.parametrize("needed", [None, 0])
def test_nothing_is_negative_and_no_choice_of_columns_is_better(needed):
    tried = 0
    for A, b in problems():
        A = A / np.linalg.norm(A, axis=0) if needed is not None else A
        c, least = solve_nonnegative(A, b, needed), by_subsets(A, b, needed)
        assert (c >= 0).all()
        if needed is not None and np.isinf(least):
            assert not c.any()
            continue
        tried += 1
        assert np.linalg.norm(A @ c - b) <= least * (1 + 1e-9) + 1e-12
        assert needed is None or c[needed] > 0
    assert tried > 15


def test_unknowns_that_are_positive_come_back():
    A = np.random.default_rng(3).random((9, 4)) * [1e-9, 1, 1e9, 1]
    c = np.array([1e9, 2, 0, 3])
    assert solve_nonnegative(A, A @ c) == pytest.approx(c, rel=1e-9, abs=1e-12)
    A[:, 3] = 0    # of which nothing can be known
    assert solve_nonnegative(A, A @ c)[:2] == pytest.approx(c[:2])


def test_bounds_are_kept_and_the_gradient_points_out_of_them():
    """The conditions of Karush, Kuhn and Tucker; inside the bounds the gradient is 0."""
    inside = 0
    for A, b in problems():
        A = A / np.linalg.norm(A, axis=0)
        c = solve_bounded(A, b, 0.1, 0.5)
        gradient = A.T @ (A @ c - b)
        assert ((0.1 <= c) & (c <= 0.5)).all()
        for one, slope in zip(c, gradient):
            free = 0.1 + 1e-9 < one < 0.5 - 1e-9
            inside += free
            assert abs(slope) < 1e-7 if free else (slope >= -1e-7 if one < 0.3 else slope <= 1e-7)
    assert inside > 10
    A = np.vstack([np.diag([1.0, 2, 3])] * 2)
    assert solve_bounded(A, A @ [0.5, 2.5, 300], 1, 100) == pytest.approx([1, 2.5, 100])


@pytest.mark.parametrize("seed", [0, 1])
def test_a_search_ends_where_a_global_one_does(seed):
    """Of the mean absolute logarithm, with noise that puts no row right."""
    random = np.random.default_rng(seed)
    A = random.random((16, 3)) * [1, 0.1, 0.5]
    rest = (A @ [2, 30, 5]) * random.lognormal(0, 0.3, 16)
    A, rest = A / rest[:, None] * 0.9, np.full(16, 0.9)
    c, least = refine_fit(A, rest, solve_bounded(A, rest, 1, 100), 1, 100)

    def deviations(u):
        return np.abs(np.log(np.exp(u.T) @ A.T + 0.1)).mean(axis=-1)

    everywhere = scipy.optimize.differential_evolution(
        deviations, [(0, np.log(100))] * 3, vectorized=True, updating="deferred", seed=1,
        tol=1e-10, polish=False)
    assert least <= everywhere.fun * (1 + 1e-5) and ((1 <= c) & (c <= 100)).all()
    assert least == pytest.approx(np.abs(np.log(A @ c + 0.1)).mean())


def test_a_line_of_least_relative_squares():
    sizes = np.array([1.0, 10, 100])
    assert fit_line(sizes, 2 + 3 * sizes) == pytest.approx((2, 3, 0), abs=1e-9)
    assert fit_line(sizes, 3 * sizes - 1)[0] == 0 and fit_line(sizes, 5 - sizes / 50)[1] == 0
    sizes = 4.0 ** np.arange(5, 12)
    start, _, error = fit_line(sizes, 1e-9 * sizes ** 1.5)    # no line fits
    assert start == 0 and error > 0.5
