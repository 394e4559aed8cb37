"""Make the tables of maps of meshes, of ways of a context, and of rules of thumb."""

import math
from typing import Sequence

from bench.document import Column, Notes, Part, Table, make_table, number_cell, spread
from bench.prediction.machine_model import Machine
from bench.prediction.meshes.context_ways import SCHEME, ContextPlace
from bench.prediction.meshes.kind_map import BOX, MESH_KINDS, MapPlace
from bench.prediction.meshes.rules_of_thumb import SIMPLE, Rules, Tested
from bench.prediction.pipelines.training_step import SHARES
from bench.prediction.training_plans.choices import (CONTEXT_WAYS, FEW_GPUS, Choice,
                                                     Training)
from bench.prediction.training_plans.search import DOUBT, TrainingPlan
from bench.reports.plans.training_plans import (BOTTLENECKS, GIB, choice_columns, share_columns,
                                                step_rates)

GB = 1e9


def map_parts(asked: Training, places: Sequence[MapPlace]) -> list[Part]:
    """Make the table of a map, from how many GPUs X x Y x Z is faster, and what was assumed."""
    rows = []
    for one in places:
        seconds = [number_cell(one.best[kind].seconds if kind in one.best else math.nan)
                   for kind in MESH_KINDS]
        gain = math.nan if one.gain is None else 100 * one.gain
        rows.append([one.gpus, number_cell(one.rate / GB), *seconds, number_cell(gain, "+.1f"),
                     *(number_cell(one.exact.get(kind, math.nan)) for kind in MESH_KINDS),
                     *(_short(one.best[kind].choice) if kind in one.best else "none fits"
                       for kind in MESH_KINDS)])
    return [asked.machine.described, map_heading(asked),
            Table("The fastest plan of each kind, by estimate (a model)", [
                Column("GPUs"), Column("links", "GB/s", align="."),
                *(Column(kind, "s", align=".") for kind in MESH_KINDS),
                Column("steps of " + BOX, "more, %", align="."),
                *(Column(kind, "s", "predicted", ".") for kind in MESH_KINDS),
                *(Column(kind, "grid, stages, replicas, micro-batch, recompute", align="<")
                  for kind in MESH_KINDS)], rows),
            Notes("Where each is faster", crossings(places)),
            Notes("Remarks", map_remarks(asked))]


def _short(choice: Choice) -> str:
    """Describe a plan in few words, ending with micro-batch and recomputation."""
    return (f"{choice.grid.compact} {choice.scheme}, {choice.stages} x {choice.schedule}, "
            f"data {choice.data} ZeRO {choice.zero}, {choice.micro}, {choice.recompute}")


def map_heading(asked: Training) -> str:
    """Name what is mapped."""
    return (f"{asked.gpt.name}, {asked.batch} sequences of {asked.seq} tokens a step, "
            f"{asked.dtype}, {asked.machine.name} with other links between nodes")


def crossings(places: Sequence[MapPlace]) -> list[str]:
    """Say for each rate on how many GPUs X x Y x Z is faster."""
    lines = []
    for rate in sorted({one.rate for one in places}):
        better = [str(one.gpus) for one in places
                  if one.rate == rate and one.gain is not None and one.gain > 0]
        lines.append(f"{rate / GB:g} GB/s: {BOX} on {', '.join(better)} GPUs" if better else
                     f"{rate / GB:g} GB/s: {BOX} on none of these")
    return lines


def map_remarks(asked: Training) -> list[str]:
    """Say what the kinds are, and what the model is."""
    per_node, inside = asked.machine.ranks_per_node, asked.machine.node.bytes_per_second
    return ["each kind with or without a pipeline, replicas, ZeRO and recomputation, whichever is "
            "the fastest and fits; 1 x t x 1 is 1-D, plain or sequence-parallel, t from 1; X x Y "
            "x Z has more than one divided direction",
            f"links are those of a node of {per_node} GPUs to all others, in one direction; "
            f"inside a node each GPU has {inside / GB:g} GB/s",
            "layers are the model's own, with its grouped heads, gated units and experts",
            "seconds are estimates by closed forms, of all plans at each rate; predicted are the "
            "fastest by dry runs of a step, at the machine's own rate; none was measured"]


def context_parts(asked: Training, places: Sequence[ContextPlace]) -> list[Part]:
    """Make the table, say where each way wins, and what was assumed."""
    def both(name: str, scale: float, form: str, group: str) -> list[Column]:
        return spread(lambda one: [float(scale * getattr(one.ways[way], name))
                                   for way in CONTEXT_WAYS],
                      form, group, CONTEXT_WAYS, align=".")
    return [asked.machine.described,
            f"{asked.gpt.name}, one layer, one sequence, {asked.dtype}, {SCHEME} in a grid",
            make_table("Keys and values of a context gathered, or passed in a ring; milliseconds "
                       "are predictions", [
                           Column("tokens", of=lambda one: one.seq),
                           Column("context", of=lambda one: one.ranks),
                           Column("ranks", "of a grid", of=lambda one: one.places),
                           Column("words of a rank", "closed form", align=".", form=",.0f",
                                  of=lambda one: one.words),
                           *both("words", 1, ",.0f", "counted"),
                           *both("seconds", 1e3, ".4g", "ms, waiting"),
                           Column("ring, ms", "if hidden", align=".",
                                  of=lambda one: 1e3 * one.ways["ring"].hidden),
                           *both("peak", 1 / GIB, ".3g", "GiB"),
                           *(Column(*head, align="<", of=lambda one, k=k: winners(one)[k])
                             for k, head in enumerate((
                                 ("faster",), ("if hidden",), ("smaller",))))], places),
            Notes("Remarks", [
                "words: of keys and values of other ranks, forward and twice backward (again, and "
                "their gradients): equal in both ways, so that what decides is latency, what can "
                "be hidden, and memory",
                "counted: by a dry run of the first rank; the closed form is the mean of all "
                "ranks",
                "milliseconds: of the layer, forward and backward, predicted and not measured; "
                "the library waits for each block. If hidden: a ring whose blocks travel while "
                "attention computes, as far as that takes as long, which the library does not do",
                "a way is faster, or smaller, if it takes 1 % less at least; GiB: at the peak of "
                "the first rank, by a dry run, parameters among it; of a ring most are scores "
                "of all heads at once, of a chunk of queries with a chunk of keys, which its "
                "backward holds on a GPU: attention to gathered keys holds none in 16 bits"])]


def winners(one: ContextPlace) -> list[str]:
    """Name the faster way, the faster if a ring is hidden, and the one that fills less."""
    gather, ring = (one.ways[way] for way in CONTEXT_WAYS)
    return [_less(gather.seconds, ring.seconds), _less(gather.seconds, ring.hidden),
            _less(gather.peak, ring.peak)]


def _less(gather: float, ring: float) -> str:
    """Name the way with the smaller number; "-" where they differ by less than 1 %."""
    if abs(gather - ring) < .01 * max(gather, ring):
        return "-"
    return "gather" if gather < ring else "ring"


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
        "memory follows from dry runs of a few layers; seconds are a model; slower, and what a "
        f"plan loses the most by, are beside the planner's, which above {FEW_GPUS} GPUs may be "
        f"{DOUBT:.0%} slower than the fastest"])
