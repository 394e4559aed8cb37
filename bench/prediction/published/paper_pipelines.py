"""Predict the paper's rows with their layers divided among the stages of a pipeline.

The fit to the paper's tables gives the machine model, the number of layers, and whether backward
repeats the forward.
"""

from dataclasses import dataclass, replace
from typing import Iterable, Sequence

import msgspec

from bench.cases.case import make_case
from bench.cases.paper import Row, load_tables
from bench.prediction.pipelines.pipeline_model import PipelineModel
from bench.prediction.pipelines.pipeline_seconds import (PredictedPipeline, fullest_stage,
                                                         predict_pipeline)
from bench.prediction.published import scaling
from bench.prediction.published.paper_fit import Outcome
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.training.batches import divide_rows
from mm3d.training.mesh import Sizes, stage_grids
from mm3d.training.schedules import Schedule


@dataclass(frozen=True)
class RowPipeline:
    """A row of the paper, as a pipeline, with the peak bytes of the stage that needs the most.

    `one_stage` is the predicted seconds a sequence on the same ranks without stages.
    """

    row: Row
    model: PipelineModel
    found: PredictedPipeline
    peak: float
    one_stage: float

    @property
    def average(self) -> float:
        """Return the predicted seconds a sequence."""
        return float(self.found.seconds) / self.row.batch


def predict_as_pipelines(outcome: Outcome, rows: Iterable[Row], schedule: Schedule,
                         grid: Sizes | Sequence[Sizes] | None = None,
                         **replicas: int | None) -> tuple[list[RowPipeline], list[str]]:
    """Predict rows as pipelines; return also why other rows cannot be divided so.

    The grid is that of all stages, or one for each; by default the scheme's choice.  `replicas`
    are fields of `bench.prediction.pipelines.pipeline_model.Replicas`.
    """
    tuned = msgspec.structs.replace(outcome.machine, achieved=outcome.fit.achieved)
    found: list[RowPipeline] = []
    missing: dict[str, list[str]] = {}
    for row in rows:
        repeats = outcome.fit.recompute[row.scheme]
        try:
            model = _row_model(row, outcome.fit.layers, schedule, grid, **replicas)
        except ValueError as error:
            missing.setdefault(str(error), []).append(f"{row.table} {row.scheme} on {row.gpus}")
            continue
        stored = replace(model, stack=replace(model.stack, recompute="full")) if repeats else model
        found.append(RowPipeline(
            row, model, predict_pipeline(model, tuned, repeats), fullest_stage(stored)[1],
            scaling.predict_step_time(outcome, row.scheme, row.gpus, {
                name: value for name, value in model.sizes.items() if name != "layers"}
                | {"batch": row.batch})))
    return found, [f"{', '.join(names)}: {why}" for why, names in missing.items()]


def _row_model(row: Row, layers: int, schedule: Schedule, grid: Sizes | Sequence[Sizes] | None,
               data: int = 1, **replicas: int | str | None) -> PipelineModel:
    """Return a row of the paper as a pipeline; ValueError when it cannot be divided so."""
    stages, several = schedule.ranks, data * (replicas.get("context") or 1)
    if row.gpus % (several * stages):
        among = f"{several} replicas of " * (several > 1)
        raise ValueError(f"{among}{stages} stages do not divide {row.gpus} ranks")
    grids = stage_grids(find_scheme(row.scheme), row.gpus // several, stages, grid)
    sizes = make_case(row, "paper", layers=layers).sizes
    largest, *_ = divide_rows(sizes.batch, data, schedule.microbatches)
    own = sum(rows.stop - rows.start for rows in largest)
    stack = Stack(**replace(sizes, batch=own), dtype=load_tables().settings.dtype)
    model = PipelineModel(schedule, row.scheme, grids, stack, data=data, **replicas)
    model.parts    # raises where layers cannot be divided
    return model
