"""Solve least squares of few unknowns that are non-negative or within bounds.

The solvers are SciPy's, which is imported where it is used: on the one rank that fits.
"""

import itertools

import numpy as np


def solve_nonnegative(A: np.ndarray, b: np.ndarray, needed: int | None = None) -> np.ndarray:
    """Find the c >= 0, of shape (n,), that minimizes abs(A c - b); A is (m, n), b is (m,).

    Columns of A may be of different units.  The coefficient of index `needed`, if any, must be
    greater than 0: if it is not, as few other terms as possible are left out, and zeros are
    returned if it cannot be.
    """
    from scipy.optimize import nnls
    scale = np.linalg.norm(A, axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    columns = A / scale
    found, _ = nnls(columns, b, maxiter=100)
    if needed is None or found[needed] > 0:
        return found / scale
    best, least = np.zeros(A.shape[1]), np.inf
    others = [k for k in range(A.shape[1]) if k != needed]
    for count in range(len(others)):
        for rest in itertools.combinations(others, count):
            chosen = [needed, *rest]
            part, residual = nnls(columns[:, chosen], b, maxiter=100)
            if part[0] > 0 and residual < least:
                best, least = np.zeros(A.shape[1]), residual
                best[chosen] = part
    return best / scale


def solve_bounded(A: np.ndarray, b: np.ndarray, low: float, high: float) -> np.ndarray:
    """Find the c with `low` <= c <= `high` that minimizes abs(A c - b)."""
    from scipy.optimize import lsq_linear
    found = lsq_linear(A, b, (low, high), method="bvls", max_iter=100).x
    return np.clip(found, low, high)    # a number on a bound may be a rounding error beyond it


def fit_line(sizes: np.ndarray, seconds: np.ndarray) -> tuple[float, float, float]:
    """Fit seconds = alpha + beta sizes; return alpha, beta and the largest relative error.

    The fit minimizes squares of *relative* errors, so that small sizes count as much as large
    ones; neither alpha nor beta is negative.
    """
    weighted = np.stack([1 / seconds, sizes / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(weighted, np.ones(len(sizes)), rcond=None)[0]
    if alpha < 0 or beta < 0:
        keep = 1 if alpha < 0 else 0
        column = weighted[:, keep]
        only = column.sum() / (column @ column)
        alpha, beta = (0.0, only) if keep else (only, 0.0)
    return float(alpha), float(beta), float(np.abs((alpha + beta * sizes) / seconds - 1).max())
