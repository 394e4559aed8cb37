"""Make the tables of a pipeline that is predicted, of one rank and of plans."""

from typing import Sequence

import numpy as np

from bench.cases.paper import HEADINGS, TITLES
from bench.prediction import machine_model, pipeline_seconds
from bench.prediction.paper_fit import Outcome
from bench.prediction.paper_pipelines import RowPipeline
from bench.prediction.pipeline_seconds import PipelineModel, PredictedPipeline
from bench.reports.document import Column, Notes, Part, Table, number_cell
from mm3d.training.schedules import Schedule


def rank_parts(model: PipelineModel, stage: int) -> list[Part]:
    """Make the table of what a rank of a stage does in a step, without a machine."""
    schedule = model.schedule
    parts = [model.parts[one] for one in schedule.stages[stage]]
    blocks = pipeline_seconds.sent_blocks(model, stage)
    words = blocks * model.block_bytes / np.dtype(model.dtype).itemsize
    rows = [["layers of this stage", sum(map(len, parts))],
            ["actions in a step", len(schedule.rows[stage])],
            ["blocks sent to other stages", blocks],
            ["words of these, a mean over its ranks", number_cell(words, ",.0f")],
            ["bytes at the peak, by the closed form",
             number_cell(pipeline_seconds.peak_bytes(model, stage), ",.0f")]]
    return [Table(f"Stage {stage} of {schedule.ranks} in a step of {schedule.microbatches} "
                  f"micro-batches", [Column("quantity"), Column("of a rank")], rows)]


COLUMNS = ("step s", "without hops", "F ms", "B ms", "W ms", "hop us", "hop us", "bubble %")


def seconds_cells(model: PipelineModel, found: PredictedPipeline) -> list:
    """Return the cells of `COLUMNS`."""
    timeline, stages = found.timeline, model.schedule.ranks
    times = timeline.times
    share = [1e3 * float(sum(every)) / stages for every in (
        times.forward, times.backward, times.weights)]
    return [number_cell(value, ".4g") for value in (
        float(timeline.makespan), float(found.without_hops), *share, 1e6 * found.inside,
        1e6 * found.between, 100 * float(timeline.bubble_rate))]


def seconds_columns() -> list[Column]:
    """Return the columns of `seconds_cells`."""
    groups = {5: "in a node", 6: "between nodes"}
    return [Column(name, group=groups.get(place, ""), align=".")
            for place, name in enumerate(COLUMNS)]


def seconds_parts(name: str, model: PipelineModel, found: PredictedPipeline,
                  machine: machine_model.Machine) -> list[Part]:
    """Make the table of the predicted seconds of a step."""
    return [Table(f"Predicted seconds of the pipeline (a model): {machine.about}",
                  [Column("schedule"), Column("micro-batches"), *seconds_columns()],
                  [[name, model.schedule.microbatches, *seconds_cells(model, found)]]),
            seconds_notes()]


def seconds_notes() -> Notes:
    """Say what the columns of seconds mean."""
    return Notes("About this prediction:", [
        "F, B and W: of the layers of a rank for one micro-batch, a mean over the stages; W is "
        "part of B where the schedule takes both at once. Hop: of a block of each rank to the "
        "rank of its number in another stage, the slowest; ranks of a node share its link.",
        "The step and the bubble are the schedule's exact times for these seconds, each hop with "
        "the link that it takes."])


def row_parts(name: str, schedule: Schedule, outcome: Outcome, found: Sequence[RowPipeline],
              missing: Sequence[str]) -> list[Part]:
    """Make the tables of the paper's rows as pipelines, with the rows that cannot be such."""
    stages, parts = schedule.ranks, []
    columns = [Column("scheme"), Column("GPUs"), Column("grid of", "a stage", align="<"),
               *(Column(*head, group="average step s", align=".") for head in (
                   ("without", "stages"), ("with", "them"))),
               *seconds_columns(), Column("GiB", align=".")]
    for table in dict.fromkeys(one.row.table for one in found):
        rows = [[TITLES[one.row.scheme], one.row.gpus, str(one.model.grid),
                 number_cell(one.one_stage, ".3f"), number_cell(one.average, ".3f"),
                 *seconds_cells(one.model, one.found), number_cell(one.peak / 2 ** 30, ".1f")]
                for one in found if one.row.table == table]
        parts.append(Table(f"{HEADINGS[table]}, {name} of {stages} stages and "
                           f"{schedule.microbatches} micro-batches (a model): "
                           f"{outcome.machine.about}", columns, rows))
    again = ", ".join(TITLES[scheme] for scheme, on in outcome.fit.recompute.items() if on)
    about = Notes("About these rows:", [
        f"{outcome.fit.layers} layers and the achieved fractions of the fit to the paper's "
        f"tables, which have no pipelines: nothing published stands beside this. Backward "
        f"repeats the forward in {again or 'no scheme'}.",
        "Without stages: the same ranks on one grid. GiB: the peak of a rank of the stage that "
        "needs the most, by the closed form.",
        *(f"Left out: {why}." for why in missing)])
    return [*parts, *[seconds_notes()] * bool(found), about]


def plan_parts(model_found: Sequence[tuple[PipelineModel, PredictedPipeline, float, bool]],
               screened: int) -> list[Part]:
    """Make the table of plans: model, prediction, bytes at the peak of a rank, and if it fits."""
    rows = [[model.scheme, str(model.grid), *seconds_cells(model, found),
             number_cell(peak / 2 ** 30, ".2f"), "yes" if fits else "NO"]
            for model, found, peak, fits in model_found]
    schedule = model_found[0][0].schedule
    return [Table(f"Schemes and grids of a stage by predicted step time, {schedule.ranks} stages, "
                  f"{schedule.microbatches} micro-batches", [
                      Column("scheme"), Column("grid", align="<"), *seconds_columns(),
                      Column("GiB", align="."), Column("fits", align="<")], rows),
            Notes("Remarks", [
                f"{screened} plans of a stage screened by closed forms, {len(rows)} of them "
                f"traced; memory is the closed form's of the stage with the most"]),
            seconds_notes()]
