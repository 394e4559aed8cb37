"""Make the tables of plans of a layer, and of whole trainings: what fills and what limits them."""

import math
import shlex
from typing import Any, Callable, Sequence

from bench.document import Cell, Column, Notes, Part, Table, make_table, spread
from bench.prediction.closed_form_plan import GridPlan
from bench.prediction.pipelines.training_step import SHARES
from bench.prediction.planner import bound_regime
from bench.prediction.training_plans.choices import Choice, Training
from bench.prediction.training_plans.dimensions import DIMENSIONS, inside_nodes, pruned
from bench.prediction.training_plans.search import Found, TrainingPlan
from mm3d import ModelSizes
from mm3d.model import cost
from mm3d.schemes import find_scheme

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
    kinds = ("all", *KINDS)
    return [
        *headings(training),
        make_table("The fastest plan of each family", [
            FAMILY, *choice_columns(_choice, training), *spread(
                lambda plan: step_rates(training, plan), ".4g", align=".",
                heads=("step s", "tokens/s", "Tflop/s", "MFU", "HFU"),
                units=("", "a GPU", "a GPU", "%", "%"))], plans),
        make_table("What fills the fullest GPU", [FAMILY, *spread(
            lambda plan: [plan.memory[kind] / GIB for kind in kinds], ".3g", "GiB", kinds,
            align=".")], plans),
        make_table("What takes the time of a step", [
            FAMILY, *share_columns(lambda plan: plan),
            Column("largest beside", "products", align="<", of=lambda plan: BOTTLENECKS[max(
                (name for name in SHARES if name != "products"),
                key=plan.step.shares.__getitem__)])], plans),
        *([unfit_table(training, found.unfit)] if unfit and found.unfit else []),
        changes_table(training, found),
        Notes("The best plan as options", command_lines(training, found.best)),
        remarks(training, found)]


def _choice(plan: TrainingPlan) -> Choice:
    return plan.choice


FAMILY = Column("family", align="<", of=lambda plan: plan.choice.family)


def headings(training: Training) -> list[Part]:
    """Name the machine, and what is trained on it."""
    return [training.machine.described,
            f"{training.gpus} GPU{'s' * (training.gpus > 1)}, {training.gpt.name}, "
            f"{training.batch} sequences of {training.seq} tokens, "
            f"{training.batch * training.seq:,} tokens a step, {training.dtype}"]


def choice_columns(of: Callable[[Any], Choice | None],
                   training: Training | None = None) -> list[Column]:
    """Describe how a plan divides the training, with experts and a long context if it has any.

    `of` returns the choice of a row; the cells of one without a choice are empty.
    """
    def column(name: str, said: Callable[[Choice], Cell], unit: str = "",
               align: str = ">") -> Column:
        return Column(name, unit, align=align, of=lambda row: "" if (
            choice := of(row)) is None else said(choice))
    routed = training is not None and training.gpt.experts is not None
    long = training is not None and training.long
    return [column("data", lambda one: one.data),
            *[column("context", DIMENSIONS["context"].said, align="<")] * long,
            *[column("experts", lambda one: one.expert_parallel, "on")] * routed,
            column("ZeRO", lambda one: one.zero),
            column("shards", lambda one: one.parts if one.zero else "-"),
            column("stages", lambda one: one.stages),
            column("schedule", lambda one: one.schedule, align="<"),
            column("micro-", lambda one: one.micro, "batch"),
            column("scheme", lambda one: one.scheme, align="<"),
            column("grid", lambda one: one.grid.compact, align="<"),
            column("inside", inside_nodes, "nodes", "<"),
            column("recompute", lambda one: one.recompute, align="<")]


def share_columns(of: Callable[[Any], TrainingPlan]) -> list[Column]:
    """Describe the shares of a step's time, of the plan that `of` returns for a row."""
    return spread(lambda row: [100 * of(row).step.shares[name] / of(row).seconds
                               for name in SHARES], ".1f", "%", SHARES, align=".")


def step_rates(training: Training, plan: TrainingPlan) -> tuple[float, ...]:
    """Return seconds of a step, tokens a second, Tflop/s of a GPU, and MFU and HFU in percent."""
    seconds, gpus = plan.seconds, training.gpus
    own = {name: count / seconds / gpus for name, count in plan.flops.items()}
    rate = training.machine.gemm_rate[training.dtype]
    return (seconds, training.batch * training.seq / seconds / gpus, own["model"] / 1e12,
            100 * own["model"] / rate, 100 * own["hardware"] / rate)


