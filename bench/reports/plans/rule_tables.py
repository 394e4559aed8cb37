"""Make the tables of rules of thumb beside the planner's own choice."""

import math
from typing import Sequence

from bench.document import Column, Notes, Part, Table, make_table, spread
from bench.prediction.machine_model import Machine
from bench.prediction.meshes.rules_of_thumb import SIMPLE, Rules, Tested
from bench.prediction.pipelines.training_step import SHARES
from bench.prediction.training_plans.choices import FEW_GPUS
from bench.prediction.training_plans.search import DOUBT, TrainingPlan
from bench.reports.plans.training_plans import (BOTTLENECKS, GIB, choice_columns, share_columns,
                                                step_rates)


def rule_parts(rules: Rules, machine: Machine, found: Sequence[Sequence[Tested]]) -> list[Part]:
    """Make all tables and notes; of the plans of a rule the planner's own is the last."""
    shares = make_table("What takes the time of a step", [
        Column("model", align="<", of=lambda one: one.rule.size),
        Column("by", align="<", of=lambda one: one.by), *share_columns(lambda one: one.plan)],
        [one for group in found for one in group if one.plan is not None])
    return [machine.described, _rule_table(rules, found), _plan_table(found), shares,
            *_problems(found), _remarks(rules)]


def _rule_table(rules: Rules, found: Sequence[Sequence[Tested]]) -> Table:
    """Make the table of the rules as printed, and of what is trained."""
    printed = any(rule.tflops or rule.mfu for rule in rules.rules)
    rows = [(rule, one.training) for rule, (one, *_) in zip(rules.rules, found)]
    return make_table(rules.title, [
        Column("model", align="<", of=lambda row: row[0].size),
        Column("TP", of=lambda row: " or ".join(map(str, row[0].tensor))),
        Column("PP", of=lambda row: row[0].stages), Column("DP", of=lambda row: row[0].data),
        Column("GPUs", of=lambda row: row[0].gpus),
        Column("trained", align="<", of=lambda row: row[1].gpt.name),
        Column("parameters", "billion", align=".", of=lambda row: row[1].gpt.parameters / 1e9),
        Column("sequences", "a step", of=lambda row: row[0].batch),
        Column("tokens in", "a sequence", of=lambda row: row[1].seq),
        *spread(lambda row: [float(value or math.nan) for value in (row[0].tflops, row[0].mfu)],
                ".4g", "measured there", ("Tflop/s", "MFU"), ("a GPU", "%"), ".") * printed], rows)


def _plan_table(found: Sequence[Sequence[Tested]]) -> Table:
    """Make the table of plans, their seconds, and by what a rule loses the most."""
    return make_table("Rules, the decision tree and the planner (seconds are a model)", [
        Column("model", align="<", of=lambda row: row[0].rule.size),
        Column("by", align="<", of=lambda row: row[0].by),
        *choice_columns(lambda row: row[0].plan and row[0].plan.choice),
        Column("micro-", "batches", of=lambda row: "" if row[0].plan is None else (
            row[0].training.microbatches(row[0].plan.choice))),
        Column("step s", align=".", of=lambda row: _figures(*row)[0]),
        Column("MFU", "%", align=".", of=lambda row: _figures(*row)[1], form=".1f"),
        Column("slower", "%", align=".", of=lambda row: _figures(*row)[2], form="+.1f"),
        Column("lacks", "GiB", align=".", of=lambda row: _figures(*row)[3], form=".3g"),
        Column("loses the", "most by", align="<", of=lambda row: _figures(*row)[4])],
        [(one, group[-1]) for group in found for one in group])


def _figures(one: Tested, planner: Tested) -> tuple[float, float, float, float, str]:
    """Return seconds, MFU, by how much slower than the planner's, memory lacked, and why."""
    if one.plan is None:
        return *[math.nan] * 4, "no plan, see below"
    seconds, _, _, used, _ = step_rates(one.training, one.plan)
    slower, why = math.nan, ""
    if one is not planner and planner.plan is not None:
        slower = 100 * (seconds / planner.plan.seconds - 1)
        why = _largest_loss(one.plan, planner.plan)
    if one.lacks:
        return seconds, used, slower, one.lacks / GIB, "does not fit"
    return seconds, used, slower, math.nan, why


def _largest_loss(plan: TrainingPlan, best: TrainingPlan) -> str:
    """Name the share of time by which a plan loses most to the best; "" if none."""
    more = {name: plan.step.shares[name] - best.step.shares[name] for name in SHARES}
    name = max(more, key=more.__getitem__)
    return f"{BOTTLENECKS[name]}, {more[name]:.2g} s" if more[name] > 1e-4 * best.seconds else ""


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
