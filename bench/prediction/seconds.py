"""Predict the seconds of a dry run's trace on a machine model.

A product takes the larger of flops over the rate for its shape and of bytes over the memory's
bandwidth; an elementwise pass bytes over bandwidth; a collective alpha-beta costs on the level of
the network that it needs, whose links it shares.  Where the description has measured curves of
passes and collectives (`bench.prediction.calibration` makes such ones), these are read instead.
This is a model: the trace alone is exact.
"""

import math

import numpy as np

from bench.prediction.machine_model import Machine
from mm3d.tracing.events import Collective, Gemm, Overlapped, PHASES, Pass
from mm3d.tracing.trace import Trace
from mm3d.transport.choice import in_place

TERMS = ("gemm", "memory", "node", "network", "latency")
Terms = dict[str, float]    # seconds, by what they are spent on
SIMILAR_SHAPE = 0.6    # of the logarithms of edges: the distance of products that are alike
PRIOR_WEIGHT = 0.3     # of the figures themselves, beside products of like shape


def gemm_seconds(machine: Machine, gemm: Gemm) -> float:
    """Predict seconds of a batch of products at the full figures of `machine`."""
    edges = (gemm.m, gemm.n, gemm.k)
    if not all(edges):
        return 0.0
    slowdown = 1 + sum(half / edge for half, edge in zip(machine.gemm_half_size, edges)) / 3
    size = np.dtype(gemm.dtype).itemsize
    moved = gemm.batch * size * (gemm.m * gemm.n + gemm.n * gemm.k + gemm.m * gemm.k)
    seconds = machine.gemm_seconds + max(
        gemm.flops / machine.gemm_rate[gemm.dtype] * slowdown, moved / machine.memory_bandwidth)
    return seconds * deviation(machine.gemm_deviations, edges)


def deviation(measured: dict[str, float], edges: tuple[int, int, int]) -> float:
    """Predict how much longer a product takes than the figures say, from products of like shape.

    It is the mean of what was `measured`, of logarithms as are the distances of shapes, each
    with the weight of its closeness; far from all of them the figures alone count.
    """
    total, weights = 0.0, PRIOR_WEIGHT
    for shape, ratio in measured.items():
        apart = sum(math.log(edge / float(other)) ** 2
                    for edge, other in zip(edges, shape.split("x")))
        weight = math.exp(-apart / (2 * SIMILAR_SHAPE ** 2))
        total, weights = total + weight * math.log(ratio), weights + weight
    return math.exp(total / weights)


def pass_seconds(machine: Machine, event: Pass) -> float:
    """Predict seconds of an elementwise operation at the full figures of `machine`."""
    if not machine.passes:
        return event.bytes / machine.memory_bandwidth
    return machine.passes.get(event.operation, machine.passes["other"]).at(event.bytes)


def meetings(event: Collective) -> int:
    """Count the barriers of the ranks of a collective."""
    return 2 if event.kind == "all_reduce" else 1


def collective_terms(machine: Machine, event: Collective) -> Terms:
    """Predict seconds of a collective that runs along all parallel lines of the grid at once.

    Rings move (g-1)/g of the whole through each rank, an all-reduce twice, a pipelined broadcast
    or reduction all of it; where ranks share memory, a gather nothing.  A line that leaves its
    node crosses the node's link once for all of its members there, and the lines that pass
    through the node share that link.
    """
    measured = {line.key: line.curve for line in machine.collectives}
    for pieces in (event.pieces, False):    # where columns were not measured, as rows
        curve = measured.get((event.kind, event.size, event.stride, pieces))
        if curve is not None:
            waiting = meetings(event) * machine.waiting.get(event.size, 0.0)
            return {"node": curve.at(event.bytes), "latency": waiting}
    g = event.size
    share = {"all_gather": (g - 1) / g, "reduce_scatter": (g - 1) / g,
             "all_reduce": 2 * (g - 1) / g}.get(event.kind, 1.0)
    steps = math.ceil(math.log2(g)) * meetings(event)
    moved = share * event.bytes
    within = moved / machine.node.bytes_per_second
    widest, times = link_level(g, event.stride, machine.ranks_per_node)
    if widest == "node":
        if event.kind in copies_nothing(machine.transport):    # who reads the whole has its time
            within = 0.0
        return {"node": within, "latency": steps * machine.node.seconds_per_message}
    crossing = moved * times / machine.network.bytes_per_second
    level = "network" if crossing >= within else "node"
    return {level: max(within, crossing),
            "latency": steps * machine.network.seconds_per_message}


def copies_nothing(transport: str) -> frozenset[str]:
    """The collectives of ranks of one node that copy nothing with this `Machine.transport`: of
    several ways, those that leave the node are none for its ranks."""
    return in_place("shared" if "shared" in transport.split() else transport) & {"all_gather"}


def link_level(size: int, stride: int, per_node: int) -> tuple[str, float]:
    """The level that a line of `size` ranks needs, and how many times what moves through one of
    its ranks passes through a link there."""
    if per_node % (size * stride) == 0:
        return "node", 1.0
    return "network", per_node / min(size, max(1, per_node // stride))


def terms(machine: Machine, trace: Trace) -> dict[str, Terms]:
    """Predict seconds of each phase by what they are spent on, at full figures."""
    found = {phase: dict.fromkeys(TERMS, 0.0) for phase in PHASES}
    for (phase, _, event), times in trace.events.items():
        if phase not in found or isinstance(event, Overlapped):
            continue
        spent = found[phase]
        if isinstance(event, Collective):
            for term, seconds in collective_terms(machine, event).items():
                spent[term] += times * seconds
            continue
        spent["latency"] += times * machine.launch_seconds
        if isinstance(event, Pass):
            spent["memory"] += times * pass_seconds(machine, event)
        else:
            spent["gemm"] += times * gemm_seconds(machine, event)
    return found


def achieved_seconds(machine: Machine, spent: Terms) -> float:
    """Sum the seconds of `spent`, each term divided by the part that is achieved."""
    return sum(value / getattr(machine.achieved, term) for term, value in spent.items())


def step_seconds(machine: Machine, trace: Trace, recompute: bool = False) -> dict[str, float]:
    """Predict seconds of forward and backward, which with `recompute` repeats the forward."""
    spent = terms(machine, trace)
    forward, backward = (achieved_seconds(machine, spent[phase]) for phase in PHASES)
    return {"forward": forward, "backward": backward + forward * recompute}