def unfit_table(training: Training, plans: Sequence[TrainingPlan]) -> Table:
    """Make the table of plans that were predicted and do not fit, with what they lack."""
    limit = training.machine.memory_bytes
    return make_table("Predicted plans that do not fit", [
        FAMILY, *choice_columns(_choice, training),
        Column("step s", align=".", of=lambda plan: plan.seconds),
        Column("lacks", "GiB", align=".", form=".3g",
               of=lambda plan: (plan.memory["all"] - limit) / GIB)], plans)


def changes_table(training: Training, found: Found) -> Table:
    """Make the table of what the best plan loses where one choice alone is another."""
    best = found.best

    def seconds(row: tuple[str, TrainingPlan | str]) -> float:
        return math.nan if isinstance(row[1], str) else row[1].seconds
    return make_table("One choice of the best plan changed, to the fastest other that fits", [
        Column("choice", align="<", of=lambda row: row[0]),
        Column("best", align="<", of=lambda row: DIMENSIONS[row[0]].said(best.choice)),
        Column("changed", align="<", of=lambda row: (
            row[1] if isinstance(row[1], str) else DIMENSIONS[row[0]].said(row[1].choice))),
        Column("step s", align=".", of=seconds),
        Column("more", "%", align=".", form="+.2f",
               of=lambda row: 100 * (seconds(row) / best.seconds - 1))], found.changes.items())


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
        f"memory follows from dry runs of a few layers, by which {len(found.unfit)} plans did not "
        f"fit; seconds are a model",
        "MFU: operations of all products over the seconds and the rate of products of the "
        "machine, forward and twice again backward, scores without regard to the mask, and the "
        "head (arXiv 2104.04473, equation 3); HFU: with those that recomputation repeats",
        f"{gpt.name}: {gpt.parameters / 1e9:.4g} billion parameters"
        + f"; sizes: {gpt.source}" * bool(gpt.source),
        "dry counts the rank that is full, and predicts the step; train has the bytes of its text "
        "as vocabulary; sites of jobs are in jobs/sites"])


def plan_table(plans: Sequence[GridPlan], fits: Sequence[str]) -> Table:
    """Make the table of plans, with the text of `fits` for each."""
    def numbers(row: tuple[GridPlan, str]) -> tuple[float, ...]:
        plan, _ = row
        return (plan.seconds, plan.forward, plan.backward, plan.words["forward"] / 1e6,
                plan.words["backward"] / 1e6, plan.over_bound, plan.memory / 2**30)
    return make_table("Schemes and grids by predicted step time", [
        Column("scheme", of=lambda row: row[0].scheme),
        Column("grid", align="<", of=lambda row: str(row[0].grid)),
        *spread(numbers, ".4g", align=".", heads=(
            "step s", "forward s", "backward s", "Mwords fwd", "Mwords bwd", "/ bound", "GiB")),
        Column("fits without", "an optimizer", align="<", of=lambda row: row[1])],
        zip(plans, fits))


def plan_remarks(plans: Sequence[GridPlan], sizes: ModelSizes, ranks: int, took: float,
                 experts: bool = False) -> Notes:
    """State the fewest words, default grids, and seconds of planning; no bound of experts."""
    least = min(plans, key=lambda p: p.words["forward"])
    lines = [f"fewest words forward: {least.scheme} {least.grid}, "
             f"{least.words['forward'] / 1e6:.4g} million a rank"]
    for scheme in dict.fromkeys(p.scheme for p in plans):
        lines += _default(scheme, plans, least, ranks)
    kinds = {bound_regime(*product.extents, ranks)
             for product in cost.list_products(ModelSizes(**sizes))}
    if not experts:
        lines.append("regime of the lower bound for the products: "
                     + ", ".join(f"{kind}-D" for kind in sorted(kinds)))
    lines += [f"{len(plans)} plans screened, {sum(p.traced for p in plans)} traced in "
              f"{took:.1f} s",
              "words are those of the bucket algorithm, exactly; memory of what is traced is a "
              "dry run's of rank 0; seconds are a model"]
    return Notes("Remarks", lines)


def _default(scheme: str, plans: Sequence[GridPlan], least: GridPlan, ranks: int) -> list[str]:
    """State the words of the default grid of a scheme that has several grids."""
    own = {p.grid: p for p in plans if p.scheme == scheme}
    try:
        grid = find_scheme(scheme).grid_shape(find_scheme(scheme).default_grid(ranks))
    except ValueError:    # such as no cube
        return []
    if len(own) == 1 or grid not in own:
        return []
    moved, fewest = own[grid].words["forward"], least.words["forward"]
    # Replicas of all weights move none.
    times = f", {moved / fewest:.3g} times as many" if fewest else ""
    return [f"{scheme} on its default grid, {grid}: {moved / 1e6:.4g} million forward{times}; "
            f"{own[grid].seconds:.4g} s"]
