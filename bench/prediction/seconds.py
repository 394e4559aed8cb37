"""Predict the seconds of a traced step by a machine model.

A product takes the larger of two times: flops over the rate for its shape, and bytes over the
memory bandwidth.  An elementwise pass takes bytes over bandwidth.  A collective has alpha-beta
costs on the level of the network that it uses, whose links it shares.  Where the machine has
measured curves of passes and collectives (see `bench.prediction.calibration`), these are read
instead.  The trace is exact; the seconds are a model.
"""

import functools
import math
from collections import Counter
from copy import copy
from typing import Callable, NamedTuple

import numpy as np

from bench.cases.variants import itemsize
from bench.prediction.machine_model import Machine
from mm3d.grid.shape import GridShape
from mm3d.tracing.events import Boundary, Call, Collective, Gemm, MemoryPass, Overlapped, PHASES
from mm3d.tracing.trace import Trace
from mm3d.transport.choice import LEAST_NODES, transport_class
from mm3d.transport.lanes import chunk_bytes
from mm3d.transport.nodes import in_place_collectives

TERMS = ("gemm", "memory", "node", "network", "latency")
Terms = dict[str, float]    # seconds by term
SIMILAR_SHAPE = 0.6    # distance of similar products, in logarithms of edges
PRIOR_WEIGHT = 0.3     # weight of no deviation, beside the weights of similar products
ROOTED = ("broadcast", "reduce")
REPLICAS = ("r", "d")    # directions of `mm3d.training.mesh.DataGrid` that sum gradients
MOST_UNEVEN = 1 << 10    # ranks counted one by one: up to where lines and nodes align again


class Flash(NamedTuple):
    """Describe the operations of a fused attention, whose scores are never in memory.

    This library has none; `bench.prediction.kernels` puts it in place of the products of scores.
    """

    flops: float
    dtype: str


def gemm_seconds(machine: Machine, gemm: Gemm) -> float:
    """Predict the seconds of a batch of products at the full figures of `machine`."""
    edges = (gemm.m, gemm.n, gemm.k)
    if not all(edges):
        return 0.0
    slowdown = 1 + sum(half / edge for half, edge in zip(machine.gemm_half_size, edges)) / 3
    size, made = itemsize(gemm.dtype), itemsize(gemm.result or gemm.dtype)
    moved = gemm.batch * (size * (gemm.m + gemm.k) * gemm.n + made * gemm.m * gemm.k)
    seconds = machine.gemm_seconds + max(
        gemm.flops / machine.gemm_rate[gemm.dtype] * slowdown, moved / machine.memory_bandwidth)
    return seconds * deviation(machine.gemm_deviations, edges)


def deviation(measured: dict[str, float], edges: tuple[int, int, int]) -> float:
    """Predict a product's seconds over those by the machine's figures, from `measured` ratios.

    It is a geometric mean of the `measured` ratios, each weighted by the similarity of its shape
    (a Gaussian in the logarithms of the edges); far from all of them it is 1.
    """
    total, weights = 0.0, PRIOR_WEIGHT
    for shape, ratio in measured.items():
        apart = sum(math.log(edge / float(other)) ** 2
                    for edge, other in zip(edges, shape.split("x")))
        weight = math.exp(-apart / (2 * SIMILAR_SHAPE ** 2))
        total, weights = total + weight * math.log(ratio), weights + weight
    return math.exp(total / weights)


def pass_seconds(machine: Machine, event: MemoryPass) -> float:
    """Predict the seconds of an elementwise operation at the full figures of `machine`."""
    if not machine.passes:
        return event.bytes / machine.memory_bandwidth
    return machine.passes.get(event.operation, machine.passes["other"]).at(event.bytes)


def barriers(event: Collective) -> int:
    """Count the barriers in a collective."""
    return 2 if event.kind in ("all_reduce", "all_to_all") else 1


def message_steps(event: Collective) -> int:
    """Count the messages that follow each other in a collective: log2 of its ranks a barrier."""
    return math.ceil(math.log2(event.size)) * barriers(event)


def ring_bytes(event: Collective) -> float:
    """Return the bytes that move through each rank: of rings, (g-1)/g of the whole array."""
    g = event.size
    return event.bytes * {"all_gather": (g - 1) / g, "reduce_scatter": (g - 1) / g,
                          "all_reduce": 2 * (g - 1) / g, "all_to_all": (g - 1) / g}.get(
                              event.kind, 1.0)


