"""Predict the seconds of hops between the stages of a pipeline.

Ranks are numbered replica by replica, stage by stage in each, and fill one node after the other in
this order, or in one with another direction of the mesh inside the nodes.  All replicas send at
once; the ranks of a node that send to others share its link.
"""

import math
from typing import Any, Mapping

import numpy as np

from bench.instruments.placement import mesh_order
from bench.prediction.machine_model import Machine
from bench.prediction.seconds import achieved_seconds
from mm3d.grid.shape import GridShape
from mm3d.schemes import find_scheme
from mm3d.schemes.words import Words
from mm3d.training.hops import activation_blocks, transfers

HopMoves = tuple[np.ndarray, np.ndarray, np.ndarray]    # senders, receivers, words or bytes
ArrayShape = tuple[int, int, int]


def stage_moves(scheme: str, source: GridShape, target: GridShape, shape: ArrayShape,
                options: Mapping[str, Any]) -> HopMoves:
    """List the words that ranks of one stage send to ranks of another, of as many, in a hop.

    They are of activations of this global shape, with the places of senders and of receivers in
    their stages.  Between equal grids each rank sends its block, taken to be of the mean size, to
    the rank of its own place.
    """
    if source == target:
        batch, seq, hidden = shape
        words = Words(scheme, source, batch, seq, **options).outer.words(
            batch * seq, hidden) / source.ranks
        return np.arange(source.ranks), np.arange(source.ranks), np.full(source.ranks, words)
    kind = find_scheme(scheme)
    found = transfers(*(activation_blocks(kind, grid, shape, kind.complete_options(options))
                        for grid in (source, target)))
    return tuple(np.array([getattr(one, field) for one in found])
                 for field in ("source", "target", "words"))


def place_moves(moves: HopMoves, size: int, mesh: GridShape, inside: str, per_node: int,
                hop: tuple[int, int]) -> HopMoves:
    """Return the moves of a hop between two stages in all replicas, by rank numbers and in bytes.

    The mesh is that of a `PipelineModel`, on the nodes with the ranks along `inside` next to each
    other, "" for its own order.  Where replicas are the slowest, their moves repeat beyond
    `per_node` + 1 of them, and the others are left out.
    """
    order, sizes = mesh_order(mesh, inside), dict(mesh)
    if order.startswith("rd"):
        sizes |= {"r": 1, "d": min(mesh["r"] * mesh["d"], per_node + 1)}
    replicas, stages = sizes["r"] * sizes["d"], sizes["s"]
    numbers = np.arange(math.prod(sizes.values())).reshape([sizes[name] for name in order])
    numbers = numbers.transpose([order.index(name) for name in sizes]).reshape(
        replicas, stages, -1)
    senders, receivers, words = moves
    return (numbers[:, hop[0], senders].ravel(), numbers[:, hop[1], receivers].ravel(),
            np.tile(words * size, replicas))


def seconds_of_moves(machine: Machine, senders: np.ndarray, receivers: np.ndarray,
                     sizes: np.ndarray) -> tuple[float, str]:
    """Predict the seconds of simultaneous messages, of so many bytes, for the slowest rank.

    Returns also the level of their links: "node", or "network" where a message leaves its node.
    """
    nodes = senders // machine.ranks_per_node
    leaving = nodes != receivers // machine.ranks_per_node
    level = "network" if leaving.any() else "node"
    link = getattr(machine, level)
    chosen = leaving if leaving.any() else np.ones_like(leaving)
    messages = _largest_sum(senders[chosen], np.ones(chosen.sum()))
    sharing = nodes if level == "network" else senders
    return achieved_seconds(machine, {
        "latency": messages * link.seconds_per_message,
        level: _largest_sum(sharing[chosen], sizes[chosen]) / link.bytes_per_second}), level


def _largest_sum(groups: np.ndarray, values: np.ndarray) -> float:
    """Sum the values of each group; return the largest sum."""
    _, numbers = np.unique(groups, return_inverse=True)
    return float(np.bincount(numbers, values).max())
