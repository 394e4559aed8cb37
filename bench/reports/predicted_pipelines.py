"""Make tables of predicted pipelines: of one rank, of a step, of the paper's rows, of plans."""

from typing import Sequence

from bench.cases.paper import HEADINGS, TITLES
from bench.document import Column, Notes, Number, Part, Table, number_cell
from bench.prediction import machine_model
from bench.prediction.pipelines.pipeline_model import PipelineModel
from bench.prediction.pipelines.pipeline_seconds import PredictedPipeline
from bench.prediction.pipelines.training_step import SHARES, TrainingStep
from bench.prediction.published.paper_fit import Outcome
from bench.prediction.published.paper_pipelines import RowPipeline
from mm3d.grid.axis import Traffic
from mm3d.training.schedules import Schedule


def rank_parts(model: PipelineModel, replica: int, stage: int, place: int) -> list[Part]:
    """Make the tables of a rank's work in a step, run dry: at a place of a replica's stage."""
    whole = model.whole_step(place, stage, replica)
    trained = model.whole_step(place, stage, replica, optimizer=True)
    moved = whole.total_traffic()
    schedule = model.schedule
    parts = [model.parts[one] for one in schedule.stages[stage]]
    rows = [["layers of this stage", sum(map(len, parts))],
            ["actions in a step", len(schedule.rows[stage])],
            ["blocks sent to other stages", moved.get(("s", "send"), Traffic()).calls],
            ["bytes at the peak, without an optimizer", number_cell(whole.peak, ",.0f")],
            ["bytes at the peak, in training by AdamW", number_cell(trained.peak, ",.0f")]]
    return [Table(f"Stage {stage} of {schedule.ranks} in a step of {schedule.microbatches} "
                  f"micro-batches", [Column("quantity"), Column("of a rank")], rows),
            Table("Words of this rank in such a step: s between stages, d among replicas that "
                  "divide a copy of the model, r across the copies"
                  + ", c among those with the same sequences" * (model.context > 1),
                  [Column("direction"), Column("collective", align="<"), Column("words")],
                  [[direction, kind, Number(one.words, f"{one.words:,}")]
                   for (direction, kind), one in sorted(moved.items()) if one.words])]


def seconds_cells(model: PipelineModel, found: PredictedPipeline) -> list:
    """Return the cells of `seconds_columns`."""
    timeline, stages = found.timeline, model.schedule.ranks
    times = timeline.times
    share = [1e3 * float(sum(every)) / stages for every in (
        times.forward, times.backward, times.weights)]
    return [number_cell(value, ".4g") for value in (
        float(found.seconds), float(found.without_hops), *share, 1e6 * found.inside,
        1e6 * found.between, *[1e3 * float(max(found.sums))] * (model.replicas > 1),
        100 * float(timeline.bubble_rate))]


def seconds_columns(data: int) -> list[Column]:
    """Return the columns of `seconds_cells` for `data` replicas."""
    names = ("step s", "without hops", "F ms", "B ms", "W ms", "hop us", "hop us",
             *["sums ms"] * (data > 1), "bubble %")
    groups = {5: "in a node", 6: "between nodes"}
    return [Column(name, group=groups.get(place, ""), align=".")
            for place, name in enumerate(names)]


def seconds_parts(name: str, model: PipelineModel, found: PredictedPipeline,
                  machine: machine_model.Machine) -> list[Part]:
    """Make the table of the predicted seconds of a step."""
    return [Table(f"Predicted seconds of the pipeline (a model): {machine.described}",
                  [Column("schedule"), Column("micro-batches"), *seconds_columns(model.replicas)],
                  [[name, model.schedule.microbatches, *seconds_cells(model, found)]]),
            seconds_notes(model.replicas)]


def training_table(step: TrainingStep) -> Table:
    """Make the table of the predicted seconds of a step of training, and of its shares."""
    return Table("A step of training by AdamW: seconds of the stage that works the longest", [
        Column("step s", align="."), *(Column(name, align=".") for name in SHARES)],
        [[number_cell(step.seconds, ".6g"),
          *(number_cell(step.shares[name], ".4g") for name in SHARES)]])


