"""Make tables of predicted seconds beside those measured here, published, and of others' steps."""

from dataclasses import dataclass
from typing import Sequence

import msgspec
import numpy as np

from bench.cases.paper import HEADINGS, TITLES
from bench.document import Cell, Column, Notes, Part, Table, make_table, number_cell
from bench.prediction.beside_measured import Measured
from bench.prediction.machine_model import Machine
from bench.prediction.pipelines.training_step import SHARES
from bench.prediction.published.paper_fit import (FITTED_FIGURES, Outcome, predict_row,
                                                  prediction_error)
from bench.prediction.published.published_steps import PredictedStep, choices
from bench.prediction.seconds import TERMS
from bench.prediction.work import SIZE_NAMES, Seconds, Work, predict_seconds
from bench.records.notes import counted
from mm3d.tracing.events import PHASES


@dataclass(frozen=True)
class Pair:
    """A measurement with its prediction."""

    measured: Measured
    predicted: Seconds

    @property
    def phases(self) -> tuple[str, ...]:
        """Return the measured phases, which may be one whole "step"."""
        took = self.measured.seconds
        return PHASES if "step" in took else tuple(took)

    @property
    def totals(self) -> tuple[float, float]:
        """Sum predicted and measured seconds of the phases that were measured."""
        return (sum(self.predicted[phase] for phase in self.phases),
                sum(self.measured.seconds.values()))

    @property
    def error(self) -> float:
        """Return the error of the prediction, relative to the measured seconds."""
        guessed, took = self.totals
        return guessed / took - 1


def compare_predictions(machine: Machine, found: Sequence[Measured]) -> list[Part]:
    """Set predictions beside measurements on the ranks and transport of the machine."""
    known = [one for one in found if one.dtype in machine.gemm_rate]
    own = [one for one in known if one.matches(machine)]
    left = [f"{counted(count, 'run')} of {what} left out" for count, what in (
        (len(known) - len(own), "other numbers of ranks or another transport"),
        (len(found) - len(known), "dtypes without a rate of products")) if count]
    parts: list[Part] = [machine.described]
    if own:
        pairs = [Pair(one, predict_seconds(machine, one.work, one.dtype)) for one in own]
        errors = {kind: [abs(pair.error) for pair in pairs if pair.measured.work.kind == kind]
                  for kind in SIZE_NAMES}
        parts += [seconds_table(pairs), Notes("Errors of predictions", [
            f"{kind}: {counted(len(off), 'run')}, error {np.median(off):.0%} in the median, "
            f"{np.mean(off):.0%} in the mean, {max(off):.0%} at most"
            for kind, off in errors.items() if off])]
        rows = choice_table(pairs)
        parts += [rows] if rows.rows else []
    return parts + [Notes("Left out", left)] * bool(left)


def _plan(work: Work) -> str:
    """Name the grid, and the direction that is inside a node if the ranks were placed anew."""
    return f"{work.grid}, {work.order[-1]} inside" if work.order else str(work.grid)


def _sizes(work: Work) -> str:
    return f"{work.kind} {' x '.join(map(str, work.sizes))} {work.form}".rstrip()


def seconds_table(pairs: Sequence[Pair]) -> Table:
    """Make the table of milliseconds, errors of the sums, and published averages."""
    published = any(pair.measured.published is not None for pair in pairs)
    rows: list[list[Cell]] = []
    for pair in sorted(pairs, key=lambda pair: pair.measured.work.kind):
        one, work = pair.measured, pair.measured.work
        times = [cell for phase in PHASES for cell in (
            number_cell(1e3 * pair.predicted[phase]),
            number_cell(1e3 * one.seconds[phase]) if phase in one.seconds else "-")]
        average: list[Cell] = ["-"] * 3
        if work.kind == "layer" and one.published is not None:
            average = [number_cell(seconds) for seconds in (
                one.published, *(total / work.sizes[2] for total in pair.totals))]
        rows.append([TITLES.get(work.scheme, work.scheme), _plan(work), _sizes(work),
                     one.dtype, *times, number_cell(pair.error, "+.0%"),
                     *(average if published else [])])
    columns = [Column("scheme"), *(Column(name, align="<") for name in ("grid", "sizes", "dtype")),
               *(Column(kind, "", f"{phase} ms", ".") for phase in PHASES
                 for kind in ("predicted", "measured")), Column("error")]
    if published:
        columns += [Column(kind, "", "average s", ".")
                    for kind in ("published", "predicted", "measured")]
    return Table("Predicted and measured", columns, rows)