def collective_terms(machine: Machine, event: Collective) -> Terms:
    """Predict the seconds of a collective along all parallel lines of the grid at once, by term.

    Rings of g ranks move (g-1)/g of the whole through each rank, an all-reduce twice that, and a
    pipelined broadcast or reduction the whole, which takes longer in a chain of nodes
    (`chain_delay`); in shared memory a gather moves nothing.  A line that leaves a node crosses
    the link of the node once for all of its ranks there, and all lines through the node share the
    link.  In an all-to-all each rank sends equal blocks to all, those for other nodes through the
    link of its own node; but along a context, direction c, to the next rank alone.  With the
    transport "ordered" replicas exchange the terms of a sum like this, and arrays that are
    gathered too, as MPI doubles distances from rank to rank.
    """
    if event.kind == "all_to_all" and event.direction == "c":
        return _shift_terms(machine, event)
    if event.direction in REPLICAS and "ordered" in machine.transport.split():
        twice = 1 + (event.kind == "all_reduce")
        event = event._replace(kind="all_to_all", bytes=twice * event.bytes)
    measured = {line.key: line.curve for line in machine.collectives}
    for pieces in (event.pieces, False):    # columns that were not measured count as rows
        curve = measured.get((event.kind, event.size, event.stride, pieces))
        if curve is not None:
            inside = link_level(event.size, event.stride, machine.ranks_per_node)[0] == "node"
            waits = machine.node_waiting if inside and machine.node_waiting else machine.waiting
            return {"node": curve.at(event.bytes),
                    "latency": barriers(event) * waits.get(event.size, 0.0)}
    g = event.size
    steps, moved = message_steps(event), ring_bytes(event)
    within = moved / machine.node.bytes_per_second
    widest, times = link_level(g, event.stride, machine.ranks_per_node, machine.transport,
                               event.kind in ROOTED)
    if widest == "node":
        if event.kind in uncopied_collectives(machine.transport):
            within = 0.0    # the product that reads the whole pays for it
        return {"node": within, "latency": steps * machine.node.seconds_per_message}
    crossing = moved * times / machine.network.bytes_per_second
    if "chain" in machine.transport.split():
        crossing *= 1 + chain_delay(event, machine.ranks_per_node)
    if event.kind == "all_to_all":
        # Each rank of the node sends its blocks for other nodes itself: nothing is passed on.
        near = min(g, max(1, machine.ranks_per_node // event.stride))
        within = (near - 1) / g * event.bytes / machine.node.bytes_per_second
        crossing = (machine.ranks_per_node * (g - near) / g * event.bytes
                    / machine.network.bytes_per_second)
    level = "network" if crossing >= within else "node"
    return {level: max(within, crossing),
            "latency": steps * machine.network.seconds_per_message}


def _shift_terms(machine: Machine, event: Collective) -> Terms:
    """Predict the seconds in which each rank of a ring sends an array to the next, by term.

    It is a step of a ring's all-gather, in which all lines through a node share its link.
    """
    widest, times = link_level(event.size, event.stride, machine.ranks_per_node)
    within = event.bytes / machine.node.bytes_per_second
    crossing = (times * event.bytes / machine.network.bytes_per_second
                if widest == "network" else 0.0)
    level = "network" if crossing >= within else "node"
    return {level: max(within, crossing),
            "latency": getattr(machine, widest).seconds_per_message}


def chain_delay(event: Collective, per_node: int) -> float:
    """Return the extra time of a broadcast or reduction over nodes, as a share of its seconds.

    Nodes pass on an array in chunks (`mm3d.transport.lanes`).  In a product of SUMMA the next
    node begins the next array a chunk later, as it is the second of the chain; at the end the last
    array travels over all other nodes.  For q arrays, one from each of q nodes, both of these
    delays take the time of q-1 chunks.  Small arrays go by MPI, which scatters and then gathers
    their parts: 2 (q-1)/q arrays pass through a link.
    """
    nodes = math.ceil(event.size / max(1, per_node // event.stride))
    if event.kind not in ROOTED or nodes < LEAST_NODES:
        return 0.0
    alone = nodes == event.size
    if event.bytes <= transport_class("chain" if alone else "hierarchical").mpi_bytes:
        return 1 - 2 / nodes
    share = event.bytes * nodes // event.size    # of one of the node's ranks
    return 2 * (1 - 1 / nodes) * min(1.0, chunk_bytes(share, nodes) / share)


def uncopied_collectives(transport: str) -> frozenset[str]:
    """Return the collectives inside a node that copy nothing, for this `Machine.transport`.

    Where it names several, "shared" is the transport inside a node.
    """
    local = "shared" if "shared" in transport.split() else transport
    return in_place_collectives(local) & {"all_gather"}


@functools.cache
def link_level(size: int, stride: int, per_node: int, transport: str = "",
               rooted: bool = False) -> tuple[str, float]:
    """Return the network level that a line of `size` ranks uses, and the load of its link.

    The load is the traffic through a node's link over the traffic through a rank of a ring.  A
    ring passes through a node once for all of its ranks; with the transport "hierarchical" nothing
    crosses the link that the node has already.  Where lines are cut by the ends of nodes, the
    fullest node counts.  `rooted` is whether the ranks broadcast or reduce in turn, instead of all
    at once.
    """
    span, once = size * stride, "hierarchical" in transport.split()
    if per_node % span == 0:
        return "node", 1.0
    even = span % per_node == 0 and 0 in (per_node % stride, stride % per_node)
    if not even and math.lcm(span, per_node) <= MOST_UNEVEN:
        return "network", _uneven_load(size, stride, per_node, once, rooted)
    ranks = min(size, max(1, per_node // stride))    # of a line, in a node
    load = per_node / ranks
    return "network", load * (size - ranks) / (size - 1) if once and not rooted else load


def _uneven_load(size: int, stride: int, per_node: int, once: bool, rooted: bool) -> float:
    """Compute the load of `link_level` where nodes hold unequal numbers of ranks of a line."""
    ranks = np.arange(math.lcm(size * stride, per_node))
    node, line = ranks // per_node, ranks // (size * stride) * stride + ranks % stride
    members = np.zeros((node[-1] + 1, line.max() + 1), int)
    np.add.at(members, (node, line), 1)
    crossing = (members > 0) & (members < size)
    if not rooted:
        share = (size - members) / (size - 1) if once else 1
        return float((crossing * share).sum(axis=1).max())
    sending = np.zeros((*members.shape, size), bool)    # of each root
    sending[node, line, ranks // stride % size] = True
    loads = [(crossing[..., None] & side).sum(axis=1).max(axis=0) for side in (sending, ~sending)]
    return float(np.maximum(*loads).sum() / size)


def place_trace(trace: Trace, grid: GridShape, order: str) -> Trace:
    """Return the trace of a step, in the order of the grid, with ranks in another on the nodes.

    `order` has the directions from the one that varies slowest from rank to rank to the fastest,
    as `bench.instruments.placement.direction_order` returns them.
    """
    placed = GridShape(order, [grid[axis] for axis in order])
    return with_strides(trace, lambda event: placed.stride(event.direction))


def with_strides(trace: Trace, stride_of: Callable[[Collective], int]) -> Trace:
    """Return the trace of a step with other strides of its collectives over the nodes."""
    found = copy(trace)
    found.events = Counter()
    for (phase, part, event), times in trace.events.items():
        if isinstance(event, Collective):
            event = event._replace(stride=stride_of(event))
        found.events[phase, part, event] += times
    return found


def event_terms(machine: Machine, event: Collective | Gemm | Flash | MemoryPass) -> Terms:
    """Predict the seconds of a collective or an operation by term, at full figures."""
    if isinstance(event, Collective):
        return collective_terms(machine, event)
    if isinstance(event, MemoryPass):
        return {"latency": machine.launch_seconds, "memory": pass_seconds(machine, event)}
    return {"latency": machine.launch_seconds,
            "gemm": event.flops / machine.gemm_rate[event.dtype] if isinstance(event, Flash)
            else gemm_seconds(machine, event)}


def work_seconds(machine: Machine, event: Gemm | MemoryPass) -> float:
    """Predict the seconds of a product or an elementwise operation at the achieved fractions."""
    return achieved_seconds(machine, event_terms(machine, event))


def trace_terms(machine: Machine, trace: Trace) -> dict[str, Terms]:
    """Predict the seconds of each phase by term, at full figures; "sums" among them if traced."""
    found = {phase: dict.fromkeys(TERMS, 0.0) for phase in trace.all_phases}
    for (phase, _, event), times in trace.events.items():
        if phase in found and not isinstance(event, (Overlapped, Boundary, Call)):
            for term, seconds in event_terms(machine, event).items():
                found[phase][term] += times * seconds
    return found


def achieved_seconds(machine: Machine, spent: Terms) -> float:
    """Sum the seconds of `spent`, each term divided by its achieved fraction."""
    return sum(value / getattr(machine.achieved, term) for term, value in spent.items())


def step_seconds(machine: Machine, trace: Trace, recompute: bool = False) -> dict[str, float]:
    """Predict the seconds of forward and backward, which repeats the forward with `recompute`."""
    spent = trace_terms(machine, trace)
    forward, backward = (achieved_seconds(machine, spent[phase]) for phase in PHASES)
    return {"forward": forward, "backward": backward + forward * recompute}
