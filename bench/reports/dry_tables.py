"""Make tables of dry runs: the work of a rank in a step, and predicted pipelines."""

from collections import Counter, defaultdict
from typing import Sequence

from bench.cases.paper import HEADINGS, TITLES
from bench.cases.variants import itemsize
from bench.document import Column, Notes, Number, Part, Table, number_cell
from bench.prediction import machine_model
from bench.prediction.kernels import priced
from bench.prediction.memory_fit import state_by_kind
from bench.prediction.pipelines.pipeline_model import PipelineModel
from bench.prediction.pipelines.pipeline_seconds import PredictedPipeline
from bench.prediction.pipelines.training_step import SHARES, TrainingStep
from bench.prediction.published.paper_fit import Outcome
from bench.prediction.published.paper_pipelines import RowPipeline
from bench.prediction.seconds import TERMS, trace_terms
from mm3d.grid.axis import Traffic
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.experts.token_order import capacity_of
from mm3d.model.stack import Stack
from mm3d.tracing.events import Boundary, Call, Collective, Gemm, MemoryPass, Overlapped
from mm3d.tracing.trace import Trace
from mm3d.training.schedules import Schedule

COUNTED = "words, bytes and messages are counted by the bucket algorithm; nothing travels"
NOT_HIDDEN = "products hide no collective; "    # in the title of seconds of a step with overlap


def dry_tables(trace: Trace, useful: dict[str, int], machine: machine_model.Machine | None = None,
               stack: Stack | None = None) -> list[Table]:
    """Make the tables of a dry run, with predicted seconds where a machine is given.

    `useful`: flops of all ranks by phase, without recomputation (`mm3d.model.cost.flops`).
    """
    bytes_of = {"parameters and gradients": trace.parameters,
                "kept from forward to backward": trace.saved,
                "peak of the model's arrays": trace.pool_peak,
                "peak with intermediate arrays": trace.peak}
    found = [phase_table(trace, useful), collective_table(trace), part_table(trace),
             Table("Memory of this rank", [Column("arrays"), Column("bytes")],
                   [[name, _count(count)] for name, count in bytes_of.items()])]
    return [*found, predicted_table(priced(trace, machine, stack), machine)] if machine else found


def _count(number: int) -> Number:
    """Make a cell of a whole number, printed with commas between thousands."""
    return Number(number, f"{number:,}")


def phase_table(trace: Trace, useful: dict[str, int]) -> Table:
    """Make the table of flops, words, messages and elementwise work by phase."""
    again = {"backward": trace.flops_again(), "backward_input": trace.flops_again()}
    rows = [[phase, *map(_count, (
                trace.flops(phase), again.get(phase, 0), useful[phase], trace.words(phase),
                sum(t.messages for t in trace.traffic[phase].values()),
                sum(e.bytes * n for e, n in trace.count(MemoryPass, phase).items())))]
            for phase in trace.phases]
    return Table("A step of this rank", [
        Column("phase"), Column("flops"), Column("of these again"),
        Column("useful flops of all ranks"), Column("words counted"), Column("messages"),
        Column("bytes of elementwise work")], rows)


def collective_table(trace: Trace) -> Table:
    """Make the table of collectives, with those in flight during products if there are any."""
    groups = {e.direction: (e.size, e.stride) for e in trace.count(Collective)}
    in_flight = {phase: _begun(trace, phase) for phase in trace.phases}
    overlap = any(in_flight.values())
    rows = [[phase, axis, kind, *map(_count, (
                *groups[axis], t.calls, *[in_flight[phase][axis, kind]] * overlap, t.messages,
                t.words, t.bytes))]
            for phase in trace.phases for (axis, kind), t in sorted(trace.traffic[phase].items())]
    names = ["ranks", "stride", "calls", *["in flight"] * overlap, "messages", "words", "bytes"]
    return Table(f"Collectives: {COUNTED}", [
        Column("phase"), Column("direction", align="<"), Column("collective", align="<"),
        *map(Column, names)], rows)


def _begun(trace: Trace, phase: str) -> Counter[tuple[str, str]]:
    """Count the collectives begun before products, by direction and kind."""
    found: Counter[tuple[str, str]] = Counter()
    for event, times in trace.count(Overlapped, phase).items():
        if event.call == "begin":
            found[event.direction, event.kind] += times
    return found


def part_table(trace: Trace) -> Table:
    """Make the table of work and traffic by part of a Transformer layer, over all layers."""
    found: dict = defaultdict(lambda: [0, 0, 0, 0])
    for (phase, part, event), times in trace.events.items():
        if phase not in trace.phases or isinstance(event, (Boundary, Call, Overlapped)):
            continue
        row = found[phase, part]
        if isinstance(event, Gemm):
            row[0] += times * event.flops
        elif isinstance(event, MemoryPass):
            row[1] += times * event.bytes
        else:
            row[2] += times
            row[3] += times * event.bytes
    return Table("Parts of all layers", [
        Column("phase"), Column("part", align="<"), Column("flops"),
        Column("bytes of elementwise work"), Column("collectives"),
        Column("bytes of their wholes")],
        [[*key, *map(_count, row)] for key, row in found.items()])


