"""Predict the paper's rows with their layers divided among the stages of a pipeline.

The machine model and the number of layers are those of the fit to the paper's tables; so is a
backward that repeats the forward.
"""

from dataclasses import dataclass, replace
from typing import Iterable

import msgspec

from bench.cases.case import make_case
from bench.cases.paper import Row, load_tables
from bench.prediction import scaling
from bench.prediction.paper_fit import Outcome
from bench.prediction.pipeline_seconds import (PipelineModel, PredictedPipeline,
                                               largest_peak_bytes, predict_pipeline)
from mm3d.schemes import find_scheme
from mm3d.training.schedules import Schedule


@dataclass(frozen=True)
class RowPipeline:
    """A row of the paper, as a pipeline.

    Attributes
    ----------
    row : Row
        The row.
    model : PipelineModel
        Its model, on the scheme's own grid of a stage's ranks.
    found : PredictedPipeline
        The predicted times of a step.
    peak : float
        Bytes at the peak of a rank of the stage that needs the most.
    one_stage : float
        Predicted seconds a sequence on the same ranks without stages.
    """

    row: Row
    model: PipelineModel
    found: PredictedPipeline
    peak: float
    one_stage: float

    @property
    def average(self) -> float:
        """Return the predicted seconds a sequence."""
        return float(self.found.timeline.makespan) / self.row.batch


def predict_rows(outcome: Outcome, rows: Iterable[Row],
                 schedule: Schedule) -> tuple[list[RowPipeline], list[str]]:
    """Predict rows as pipelines.

    Parameters
    ----------
    outcome : Outcome
        A machine model fitted on the tables.
    rows : iterable of Row
        Rows of the paper.
    schedule : Schedule
        Its ranks are the stages.

    Returns
    -------
    list of RowPipeline, list of str
        The predictions, and why other rows cannot be such a pipeline.
    """
    tuned = msgspec.structs.replace(outcome.machine, achieved=outcome.fit.achieved)
    found, missing = [], []
    for row in rows:
        repeats = outcome.fit.recompute[row.scheme]
        try:
            model = row_model(row, outcome.fit.layers, schedule)
        except ValueError as error:
            missing.append(f"{row.table} {row.scheme} on {row.gpus}: {error}")
            continue
        stored = replace(model, recompute="full") if repeats else model
        found.append(RowPipeline(
            row, model, predict_pipeline(model, tuned, repeats), largest_peak_bytes(stored),
            scaling.average_step_time(outcome, row.scheme, row.gpus, {
                name: value for name, value in model.sizes.items() if name != "layers"})))
    return found, missing


def row_model(row: Row, layers: int, schedule: Schedule) -> PipelineModel:
    """Return a row of the paper as a pipeline; ValueError when it cannot be divided so."""
    if row.gpus % schedule.ranks:
        raise ValueError(f"{schedule.ranks} stages do not divide {row.gpus} ranks")
    scheme = find_scheme(row.scheme)
    grid = scheme.grid_shape(scheme.default_grid(row.gpus // schedule.ranks))
    model = PipelineModel(schedule, row.scheme, grid, make_case(row, "paper", layers=layers).sizes,
                          load_tables().settings.dtype)
    model.parts    # raises where layers or sequences cannot be divided
    return model