def choice_table(pairs: Sequence[Pair]) -> Table:
    """Make the table of the planner's grid, with the least predicted seconds, beside the fastest.

    Each size has a line for all schemes, and one for each scheme with several grids.  Of several
    runs of a plan the median counts: else the fastest would meet the slowest of another.
    """
    runs: dict[tuple, list[tuple[float, float]]] = {}
    for pair in pairs:
        plan = pair.measured.work, pair.measured.dtype, pair.phases
        runs.setdefault(plan, []).append(pair.totals)
    groups: dict[tuple, list[tuple[float, float, Work]]] = {}
    for (work, *how), totals in runs.items():
        predicted, seconds = np.median(totals, axis=0).tolist()
        for schemes in ("all", work.scheme):
            key = work.kind, work.sizes, work.form, *how, work.grid.ranks, schemes
            groups.setdefault(key, []).append((predicted, seconds, work))
    rows: list[list[Cell]] = []
    for (*_, ranks, schemes), tried in groups.items():
        if len(tried) == 1:
            continue
        taken = min(tried, key=lambda plan: plan[:2])    # the faster of equals
        fastest = min(tried, key=lambda plan: plan[1])
        least, slowest = fastest[1], max(seconds for _, seconds, _ in tried)
        chosen: list[Cell] = []
        for _, seconds, work in (taken, fastest):
            chosen += [f"{TITLES.get(work.scheme, work.scheme)} {_plan(work)}",
                       number_cell(1e3 * seconds)]
        rows.append([_sizes(taken[2]), ranks, TITLES.get(schemes, schemes), len(tried),
                     *chosen, number_cell(taken[1] / least - 1, "+.0%"),
                     number_cell(slowest / least - 1, "+.0%")])
    several = ", by medians of several runs" if len(pairs) > len(runs) else ""
    return Table(f"The planner's choices{several}", [
        Column("sizes"), Column("ranks"), Column("of schemes", align="<"), Column("grids"),
        Column("grid", "", "planner's", "<"), Column("ms", "", "planner's", "."),
        Column("grid", "", "fastest", "<"), Column("ms", "", "fastest", "."),
        Column("planner's", "", "over the fastest"), Column("slowest", "", "over the fastest")],
        rows)


UNEXPLAINED = 0.35    # error beyond which a row counts as not explained by the model
RATE_UNITS = {"gemm": "Tflop/s", "node": "GB/s a rank", "network": "GB/s a node"}


def prediction_table(outcome: Outcome, name: str) -> Table:
    """Make the table `name` of the paper, published and predicted, with the error of each row."""
    rows = []
    for k, row in enumerate(outcome.rows):
        published = row.case.row
        if published.table != name:
            continue
        forward, backward = predict_row(row, outcome.fit, outcome.machine)
        times = (published.forward, forward, published.backward, backward, published.recomputed,
                 (forward + backward) / published.batch)
        off, alone = prediction_error(row, outcome.fit, outcome.machine), outcome.left_out[k]
        rows.append([TITLES[published.scheme], published.gpus,
                     *(number_cell(seconds, ".3f") for seconds in times),
                     number_cell(row.peak / 2**30, ".1f"), number_cell(off, "+.0%"),
                     "fitted" if k in outcome.chosen else "not fitted",
                     number_cell(alone, "+.0%")])
    times = [Column(kind, group=f"{phase} s") for phase in ("forward", "backward", "average")
             for kind in ("published", "predicted")]
    return Table(f"{HEADINGS[name]}, on the model of {outcome.machine.name}", [
        Column("scheme"), Column("GPUs"), *times, Column("GiB"), Column("error"),
        Column("row is", align="<"), Column("error when", "left out")], rows)


def prediction_remarks(outcome: Outcome) -> list[Notes]:
    """State the fit, the errors of predictions, and the rows that the model does not explain."""
    fit, machine = outcome.fit, outcome.machine
    again = ", ".join(TITLES[s] for s, on in fit.recompute.items() if on) or "no scheme"
    full = {"gemm": machine.gemm_rate["float32"] / 1e12,
            "node": machine.node.bytes_per_second / 1e9,
            "network": machine.network.bytes_per_second / 1e9}
    fitted = [f"layers {fit.layers}; backward repeats the forward in {again}",
              "with other numbers of layers: "
              + ", ".join(f"{n} {r:.3f}" for n, r in outcome.by_layers.items())
              + "; rates make up for layers, so the times hardly tell"]
    for name in FITTED_FIGURES:
        part = getattr(fit.achieved, name)
        fitted.append(f"{name}: {part:.1%} of {full[name]:g} {RATE_UNITS[name]}, "
                      f"{part * full[name]:.3g}")
    return [Notes(f"Fitted on {len(outcome.chosen)} of {len(outcome.rows)} rows, forward and "
                  f"backward (mean absolute logarithm of predicted over published "
                  f"{fit.residual:.3f}):", fitted), Notes("Remarks", _errors(outcome))]


