"""Make the tables of whole trainings: the best plans, what fills them, and what limits them."""

import math
import shlex
from typing import Sequence

from bench.document import Cell, Column, Notes, Part, Table, number_cell
from bench.prediction.pipelines.training_step import SHARES
from bench.prediction.training_plans.choices import Choice, Training
from bench.prediction.training_plans.dimensions import DIMENSIONS, inside_nodes, pruned
from bench.prediction.training_plans.search import Found, TrainingPlan

GIB = 2 ** 30
IN_FLIGHT = 8    # sums over replicas, in the options of train
OVERLAPS = {
    False: "sums and gathers over replicas are not hidden, as in train without --in-flight; "
           "--hide-sums assumes that they are",
    True: "assumed: sums over replicas go on behind backward, and gathers behind forward, as far "
          "as these take longer; train --in-flight hides sums, and gathers nothing ahead; what is "
          "in flight takes no memory here"}
KINDS = ("values", "gradients", "masters", "moments", "activations", "buffers")
BOTTLENECKS = {"products": "products", "elementwise": "elementwise passes",
               "links": "links inside a stage", "latency": "latency",
               "hops": "hops between stages", "replicas": "sums over replicas",
               "optimizer": "optimizer", "bubble": "bubble"}


def training_parts(training: Training, found: Found, unfit: bool, top: int) -> list[Part]:
    """Make all tables and notes of a search: of the `top` families, and with `unfit` of others."""
    plans = list(found.families.values())[:top]
    return [*headings(training), training_plan_table(training, plans), plan_memory_table(plans),
            time_table(plans),
            *([unfit_table(training, found.unfit)] if unfit and found.unfit else []),
            changes_table(training, found),
            Notes("The best plan as options", command_lines(training, found.best)),
            remarks(training, found)]


def headings(training: Training) -> list[Part]:
    """Name the machine, and what is trained on it."""
    return [training.machine.described,
            f"{training.gpus} GPU{'s' * (training.gpus > 1)}, {training.gpt.name}, "
            f"{training.batch} sequences of {training.seq} tokens, "
            f"{training.batch * training.seq:,} tokens a step, {training.dtype}"]


def training_plan_table(training: Training, plans: Sequence[TrainingPlan]) -> Table:
    """Make the table of plans: how GPUs divide the training, and how fast each is."""
    routed, long = training.gpt.experts is not None, training.long
    rows = [[plan.choice.family, *choice_cells(plan.choice, routed, long), *map(
        number_cell, step_rates(training, plan))] for plan in plans]
    return Table("The fastest plan of each family", [
        Column("family", align="<"), *choice_columns(routed, long), Column("step s", align="."),
        *(Column(*head, align=".") for head in (
            ("tokens/s", "a GPU"), ("Tflop/s", "a GPU"), ("MFU", "%"), ("HFU", "%")))], rows)


def choice_columns(experts: bool = False, long: bool = False) -> list[Column]:
    """Return the columns of `choice_cells`."""
    return [Column("data"), *[Column("context", align="<")] * long,
            *[Column("experts", "on")] * experts, Column("ZeRO"),
            Column("shards"), Column("stages"),
            Column("schedule", align="<"), Column("micro-", "batch"), Column("scheme", align="<"),
            Column("grid", align="<"), Column("inside", "nodes", align="<"),
            Column("recompute", align="<")]


def choice_cells(choice: Choice, experts: bool = False, long: bool = False) -> list[Cell]:
    """Return the cells that say how a plan divides the training, perhaps with its `experts`.

    If sequences are `long`, the context is among them.
    """
    return [choice.data, *[DIMENSIONS["context"].said(choice)] * long,
            *[choice.expert_parallel] * experts, choice.zero,
            choice.parts if choice.zero else "-", choice.stages, choice.schedule, choice.micro,
            choice.scheme, choice.grid.compact, inside_nodes(choice), choice.recompute]


def step_rates(training: Training, plan: TrainingPlan) -> tuple[float, ...]:
    """Return the seconds of a step, tokens a second, Tflop/s of a GPU, and MFU and HFU in percent.
    """
    seconds, gpus = plan.seconds, training.gpus
    own = {name: count / seconds / gpus for name, count in plan.flops.items()}
    rate = training.machine.gemm_rate[training.dtype]
    return (seconds, training.batch * training.seq / seconds / gpus, own["model"] / 1e12,
            100 * own["model"] / rate, 100 * own["hardware"] / rate)


def plan_memory_table(plans: Sequence[TrainingPlan]) -> Table:
    """Make the table of what fills the memory of the fullest GPU."""
    rows = [[plan.choice.family, *(number_cell(plan.memory[kind] / GIB, ".3g")
                                   for kind in ("all", *KINDS))] for plan in plans]
    return Table("What fills the fullest GPU", [Column("family", align="<"), *(
        Column(name, group="GiB", align=".") for name in ("all", *KINDS))], rows)


def time_table(plans: Sequence[TrainingPlan]) -> Table:
    """Make the table of the shares of a step's time, and name the largest but products."""
    rows = []
    for plan in plans:
        shares = {name: 100 * plan.step.shares[name] / plan.seconds for name in SHARES}
        limit = max((name for name in SHARES if name != "products"), key=shares.__getitem__)
        rows.append([plan.choice.family, *(number_cell(shares[name], ".1f") for name in SHARES),
                     BOTTLENECKS[limit]])
    return Table("What takes the time of a step", [
        Column("family", align="<"), *(Column(name, group="%", align=".") for name in SHARES),
        Column("largest beside", "products", align="<")], rows)


