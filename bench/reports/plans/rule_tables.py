"""Make the tables of rules of thumb beside the planner's own choice."""

import math
from typing import Sequence

from bench.document import Cell, Column, Notes, Part, Table, number_cell
from bench.prediction.machine_model import Machine
from bench.prediction.meshes.rules_of_thumb import SIMPLE, Rule, Rules, Tested
from bench.prediction.pipelines.training_step import SHARES
from bench.prediction.training_plans.choices import FEW_GPUS
from bench.prediction.training_plans.search import DOUBT, TrainingPlan
from bench.reports.plans.training_plans import (BOTTLENECKS, GIB, choice_cells, choice_columns,
                                                step_rates)


def rule_parts(rules: Rules, machine: Machine, found: Sequence[Sequence[Tested]]) -> list[Part]:
    """Make all tables and notes; of the plans of a rule the planner's own is the last."""
    return [machine.described, _rule_table(rules, found), _plan_table(found),
            _share_table(found), *_problems(found), _remarks(rules)]


def _rule_table(rules: Rules, found: Sequence[Sequence[Tested]]) -> Table:
    """Make the table of the rules as printed, and of what is trained."""
    rows, printed = [], any(rule.tflops or rule.mfu for rule in rules.rules)

    def measured(rule: Rule) -> list[Cell]:
        return [number_cell(value or math.nan, ".4g") for value in (rule.tflops, rule.mfu)
                if printed]
    for rule, (one, *_) in zip(rules.rules, found):
        gpt = one.training.gpt
        rows.append([rule.size, " or ".join(map(str, rule.tensor)), rule.stages, rule.data,
                     rule.gpus, gpt.name, number_cell(gpt.parameters / 1e9), rule.batch,
                     one.training.seq, *measured(rule)])
    return Table(rules.title, [
        Column("model", align="<"), Column("TP"), Column("PP"), Column("DP"), Column("GPUs"),
        Column("trained", align="<"), Column("parameters", "billion", align="."),
        Column("sequences", "a step"), Column("tokens in", "a sequence"),
        *(Column(*head, group="measured there", align=".") for head in (
            ("Tflop/s", "a GPU"), ("MFU", "%")) if printed)], rows)


def _plan_table(found: Sequence[Sequence[Tested]]) -> Table:
    """Make the table of plans, their seconds, and by what a rule loses the most."""
    rows = [[one.rule.size, one.by, *_choice(one), *_figures(one, group[-1])]
            for group in found for one in group]
    return Table("Rules, the decision tree and the planner (seconds are a model)", [
        Column("model", align="<"), Column("by", align="<"), *choice_columns(),
        Column("micro-", "batches"), Column("step s", align="."),
        Column("MFU", "%", align="."), Column("slower", "%", align="."),
        Column("lacks", "GiB", align="."), Column("loses the", "most by", align="<")], rows)


def _choice(one: Tested) -> list[Cell]:
    """Return the cells of a choice and its micro-batches, empty where there is no plan."""
    if one.plan is None:
        return [""] * (len(choice_columns()) + 1)
    return [*choice_cells(one.plan.choice), one.training.microbatches(one.plan.choice)]


def _figures(one: Tested, planner: Tested) -> list[Cell]:
    """Return seconds, MFU, by how much slower than the planner's, memory lacked, and why."""
    if one.plan is None:
        return [*[number_cell(math.nan)] * 4, "no plan, see below"]
    seconds, _, _, used, _ = step_rates(one.training, one.plan)
    slower, why = math.nan, ""
    if one is not planner and planner.plan is not None:
        slower = 100 * (seconds / planner.plan.seconds - 1)
        why = _largest_loss(one.plan, planner.plan)
    lacks = one.lacks / GIB if one.lacks else math.nan
    return [number_cell(seconds), number_cell(used, ".1f"), number_cell(slower, "+.1f"),
            number_cell(lacks, ".3g"), "does not fit" if one.lacks else why]


def _largest_loss(plan: TrainingPlan, best: TrainingPlan) -> str:
    """Name the share of time by which a plan loses most to the best; "" if none."""
    more = {name: plan.step.shares[name] - best.step.shares[name] for name in SHARES}
    name = max(more, key=more.__getitem__)
    return f"{BOTTLENECKS[name]}, {more[name]:.2g} s" if more[name] > 1e-4 * best.seconds else ""


def _share_table(found: Sequence[Sequence[Tested]]) -> Table:
    """Make the table of the shares of a step's time."""
    rows = [[one.rule.size, one.by, *(number_cell(
        100 * one.plan.step.shares[name] / one.plan.seconds, ".1f") for name in SHARES)]
        for group in found for one in group if one.plan is not None]
    return Table("What takes the time of a step", [
        Column("model", align="<"), Column("by", align="<"),
        *(Column(name, group="%", align=".") for name in SHARES)], rows)


def _problems(found: Sequence[Sequence[Tested]]) -> list[Part]:
    """Say why there is no plan, if there are such."""
    lines = [f"{one.rule.size}, {one.by}: {one.problem}"
             for group in found for one in group if one.plan is None]
    return [Notes("No plan", lines)] if lines else []


def _remarks(rules: Rules) -> Notes:
    """Say what rules leave open and where they contradict themselves, and what the model is."""
    plain = ", ".join(f"{name} {value}" for name, value in SIMPLE.items())
    return Notes("Remarks", [
        f"rules from: {rules.source}",
        f"sequences: {rules.batches}",
        *rules.remarks,
        *(line for rule in rules.rules for line in rule.contradictions),
        f"a rule names a mesh alone: plain is {plain}; else the planner chooses the rest, and "
        f"plain or sequence-parallel 1-D, so that a rule loses by its mesh alone",
        "layers are each model's own, with its grouped heads, gated units and experts",
        "the tree: replicas alone where values, gradients, masters and moments fit one GPU, else "
        "as many ranks of tensor parallelism as they need, at most a node's; it derives the "
        "stages from the replicas and these from the stages, so the planner chooses both",
        "the tree wants more than 4 micro-batches a stage where there are more than 8 stages",
        "memory is exact, that of a dry run of a step; seconds are a model; slower, and what a "
        f"plan loses the most by, are beside the planner's, which above {FEW_GPUS} GPUs may be "
        f"{DOUBT:.0%} slower than the fastest"])
