"""The verb ``predict``: the paper's tables as a machine model predicts them.

Every row is a dry run at its published sizes, replayed on the model.  What the paper leaves open
(layers, whether backward repeats the forward, how much of the machine's figures is achieved) is
fitted on every other row; the fit, its residuals and the errors of the rows between are printed.
These rows were in view when the form of the model was chosen and are no test on unseen data: the
error of a row that is left out of the fit is the fairer figure.
"""

import itertools
from typing import Iterable

import msgspec
import numpy as np
from tabulate import tabulate

from bench import model, replay
from bench.cases import HEADINGS, PAPER, TITLES, Case, Row, UsageError, case, select
from mm3d import dry

LAYERS = (12, 16, 24, 32, 48)    # what the paper's models may have had
FREE = ("gemm", "node", "network")    # figures whose achieved part is fitted
LEAST = 0.01    # of a figure: a fit that needs less explains nothing
UNEXPLAINED = 0.35    # error beyond which a row counts as not explained by the model


class Spent(msgspec.Struct, frozen=True):
    """What a row's step is spent on, for 24 layers at the machine's full figures, and the most
    bytes at one time on rank 0 when backward repeats nothing."""

    case: Case
    peak: int
    terms: dict[str, model.Terms]


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
    achieved: model.Achieved
    residual: float


def spent(machine: model.Machine, rows: Iterable[Row], dtype: str) -> list[Spent]:
    """The dry runs of the rows."""
    found = []
    for one in (case(row, "paper", layers=24) for row in rows):
        trace = dry.extended(one.row.scheme, one.row.gpus, dtype=dtype,
                             **msgspec.structs.asdict(one.sizes))
        found.append(Spent(one, trace.peak, model.terms(machine, trace)))
    return found


def _equations(rows: list[Spent], fit: tuple[int, dict[str, bool]]) -> tuple:
    """Seconds by term of each published time, relative to it, and the times."""
    layers, recompute = fit
    lines = []
    for row in rows:
        there, again = (np.array([row.terms[phase][t] for t in model.TERMS])
                        for phase in dry.PHASES)
        again = again + there * recompute[row.case.row.scheme]
        lines += [there * layers / 24 / row.case.row.forward,
                  again * layers / 24 / row.case.row.backward]
    return np.array(lines)


def least_squares(A: np.ndarray, b: np.ndarray, low: float, high: float) -> np.ndarray:
    """The c with `low` <= c <= `high` that makes |A c - b| least, by coordinate descent."""
    gram, target = A.T @ A, A.T @ b
    c = np.full(A.shape[1], float(low))
    for _ in range(300):
        before = c.copy()
        for k in range(len(c)):
            if gram[k, k] > 0:
                c[k] = min(high, max(low, c[k] + (target[k] - gram[k] @ c) / gram[k, k]))
        if np.abs(c - before).max() < 1e-9 * np.abs(c).max():
            break
    return c


def refined(A: np.ndarray, rest: np.ndarray, c: np.ndarray, low: float,
            high: float) -> tuple[np.ndarray, float]:
    """The c, searched from `c`, that makes the mean of abs(log(A c + 1 - rest)) least, and that.

    Ratios, so that twice too slow counts as much as twice too fast; not squared, so that a few
    rows which nothing explains do not pull the others along.
    """
    def cost(c: np.ndarray) -> float:
        return float(np.abs(np.log(A @ c + 1 - rest)).mean())

    least = cost(c)
    around = np.array([d for d in itertools.product((-1, 0, 1), repeat=len(c)) if any(d)])
    for step in (2, 1.3, 1.1, 1.03, 1.01, 1.003, 1.001):
        better = True
        while better:
            tried = [np.clip(c * float(step) ** d, low, high) for d in around]
            costs = [cost(one) for one in tried]
            better = min(costs) < least - 1e-9
            if better:
                c, least = tried[int(np.argmin(costs))], min(costs)
    return c, least


def fitted(rows: list[Spent], machine: model.Machine, layers: Iterable[int]) -> Fit:
    """The parameters that fit the published forward and backward times of `rows` best.

    No figure may be exceeded, and no less than a hundredth of it be got; what is not free is
    as the machine's file says.  A scheme whose rows do not fit the memory repeats the forward.
    """
    free = [model.TERMS.index(name) for name in FREE]
    fixed = [k for k in range(len(model.TERMS)) if k not in free]
    known = np.array([1 / getattr(machine.achieved, model.TERMS[k]) for k in fixed])
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
        start = least_squares(A[:, free], rest, 1.0, 1 / LEAST)
        c, residual = refined(A[:, free], rest, start, 1.0, 1 / LEAST)
        if best is None or residual < best.residual - 1e-9:
            parts = dict(zip(FREE, (1 / c).tolist()))
            best = Fit(count, recompute, msgspec.structs.replace(machine.achieved, **parts),
                       residual)
    return best


def predicted(row: Spent, fit: Fit, machine: model.Machine) -> tuple[float, float]:
    """Seconds of forward and backward of a row."""
    tuned = msgspec.structs.replace(machine, achieved=fit.achieved)
    forward, backward = (model.seconds(tuned, row.terms[phase]) * fit.layers / 24
                         for phase in dry.PHASES)
    return forward, backward + forward * fit.recompute[row.case.row.scheme]


