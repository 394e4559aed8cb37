"""Make tables of predicted steps of training beside the measured steps of others."""

from typing import Sequence

import msgspec
import numpy as np

from bench.document import Column, Notes, Part, Table, make_table
from bench.prediction.machine_model import Machine
from bench.prediction.pipelines.training_step import SHARES
from bench.prediction.published.published_steps import PredictedStep, choices
from bench.prediction.seconds import TERMS
from bench.records.notes import counted

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
