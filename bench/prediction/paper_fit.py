"""Fit a machine model to the paper's tables and predict them.

Every row is a dry run at its published sizes, replayed on the model.  What the paper leaves open
(layers, whether backward repeats the forward, how much of the machine's figures is achieved) is
fitted on every other row; the fit, its residuals and the errors of the rows between are printed.
These rows were in view when the form of the model was chosen and are no test on unseen data: the
error of a row that is left out of the fit is the fairer figure.
"""

import itertools
import math
from typing import Iterable

import msgspec
import numpy as np

from bench.cases.case import Case, make_case
from bench.cases.paper import PAPER, Row
from bench.cases.selection import select_rows
from bench.instruments.least_squares import bounded
from bench.prediction import machine_model
from bench.prediction.seconds import TERMS, Terms, achieved_seconds, terms
from mm3d.tracing import dry_run
from mm3d.tracing.events import PHASES

LAYERS = (12, 16, 24, 32, 48)    # what the paper's models may have had
FITTED_FIGURES = ("gemm", "node", "network")    # figures whose achieved part is fitted
LEAST_ACHIEVED = 0.01    # of a figure: a fit that needs less explains nothing
STRIDES = (0.3, 0.03)    # of logarithms of figures, with which searches begin


class Spent(msgspec.Struct, frozen=True):
    """What a row's step is spent on, for 24 layers at the machine's full figures, and the most
    bytes at one time on rank 0 when backward repeats nothing."""

    case: Case
    peak: int
    terms: dict[str, Terms]


class Fit(msgspec.Struct, frozen=True):
    """The free parameters.

    Attributes
    ----------
    layers : int
        Of the model, in all rows.
    recompute : dict of str to bool
        Schemes whose backward repeats the forward.
    achieved : model.Achieved
        The part of each figure that is got.
    residual : float
        Mean of the absolute logarithms of predicted over published times.
    """

    layers: int
    recompute: dict[str, bool]
    achieved: machine_model.Achieved
    residual: float


def spent(machine: machine_model.Machine, rows: Iterable[Row], dtype: str) -> list[Spent]:
    """Run the rows dry and sum what their steps are spent on."""
    found = []
    for one in (make_case(row, "paper", layers=24) for row in rows):
        trace = dry_run.extended(one.row.scheme, one.row.gpus, dtype=dtype,
                                 **one.sizes)
        found.append(Spent(one, trace.peak, terms(machine, trace)))
    return found


def _equations(rows: list[Spent], fit: tuple[int, dict[str, bool]]) -> tuple:
    """Set up the seconds by term of each published time, relative to it, and the times."""
    layers, recompute = fit
    lines = []
    for row in rows:
        there, again = (np.array([row.terms[phase][t] for t in TERMS])
                        for phase in PHASES)
        again = again + there * recompute[row.case.row.scheme]
        lines += [there * layers / 24 / row.case.row.forward,
                  again * layers / 24 / row.case.row.backward]
    return np.array(lines)


def refined(A: np.ndarray, rest: np.ndarray, c: np.ndarray, low: float,
            high: float) -> tuple[np.ndarray, float]:
    """Find the c near `c` that makes the mean of abs(log(A c + 1 - rest)) least; c, and that.

    Ratios, so that twice too slow counts as much as twice too fast; not squared, so that a few
    rows which nothing explains do not pull the others along.  The mean has edges wherever a row
    is right, so the search goes by its values alone, and starts anew where it ends until that
    finds nothing better.
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


def fitted(rows: list[Spent], machine: machine_model.Machine, layers: Iterable[int]) -> Fit:
    """Find the parameters that fit the published forward and backward times of `rows` best.

    No figure may be exceeded, and no less than a hundredth of it be got; what is not free is
    as the machine's file says.  A scheme whose rows do not fit the memory repeats the forward.
    """
    free = [TERMS.index(name) for name in FITTED_FIGURES]
    fixed = [k for k in range(len(TERMS)) if k not in free]
    known = np.array([1 / getattr(machine.achieved, TERMS[k]) for k in fixed])
    schemes = sorted({row.case.row.scheme for row in rows})
    best = None
    for count, again in itertools.product(layers, itertools.product((False, True),
                                                                    repeat=len(schemes))):
        recompute = dict.fromkeys(PAPER, False) | dict(zip(schemes, again))
        if any(row.peak * count / 24 > machine.memory_bytes for row in rows
               if not recompute[row.case.row.scheme]):
            continue
        A = _equations(rows, (count, recompute))
        rest = 1 - A[:, fixed] @ known
        start = bounded(A[:, free], rest, 1.0, 1 / LEAST_ACHIEVED)
        c, residual = refined(A[:, free], rest, start, 1.0, 1 / LEAST_ACHIEVED)
        if best is None or residual < best.residual - 1e-9:
            parts = dict(zip(FITTED_FIGURES, (1 / c).tolist()))
            best = Fit(count, recompute, msgspec.structs.replace(machine.achieved, **parts),
                       residual)
    return best


def predicted(row: Spent, fit: Fit, machine: machine_model.Machine) -> tuple[float, float]:
    """Predict seconds of forward and backward of a row."""
    tuned = msgspec.structs.replace(machine, achieved=fit.achieved)
    forward, backward = (achieved_seconds(tuned, row.terms[phase]) * fit.layers / 24
                         for phase in PHASES)
    return forward, backward + forward * fit.recompute[row.case.row.scheme]


def error(row: Spent, fit: Fit, machine: machine_model.Machine) -> float:
    """Return the error of the predicted average step time, relative to the published times."""
    return sum(predicted(row, fit, machine)) / row.case.row.batch / row.case.row.recomputed - 1


class Outcome(msgspec.Struct, frozen=True):
    """A prediction of both tables.

    Attributes
    ----------
    rows : list of Spent
        All rows.
    fit : Fit
        Fitted on `chosen`, the numbers of every other row.
    left_out : list of float
        Of each row, the error of the fit to all rows but that one.
    by_layers : dict of int to float
        The residual of the best fit with so many layers.
    """

    machine: machine_model.Machine
    rows: list[Spent]
    chosen: list[int]
    fit: Fit
    left_out: list[float]
    by_layers: dict[int, float]

    def mean(self, fitted: bool) -> float:
        """Return the mean absolute error of the rows that were, or were not, fitted."""
        errors = [abs(error(row, self.fit, self.machine)) for k, row in enumerate(self.rows)
                  if (k in self.chosen) == fitted]
        return float(np.mean(errors))


def predict(machine: machine_model.Machine, dtype: str = "float32") -> Outcome:
    """Fit every other row of both tables, and each row left out once."""
    rows = spent(machine, select_rows(), dtype)
    chosen = list(range(0, len(rows), 2))
    fits = [fitted([rows[k] for k in chosen], machine, (layers,)) for layers in LAYERS]
    fit = min(fits, key=lambda one: one.residual)
    left_out = []
    for k, row in enumerate(rows):
        others = fitted(rows[:k] + rows[k + 1:], machine, (fit.layers,))
        left_out.append(error(row, others, machine))
    return Outcome(machine, rows, chosen, fit, left_out,
                   {one.layers: one.residual for one in fits})