def error(row: Spent, fit: Fit, machine: model.Machine) -> float:
    """Of the predicted average step time, relative to that of the published times."""
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

    machine: model.Machine
    rows: list[Spent]
    chosen: list[int]
    fit: Fit
    left_out: list[float]
    by_layers: dict[int, float]

    def mean(self, fitted: bool) -> float:
        """Mean absolute error of the rows that were fitted, or of those that were not."""
        errors = [abs(error(row, self.fit, self.machine)) for k, row in enumerate(self.rows)
                  if (k in self.chosen) == fitted]
        return float(np.mean(errors))


def predict(machine: model.Machine, dtype: str = "float32") -> Outcome:
    """Fit every other row of both tables, and each row left out once."""
    rows = spent(machine, select(), dtype)
    chosen = list(range(0, len(rows), 2))
    fits = [fitted([rows[k] for k in chosen], machine, (layers,)) for layers in LAYERS]
    fit = min(fits, key=lambda one: one.residual)
    left_out = []
    for k, row in enumerate(rows):
        others = fitted(rows[:k] + rows[k + 1:], machine, (fit.layers,))
        left_out.append(error(row, others, machine))
    return Outcome(machine, rows, chosen, fit, left_out,
                   {one.layers: one.residual for one in fits})


def run(arguments) -> int:
    """Print the tables, or what was measured beside predictions.

    Raises
    ------
    UsageError
        When the arguments cannot be meant.
    StoreError
        When there are no results.
    """
    if arguments.results:
        idle = [f"--{name} {value}" for name in ("table", "pictures")
                if (value := getattr(arguments, name)) is not None]
        if idle:
            raise UsageError(f"--results {arguments.results} {' '.join(idle)}: what was measured "
                             f"is no row of the paper's tables and has no figures; give --results "
                             f"without {' and '.join(name.split()[0] for name in idle)}")
        found, problems = replay.collected(arguments.results)
        print(replay.report(model.load(arguments.machine), found))
        if problems:
            print("", "Left out:", *problems, sep="\n")
        return 0
    wanted = {row.table for row in select(arguments.table or "all")}
    outcome = predict(model.load(arguments.machine, "float32"))
    for name in HEADINGS:
        if name in wanted:
            print(f"{HEADINGS[name]}, on the model of {outcome.machine.name}\n")
            print(table(outcome, name) + "\n")
    print(summary(outcome))
    if arguments.pictures:
        from bench.outlook import scaling
        print(scaling(arguments.pictures, outcome))
    return 0


def table(outcome: Outcome, name: str) -> str:
    """The rows of one table: published and predicted, and the error of each."""
    lines = []
    for k, row in enumerate(outcome.rows):
        published = row.case.row
        if published.table != name:
            continue
        forward, backward = predicted(row, outcome.fit, outcome.machine)
        lines.append([TITLES[published.scheme], published.gpus, published.forward, forward,
                      published.backward, backward, published.recomputed,
                      (forward + backward) / published.batch, row.peak / 2**30,
                      f"{error(row, outcome.fit, outcome.machine):+.0%}",
                      "fitted" if k in outcome.chosen else "not fitted",
                      f"{outcome.left_out[k]:+.0%}"])
    return tabulate(lines, ["", "GPUs", "forward s\npublished", "\npredicted",
                            "backward s\npublished", "\npredicted", "average s\npublished",
                            "\npredicted", "GiB", "error",
                            "row is", "error when\nleft out"],
                    floatfmt=[".3f"] * 8 + [".1f"], disable_numparse=[9, 10, 11],
                    colalign=("left",))


def summary(outcome: Outcome) -> str:
    """The fit, its residuals, and the rows that it does not explain."""
    fit, machine = outcome.fit, outcome.machine
    got = {"gemm": machine.gemm_rate["float32"] / 1e12, "node": machine.node.bytes_per_second
           / 1e9, "network": machine.network.bytes_per_second / 1e9}
    unit = {"gemm": "Tflop/s", "node": "GB/s a rank", "network": "GB/s a node"}
    lines = [f"Fitted on {len(outcome.chosen)} of {len(outcome.rows)} rows, forward and backward "
             f"(mean absolute logarithm of predicted over published {fit.residual:.3f}):",
             f"  layers {fit.layers}; backward repeats the forward in "
             + (", ".join(TITLES[s] for s, on in fit.recompute.items() if on) or "no scheme")]
    lines.append("  with other numbers of layers: "
                 + ", ".join(f"{n} {r:.3f}" for n, r in outcome.by_layers.items())
                 + "; rates make up for layers, so the times hardly tell")
    lines += [f"  {name}: {getattr(fit.achieved, name):.1%} of {got[name]:g} {unit[name]}, "
              f"{getattr(fit.achieved, name) * got[name]:.3g}" for name in FREE]
    full = sum(row.peak > machine.memory_bytes for row in outcome.rows)
    lines.append(f"GiB is rank 0's peak with 24 layers and nothing repeated: {full} rows need "
                 f"more than a rank's {machine.memory_bytes / 2**30:.0f}.")
    lines.append(f"Mean absolute error of the average step time: {outcome.mean(True):.0%} on the "
                 f"fitted rows, {outcome.mean(False):.0%} on the others, "
                 f"{np.mean(np.abs(outcome.left_out)):.0%} when each row is left out of the fit "
                 f"(the form of the model was chosen with all rows in view).")
    wrong = [f"{row.case.title} ({off:+.0%})" for row, off in zip(outcome.rows, outcome.left_out)
             if abs(off) > UNEXPLAINED]
    lines.append(f"Rows that the model does not explain (more than {UNEXPLAINED:.0%} off when "
                 f"left out): " + (", ".join(wrong) or "none"))
    return "\n".join(lines)