def seconds_notes(data: int) -> Notes:
    """Explain the columns of seconds for `data` replicas."""
    return Notes("About this prediction:", [
        "F, B and W: of the layers of a rank for one micro-batch, a mean over the stages; W is "
        "part of B where the schedule takes both at once. Hop: of a block of each rank to the "
        "rank of its number in another stage, the slowest; ranks of a node share its link.",
        *["Sums: of gradients over replicas after the last action of a stage, and the gather of "
          "what an optimizer has changed, the slowest stage's; the step ends with the last of "
          "them, the bubble is without. Other traffic of ZeRO 2 and 3 is in F, B and W."
          ] * (data > 1),
        "The step and the bubble are the schedule's exact times for these seconds, each hop with "
        "the link that it takes."])


def row_parts(name: str, schedule: Schedule, outcome: Outcome, found: Sequence[RowPipeline],
              missing: Sequence[str]) -> list[Part]:
    """Make the tables of the paper's rows as pipelines; name the rows that cannot be pipelines."""
    stages, parts = schedule.ranks, []
    several = found[0].model.replicas if found else 1
    of = f"{several} replicas of " * (several > 1)
    zero = f", ZeRO {found[0].model.zero}" * (several > 1) if found else ""
    columns = [Column("scheme"), Column("GPUs"), Column("grid of", "a stage", align="<"),
               *(Column(*head, group="average step s", align=".") for head in (
                   ("without", "stages"), ("with", "them"))),
               *seconds_columns(several), Column("GiB", align=".")]
    for table in dict.fromkeys(one.row.table for one in found):
        rows = [[TITLES[one.row.scheme], one.row.gpus, one.model.grid_name,
                 number_cell(one.one_stage, ".3f"), number_cell(one.average, ".3f"),
                 *seconds_cells(one.model, one.found), number_cell(one.peak / 2 ** 30, ".1f")]
                for one in found if one.row.table == table]
        parts.append(Table(f"{HEADINGS[table]}, {name} of {of}{stages} stages and "
                           f"{schedule.microbatches} micro-batches{zero} (a model): "
                           f"{outcome.machine.described}", columns, rows))
    again = ", ".join(TITLES[scheme] for scheme, on in outcome.fit.recompute.items() if on)
    about = Notes("About these rows:", [
        f"{outcome.fit.layers} layers and the achieved fractions of the fit to the paper's "
        f"tables, which have no pipelines: nothing published stands beside this. Backward "
        f"repeats the forward in {again or 'no scheme'}.",
        "Without stages: the same ranks on one grid. GiB: the peak of a rank of the stage that "
        "needs the most, by a dry run.",
        *(f"Left out: {why}." for why in missing)])
    return [*parts, *[seconds_notes(several)] * bool(found), about]


def plan_parts(model_found: Sequence[tuple[PipelineModel, PredictedPipeline, float, bool]],
               screened: int) -> list[Part]:
    """Make the table of plans: model, prediction, peak bytes of a rank, and whether it fits."""
    rows = [[model.scheme, model.grid_name, *seconds_cells(model, found),
             number_cell(peak / 2 ** 30, ".2f"), "yes" if fits else "NO"]
            for model, found, peak, fits in model_found]
    first = model_found[0][0]
    schedule, data = first.schedule, first.replicas
    of, zero = (f"{data} replicas of ", f", ZeRO {first.zero}") if data > 1 else ("", "")
    return [Table(f"Schemes and grids of a stage by predicted step time, {of}{schedule.ranks} "
                  f"stages, {schedule.microbatches} micro-batches{zero}", [
                      Column("scheme"), Column("grid", align="<"), *seconds_columns(data),
                      Column("GiB", align="."), Column("fits", align="<")], rows),
            Notes("Remarks", [
                f"{screened} plans of a stage screened by closed forms, {len(rows)} of them "
                f"run dry; memory is that of the stage with the most, with the masters and "
                f"moments of AdamW"]),
            seconds_notes(data)]