def state_table(stored: int, data: int, dtype: str, divided: int = 0,
                groups: int = 1) -> Table:
    """Make the table of a rank's bytes of state in each stage of ZeRO, with AdamW.

    `stored` are the bytes of this rank's parameters and gradients, without replicas and masters,
    and `divided` its part for experts that replicas divide in every stage: ZeRO divides it further
    among the groups of replicas that together hold all experts.  Types of 16 bits have masters in
    float32, and moments are of the master's type.
    """
    narrow, rows = itemsize(dtype) == 2, []
    for zero, name in enumerate(("0: replicas", "1: optimizer", "2: and gradients",
                                 "3: and parameters")):
        kinds = state_of(stored, dtype, zero, data, divided, groups)
        every = sum(kinds.values())
        if narrow:    # as in values
            kinds["gradients"] /= 2
        rows.append([name, *(_count(round(count)) for count in (
            *kinds.values(), sum(kinds.values()), *[every] * narrow))])
    wide = [Column("all, float32 gradients")] if narrow else []
    note = "; mm3d's gradients are float32 where there are masters" * narrow
    return Table(f"State of this rank in bytes: {data} replicas, AdamW, by stage of ZeRO{note}", [
        *map(Column, ("stage", "values", "gradients", "masters", "moments", "all")), *wide], rows)


def state_of(stored: int, dtype: str, zero: int, data: int, divided: int,
             groups: int) -> dict[str, float]:
    """Return the result of `state_by_kind`; arguments as of `state_table`."""
    parts = [state_by_kind(dtype, count / (2 * itemsize(dtype)), zero, shards)
             for count, shards in ((stored - divided, data), (divided, groups))]
    return {name: sum(one[name] for one in parts) for name in parts[0]}


def predicted_table(trace: Trace, machine: machine_model.Machine) -> Table:
    """Make the table of predicted seconds on a machine, by the resource that takes them."""
    spent = trace_terms(machine, trace)
    rows = []
    for phase in trace.phases:
        taken = [v / getattr(machine.achieved, t) for t, v in spent[phase].items()]
        rows.append([phase, *map(number_cell, (sum(taken), *taken))])
    fits = ("fits without an optimizer" if trace.peak <= machine.memory_bytes
            else "does not fit")
    hidden = NOT_HIDDEN * bool(trace.count(Overlapped))
    return Table(f"Predicted seconds (a model; {hidden}{fits} into "
                 f"{machine.memory_bytes / 2**30:.1f} GiB a rank): {machine.described}",
                 [Column("phase"), Column("seconds", align="."),
                  *(Column(term, align=".") for term in TERMS)], rows)


def expert_notes(experts: ExpertOptions, trace: Trace, data: int, tokens: int) -> Notes:
    """State the assumed routing, and which words are counted between replicas."""
    every, capacity = data * tokens, capacity_of(experts, data * tokens)
    share = every * experts.top / experts.count
    lines = [f"The routing is assumed, not computed: of {every:,} tokens that are routed "
             f"together, each to {experts.top} of {experts.count} experts, every expert gets "
             f"{share:,.6g}. For that routing all counts are exact; a router that is trained "
             f"chooses otherwise.",
             "Nothing is dropped." if capacity is None else
             f"An expert takes {capacity:,} pairs of token and choice at most (capacity "
             f"{experts.capacity:g}); rows beyond are dropped, and not counted."]
    kinds = {kind for moved in trace.traffic.values() for direction, kind in moved
             if direction == "e"}
    if trace.divided:
        way = ("exchanged: an all-to-all of rows of tokens brings them to their experts, and "
               "another one brings the results back, and the same for gradients"
               if "all_to_all" in kinds else "gathered: all tokens come to all replicas, and "
               "sums of the results are scattered")
        lines.append(f"Direction e has the replicas that divide the experts. Rows are {way}. Its "
                     f"other all-gathers move counts of choices.")
    if data > 1:
        lines.append("The sums of gradients over replicas are not in these tables.")
    return Notes("About the experts (a model, not a run):", lines)


def plan_notes(experts: ExpertOptions) -> Notes:
    """Say what the plans of a model with experts assume."""
    capacity = experts.capacity
    dropped = ("nothing is dropped" if capacity is None else
               f"capacity {capacity:g} drops hardly any then" if capacity >= 1 else
               f"the rows that capacity {capacity:g} drops are left out of seconds")
    return Notes("About the experts (a model, not a run):", [
        f"{experts.count} experts in one of {experts.every} layers, top {experts.top}. Every "
        f"expert is assumed to get equally many tokens, and {dropped}. They are all in each "
        f"replica, divided by the scheme as any weight: no replicas divide them.",
        "Plans are screened by closed forms, in which the products of all experts are as fast as "
        "one and elementwise work is that of a model without experts; seconds and memory of the "
        "best are from dry runs, in which neither is so. Words are exact where nothing is "
        "dropped, else a bound; in 2.5d they lack sums over the layers. No lower bound is given "
        "for products in which rows have weights of their own."])


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
