"""Make the table of both ways of a context: words, seconds and bytes, and where each wins."""

from typing import Sequence

from bench.document import Column, Notes, Part, Table, number_cell
from bench.prediction.meshes.context_ways import SCHEME, WAYS, ContextPlace
from bench.prediction.training_plans.choices import Training
from bench.reports.plans.training_plans import GIB


def context_parts(asked: Training, places: Sequence[ContextPlace]) -> list[Part]:
    """Make the table, say where each way wins, and what was assumed."""
    rows = []
    for one in places:
        gather, ring = (one.ways[way] for way in WAYS)
        rows.append([
            one.seq, one.ranks, one.places, number_cell(one.words, ",.0f"),
            *(number_cell(way.words, ",.0f") for way in (gather, ring)),
            *(number_cell(1e3 * way.seconds, ".4g") for way in (gather, ring)),
            number_cell(1e3 * ring.hidden, ".4g"),
            *(number_cell(way.peak / GIB, ".3g") for way in (gather, ring)), *winners(one)])
    return [asked.machine.described,
            f"{asked.gpt.name}, one layer, one sequence, {asked.dtype}, {SCHEME} in a grid",
            Table("Keys and values of a context gathered, or passed in a ring; milliseconds are "
                  "predictions", [
                      Column("tokens"), Column("context"), Column("ranks", "of a grid"),
                      Column("words of a rank", "closed form", align="."),
                      *(Column(way, group="counted", align=".") for way in WAYS),
                      *(Column(way, group="ms, waiting", align=".") for way in WAYS),
                      Column("ring, ms", "if hidden", align="."),
                      *(Column(way, group="GiB", align=".") for way in WAYS),
                      Column("faster", align="<"), Column("if hidden", align="<"),
                      Column("smaller", align="<")], rows),
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
    gather, ring = (one.ways[way] for way in WAYS)
    return [_less(gather.seconds, ring.seconds), _less(gather.seconds, ring.hidden),
            _less(gather.peak, ring.peak)]


def _less(gather: float, ring: float) -> str:
    """Name the way with the smaller number; "-" where they differ by less than 1 %."""
    if abs(gather - ring) < .01 * max(gather, ring):
        return "-"
    return "gather" if gather < ring else "ring"
