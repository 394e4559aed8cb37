"""Make the tables of where X x Y x Z is faster than 1 x t x 1, and which way of a context is."""

import math
from typing import Sequence

from bench.document import Column, Notes, Part, Table, make_table, number_cell, spread
from bench.prediction.meshes.context_ways import SCHEME, ContextPlace
from bench.prediction.meshes.kind_map import BOX, MESH_KINDS, MapPlace
from bench.prediction.training_plans.choices import CONTEXT_WAYS, Choice, Training
from bench.reports.plans.training_plans import GIB

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
        return spread(lambda one: [scale * getattr(one.ways[way], name) for way in CONTEXT_WAYS],
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
