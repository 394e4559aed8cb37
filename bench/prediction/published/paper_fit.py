"""Fit a machine model to the paper's tables and predict them.

Each row is run dry at its published sizes, and its seconds are predicted by the model.  Parameters
that the paper does not give (layers, whether backward repeats the forward, the achieved fractions
of the machine's figures) are fitted on every other row; the errors of the other rows are printed
too.  They were known when the form of the model was chosen, so they are no test on unseen data:
the error of each row when it is left out of the fit is the fairer figure.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Iterable

import msgspec
import numpy as np

from bench.cases.case import Case, make_case
from bench.cases.paper import PAPER, Row, load_tables
from bench.cases.selection import select_rows
from bench.least_squares import solve_bounded
from bench.prediction import machine_model
from bench.prediction.seconds import TERMS, Terms, achieved_seconds, trace_terms
from mm3d.tracing import dry_run
from mm3d.tracing.events import PHASES

LAYERS = (12, 16, 24, 32, 48)    # possible numbers of layers of the paper's models
RUN = 24    # layers of the rows that are run dry; seconds and bytes are proportional to layers
FITTED_FIGURES = ("gemm", "node", "network")    # figures whose achieved fraction is fitted
LEAST_ACHIEVED = 0.01    # fraction of a figure: a fit that needs less explains nothing
STRIDES = (0.3, 0.03)    # initial steps of searches, in logarithms of figures


@dataclass(frozen=True)
class RowTerms:
    """A row with `RUN` layers, and the seconds of its step by phase and term, at full figures.

    `peak` is in bytes of rank 0 without recomputation.
    """

    case: Case
    peak: int
    terms: dict[str, Terms]


@dataclass(frozen=True)
class Fit:
    """The fitted parameters; by scheme `recompute` is whether backward repeats the forward.

    The residual is the mean of absolute logarithms of predicted over published times.
    """

    layers: int
    recompute: dict[str, bool]
    achieved: machine_model.Achieved
    residual: float


def run_rows_dry(machine: machine_model.Machine, rows: Iterable[Row]) -> list[RowTerms]:
    """Run the rows dry and predict the seconds of their steps by term."""
    found = []
    for one in (make_case(row, "paper", layers=RUN) for row in rows):
        trace = dry_run.extrapolate_step(one.row.scheme, one.row.gpus,
                                         dtype=load_tables().settings.dtype, **one.sizes)
        found.append(RowTerms(one, trace.peak, trace_terms(machine, trace)))
    return found


def _equations(rows: list[RowTerms], fit: tuple[int, dict[str, bool]]) -> tuple:
    """Return the seconds by term of each published time, relative to it."""
    layers, recompute = fit
    lines = []
    for row in rows:
        there, again = (np.array([row.terms[phase][t] for t in TERMS])
                        for phase in PHASES)
        again = again + there * recompute[row.case.row.scheme]
        lines += [there * layers / RUN / row.case.row.forward,
                  again * layers / RUN / row.case.row.backward]
    return np.array(lines)


def refine_fit(A: np.ndarray, rest: np.ndarray, c: np.ndarray, low: float,
               high: float) -> tuple[np.ndarray, float]:
    """Minimize the mean of abs(log(A c + 1 - rest)) over c, with low <= c <= high, from `c`.

    Logarithms weigh twice too slow as much as twice too fast; they are not squared, so that a few
    outliers do not dominate.  The mean has kinks where a row is predicted exactly, so the search
    uses no gradients, and is restarted where it ends until it finds nothing better.

    Returns the best c, and its mean.
    """
    from scipy.optimize import minimize

    def deviation(u: np.ndarray) -> float:
        return float(np.abs(np.log(A @ np.exp(u) + 1 - rest)).mean())

    ends = math.log(low), math.log(high)
    u, least, strides = np.log(c), math.inf, list(STRIDES)
    while strides:
        corners = u + strides[0] * np.where(u + strides[0] > ends[1], -1, 1) * np.eye(len(u))
        found = minimize(deviation, u, method="Nelder-Mead", bounds=[ends] * len(u), options={
            "initial_simplex": np.vstack([u, corners]), "xatol": 1e-9, "fatol": 1e-12,
            "maxiter": 5000, "maxfev": 5000})
        if found.fun > least - 1e-9:
            del strides[0]
        if found.fun < least:
            u, least = found.x, float(found.fun)
    return np.clip(np.exp(u), low, high), least


def fit_rows(rows: list[RowTerms], machine: machine_model.Machine, layers: Iterable[int]) -> Fit:
    """Find the parameters that fit the published forward and backward times of `rows` best.

    Achieved fractions are between 0.01 and 1; those that are not fitted are the machine's.  A
    scheme with a row that does not fit the memory repeats the forward.
    """
    free = [TERMS.index(name) for name in FITTED_FIGURES]
    fixed = [k for k in range(len(TERMS)) if k not in free]
    known = np.array([1 / getattr(machine.achieved, TERMS[k]) for k in fixed])
    schemes = sorted({row.case.row.scheme for row in rows})
    best = None
    for count, again in itertools.product(layers, itertools.product((False, True),
                                                                    repeat=len(schemes))):
        recompute = dict.fromkeys(PAPER, False) | dict(zip(schemes, again))
        if any(row.peak * count / RUN > machine.memory_bytes for row in rows
               if not recompute[row.case.row.scheme]):
            continue
        A = _equations(rows, (count, recompute))
        rest = 1 - A[:, fixed] @ known
        start = solve_bounded(A[:, free], rest, 1.0, 1 / LEAST_ACHIEVED)
        c, residual = refine_fit(A[:, free], rest, start, 1.0, 1 / LEAST_ACHIEVED)
        if best is None or residual < best.residual - 1e-9:
            parts = dict(zip(FITTED_FIGURES, (1 / c).tolist()))
            best = Fit(count, recompute, msgspec.structs.replace(machine.achieved, **parts),
                       residual)
    return best


def predict_row(row: RowTerms, fit: Fit, machine: machine_model.Machine) -> tuple[float, float]:
    """Predict the seconds of forward and backward of a row."""
    tuned = msgspec.structs.replace(machine, achieved=fit.achieved)
    forward, backward = (achieved_seconds(tuned, row.terms[phase]) * fit.layers / RUN
                         for phase in PHASES)
    return forward, backward + forward * fit.recompute[row.case.row.scheme]


def prediction_error(row: RowTerms, fit: Fit, machine: machine_model.Machine) -> float:
    """Return the relative error of the predicted average step time."""
    return sum(predict_row(row, fit, machine)) / row.case.row.batch / row.case.row.recomputed - 1


@dataclass(frozen=True)
class Outcome:
    """A prediction of both tables: the indices of the fitted rows, and residuals by layers.

    `left_out` has the error of each row, predicted by a fit to all other rows.
    """

    machine: machine_model.Machine
    rows: list[RowTerms]
    chosen: list[int]
    fit: Fit
    left_out: list[float]
    by_layers: dict[int, float]

    def mean(self, fitted: bool) -> float:
        """Return the mean absolute error of the rows that were, or were not, fitted."""
        errors = [abs(prediction_error(row, self.fit, self.machine))
                  for k, row in enumerate(self.rows) if (k in self.chosen) == fitted]
        return float(np.mean(errors))


def predict_tables(machine: machine_model.Machine) -> Outcome:
    """Fit every other row of both tables, predict all, and leave each out of a fit once."""
    rows = run_rows_dry(machine, select_rows())
    chosen = list(range(0, len(rows), 2))
    fits = [fit_rows([rows[k] for k in chosen], machine, (layers,)) for layers in LAYERS]
    fit = min(fits, key=lambda one: one.residual)
    left_out = []
    for k, row in enumerate(rows):
        others = fit_rows(rows[:k] + rows[k + 1:], machine, (fit.layers,))
        left_out.append(prediction_error(row, others, machine))
    return Outcome(machine, rows, chosen, fit, left_out,
                   {one.layers: one.residual for one in fits})