def unfit_table(training: Training, plans: Sequence[TrainingPlan]) -> Table:
    """Make the table of plans that were predicted and do not fit, with what they lack."""
    limit = training.machine.memory_bytes
    routed, long = training.gpt.experts is not None, training.long
    rows = [[plan.choice.family, *choice_cells(plan.choice, routed, long),
             number_cell(plan.seconds),
             number_cell((plan.memory["all"] - limit) / GIB, ".3g")] for plan in plans]
    return Table("Predicted plans that do not fit", [
        Column("family", align="<"), *choice_columns(routed, long), Column("step s", align="."),
        Column("lacks", "GiB", align=".")], rows)


def changes_table(training: Training, found: Found) -> Table:
    """Make the table of what the best plan loses where one choice alone is another."""
    best, rows = found.best, []
    for name, plan in found.changes.items():
        said = DIMENSIONS[name].said
        if isinstance(plan, str):
            rows.append([name, said(best.choice), plan, *[number_cell(math.nan)] * 2])
            continue
        rows.append([name, said(best.choice), said(plan.choice),
                     number_cell(plan.seconds),
                     number_cell(100 * (plan.seconds / best.seconds - 1), "+.2f")])
    return Table("One choice of the best plan changed, to the fastest other that fits", [
        Column("choice", align="<"), Column("best", align="<"), Column("changed", align="<"),
        Column("step s", align="."), Column("more", "%", align=".")], rows)


def command_lines(training: Training, plan: TrainingPlan) -> list[str]:
    """Return the commands that count, train and submit a plan."""
    choice, machine = plan.choice, training.machine
    sizes = (f"{training.asked or f'--model {training.gpt.name}'} --batch {training.batch} --seq "
             f"{training.seq} --dtype {training.dtype}")
    shards = f"--shards {choice.shards} " * bool(choice.shards)
    context = f"--context {choice.context} --context-way {choice.way} " * (choice.context > 1)
    mesh = (f"--data {choice.data} {context}--zero {choice.zero} {shards}--stages {choice.stages} "
            f"--schedule {choice.schedule} --microbatches {training.microbatches(choice)} "
            f"--scheme {choice.scheme} --grid {choice.grid.compact} --recompute "
            f"{choice.recompute}" + f" --inside {choice.inside}" * bool(choice.inside)
            + f" --expert-parallel {choice.expert_parallel}" * (choice.expert_parallel > 1))
    trained = f"{sizes} {mesh}" + f" --in-flight {IN_FLIGHT}" * training.overlap
    return [f"python -m bench dry --ranks {training.gpus} {sizes} {mesh} --rank "
            f"{plan.fullest[0] * choice.places} --memory {machine.memory_bytes:.0f} --machine "
            + shlex.quote(training.named or machine.name) + " --hide-sums" * training.overlap,
            f"mpirun -n {training.gpus} python -m bench train {trained}",
            f"python -m jobs train --site gpu8 --ranks {training.gpus} -- {trained}"]


def remarks(training: Training, found: Found) -> Notes:
    """Say what was searched, what the columns are, and what the model is."""
    counts, gpt = found.counts, training.gpt
    first = next(iter(found.refused.items()), None)
    return Notes("Remarks", [
        f"{counts['candidates']} plans, {counts['too large']} of them too large for "
        f"{training.machine.memory_bytes / GIB:.3g} GiB by closed forms; these, and dry runs of "
        f"{counts['layers']} layers, bound the seconds of the others from below, in every place "
        f"on the nodes; {counts['exact']} steps run dry, of all that could be the fastest of "
        f"their family{f' by {found.doubt:.0%}' * bool(found.doubt)}, in {found.seconds:.1f} s",
        f"not searched: {pruned(training)}",
        *([f"the library refused {len(found.refused)} plans that were to be predicted; the first, "
           f"{first[0]}: {first[1]}"] if first else []),
        OVERLAPS[training.overlap],
        *(["experts on: the neighbouring replicas that divide the experts; tokens are assumed to "
           "choose all experts equally often"] if gpt.experts else []),
        "shards: replicas that divide one copy of the model by ZeRO; inside nodes: the direction "
        "of the mesh that varies fastest from rank to rank (d among these replicas, r across "
        "copies, s stages)" + "; one direction: of 3-D grids those that divide x or z alone"
        * any("one direction" in name for name in found.families),
        f"memory is exact, that of a dry run of a step, by which {len(found.unfit)} plans did not "
        f"fit; seconds are a model",
        "MFU: operations of all products over the seconds and the rate of products of the "
        "machine, forward and twice again backward, scores without regard to the mask, and the "
        "head (arXiv 2104.04473, equation 3); HFU: with those that recomputation repeats",
        f"{gpt.name}: {gpt.parameters / 1e9:.4g} billion parameters"
        + f"; sizes: {gpt.source}" * bool(gpt.source),
        "dry counts the rank that is full, and predicts the step; train has the bytes of its text "
        "as vocabulary; sites of jobs are in jobs/sites"])