def _errors(outcome: Outcome) -> list[str]:
    """State memory, and the errors of rows that were and were not fitted."""
    machine = outcome.machine
    full = sum(row.peak > machine.memory_bytes for row in outcome.rows)
    wrong = [f"{row.case.title} ({off:+.0%})" for row, off in zip(outcome.rows, outcome.left_out)
             if abs(off) > UNEXPLAINED]
    return [f"Machine: {machine.described}.",
            f"GiB is rank 0's peak with 24 layers and nothing repeated: {full} rows need more "
            f"than a rank's {machine.memory_bytes / 2**30:.0f}.",
            f"Mean absolute error of the average step time: {outcome.mean(True):.0%} on the "
            f"fitted rows, {outcome.mean(False):.0%} on the others, "
            f"{np.mean(np.abs(outcome.left_out)):.0%} when each row is left out of the fit "
            f"(the form of the model was chosen with all rows in view).",
            f"Rows that the model does not explain (more than {UNEXPLAINED:.0%} off when left "
            f"out): " + (", ".join(wrong) or "none")]


COLUMNS = [
    Column("line", of=lambda one: one.row.line),
    Column("GPUs", of=lambda one: one.row.gpus),
    Column("hidden", of=lambda one: one.row.config.model.hidden),
    Column("layers", of=lambda one: one.row.config.model.layers),
    Column("batch", of=lambda one: one.row.config.model.batch),
    Column("seq", of=lambda one: one.row.config.model.seq),
    Column("division", align="<", of=lambda one: str(one.row.config.division)),
    Column("measured", "s", align=".", of=lambda one: one.row.seconds),
    Column("predicted", "s", align=".", of=lambda one: one.step.seconds),
    Column("error", "%", align=".", form="+.1f", of=lambda one: 100 * one.error),
    *(Column(name, "%", "share of the predicted step", ".", form=".0f",
             of=lambda one, name=name: 100 * one.step.shares[name] / one.step.seconds)
      for name in SHARES)]


def step_parts(machine: Machine, outcomes: Sequence[PredictedStep], problems: Sequence[str],
               fitted_to: int = 0) -> list[Part]:
    """Make the tables of predicted rows; `fitted_to` are the most GPUs of rows fitted, or 0."""
    kernels = sorted({one.row.attention or machine.attention for one in outcomes}
                     or {machine.attention})
    told = msgspec.structs.replace(machine, attention=" and ".join(kernels)).described
    parts: list[Part] = [make_table(f"Measured steps of training, and predictions (a model): "
                                    f"{told}", COLUMNS, outcomes)]
    if problems:
        parts.append(Notes("Left out:", list(problems)))
    parts.append(Notes("About these predictions:", _about(machine, fitted_to)))
    found = choices(outcomes)
    if found:
        parts.append(_choice_table(found))
    if fitted_to:
        groups = [(f"fitted, at most {counted(fitted_to, 'GPU')}: ", True),
                  ("not fitted: ", False)]
        parts += [name + error_line(chosen) for name, fits in groups if (chosen := [
            one for one in outcomes if (one.row.gpus <= fitted_to) == fits])]
    parts.append(error_line(outcomes) if outcomes else "no row could be predicted")
    return parts


def _about(machine: Machine, fitted_to: int) -> list[str]:
    """Say how rows were predicted, and what was fitted."""
    figures = ", ".join(f"{term} {getattr(machine.achieved, term):.3g}" for term in TERMS)
    source = (f"fitted to the rows of at most {counted(fitted_to, 'GPU')}" if fitted_to else
              "of the machine file, fitted to none of these rows")
    return [f"Achieved fractions {source}: {figures}.",
            "Where the file does not say otherwise: 1-D tensor parallelism, 1F1B, float16, "
            "backward repeats the whole forward, 51200 tokens, ranks fill one node after the "
            "other, nothing hides the sums over replicas.",
            "Shares are those of the stage that works the longest; links join ranks of a stage, "
            "latency is of messages and kernels, replicas are sums of gradients."]


def _choice_table(found: Sequence[tuple[PredictedStep, PredictedStep]]) -> Table:
    """Make the table of the rows that are predicted to be the fastest of their problem."""
    columns = [
        Column("GPUs", of=lambda pair: pair[0].row.gpus),
        Column("hidden", of=lambda pair: pair[0].row.config.model.hidden),
        Column("batch", of=lambda pair: pair[0].row.config.model.batch),
        Column("predicted fastest", align="<", of=lambda pair: str(pair[0].row.config.division)),
        Column("measured fastest", align="<", of=lambda pair: str(pair[1].row.config.division)),
        Column("behind", "%", align=".", form=".1f", of=lambda pair: 100 * (
            pair[0].row.seconds / pair[1].row.seconds - 1))]
    return make_table("The row predicted fastest, and by how much it was slower than the fastest",
                      columns, found)


def error_line(outcomes: Sequence[PredictedStep]) -> str:
    """Say the errors of rows: their mean, median and largest absolute values."""
    errors = 100 * np.abs([one.error for one in outcomes])
    rows = f"{len(errors)} row{'s' * (len(errors) > 1)}"
    return (f"{rows}: mean error {errors.mean():.1f} %, median "
            f"{np.median(errors):.1f} %, largest {errors.max():.1f} %")
