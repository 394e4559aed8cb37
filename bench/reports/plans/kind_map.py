"""Make the table of where X x Y x Z is faster than 1 x t x 1, over GPUs and rates of links."""

import math
from typing import Sequence

from bench.document import Column, Notes, Part, Table, number_cell
from bench.prediction.meshes.kind_map import BOX, MESH_KINDS, MapPlace
from bench.prediction.training_plans.choices import Choice, Training

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
