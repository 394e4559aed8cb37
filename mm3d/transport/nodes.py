"""Find out which ranks are on the same node, and count the words that have to enter a node.

A node is a set of ranks between which MPI can share memory.  With ``MM3D_NODE_SIZE=n`` every n
ranks of a node, in the order of the world, count as a node of their own, to try on one machine
the behaviour on several.
"""

import math
import os
import platform
import sys
from typing import Sequence

import numpy as np
from mpi4py import MPI

from mm3d.arrays.backend import Backend
from mm3d.arrays.blocks import block_lengths
from mm3d.transport.communicators import create


def node_size() -> int | None:
    """Return the number of ranks that ``MM3D_NODE_SIZE`` counts as a node; None if it is not set.

    Raises
    ------
    ValueError
        When it is no positive integer.
    """
    wanted = os.environ.get("MM3D_NODE_SIZE")
    if wanted is None:
        return None
    if not (wanted.isdecimal() and int(wanted) > 0):
        raise ValueError(f"MM3D_NODE_SIZE={wanted!r}: give the number of ranks, 1 or more, that "
                         "count as one node")
    return int(wanted)


def can_share_memory() -> bool:
    """Return whether ranks of this system can share memory as `mm3d.transport.segments` does."""
    return (sys.platform == "linux" and platform.machine() == "x86_64"
            and hasattr(os, "memfd_create"))


def physical_node(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Create a communicator of the ranks of `comm` on this node, in the order of the world.

    ``MM3D_NODE_SIZE`` does not matter.  All ranks call it; the caller frees the communicator.
    """
    return create(comm.Split_type, MPI.COMM_TYPE_SHARED, MPI.COMM_WORLD.rank)


def choose_device(comm: MPI.Intracomm, backend: Backend) -> None:
    """Let each rank have the device of its number on its node; all ranks of `comm` call it.

    Before MPI starts only the launcher can tell that number, and not every launcher does.

    Raises
    ------
    ValueError
        On every rank alike, when one has arrays on another device.
    """
    if backend.has_device:
        node = physical_node(comm)
        number = node.rank
        node.Free()
        counted = math.inf if comm.size == MPI.COMM_WORLD.size else comm.size
        problem = ""
        try:
            backend.choose_device(number, counted)
        except ValueError as error:
            problem = f"rank {comm.rank}: {error}"
        problems = list(filter(None, comm.allgather(problem)))    # so that no rank goes on alone
        if problems:
            raise ValueError(problems[0])


def node_of(comm: MPI.Intracomm) -> int:
    """Return a number that the ranks of `comm` on one node have in common; all must call it.

    Raises
    ------
    ValueError
        When ``MM3D_NODE_SIZE`` is no positive integer.
    """
    wanted = node_size()
    node = physical_node(comm)
    ranks = np.empty(node.size, np.int64)
    node.Allgather(np.array([comm.rank]), ranks)
    first = int(ranks[node.rank // (wanted or node.size) * (wanted or node.size)])
    node.Free()
    return first


def node_numbers(comm: MPI.Intracomm) -> list[int]:
    """Number the nodes in rank order, and return the node of every rank; all must call it."""
    nodes = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([node_of(comm)]), nodes)
    known = list(dict.fromkeys(nodes.tolist()))
    return [known.index(node) for node in nodes.tolist()]


def nodes_of_line(comm: MPI.Intracomm, node: int) -> list[int]:
    """Gather the node of every rank of `comm`; `node` is this rank's; all must call it."""
    nodes = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([node]), nodes)
    return nodes.tolist()


def words_into_nodes(kind: str, blocks: Sequence[int], nodes: Sequence[int],
                     root: int = 0) -> list[int]:
    """Count the words that each node has to receive from others in a collective.

    They are the words of bucket (ring) algorithms among nodes instead of ranks, the fewest
    possible: each block crosses the link of a node once.

    Parameters
    ----------
    kind : str
        One of `mm3d.grid.axis.COLLECTIVES`.
    blocks : sequence of int
        Words of each rank's block; only their sum matters but for gathers, scatters and
        all-to-alls, in which every rank sends each rank a block of that rank's length.
    nodes : sequence of int
        The node of each rank, numbered from 0 in the order of the ranks.
    root : int
        The root of a broadcast or a reduce.

    Returns
    -------
    list of int
        Words, by node.  A reduce goes through the nodes in a chain; its first node, the one after
        the root's, receives none.
    """
    count, whole = max(nodes) + 1, sum(blocks)
    own = [sum(words for words, at in zip(blocks, nodes) if at == node) for node in range(count)]
    if kind == "all_reduce":
        own = block_lengths(whole, count)
    gathered = [whole - words for words in own]
    scattered = [(count - 1) * words for words in own]
    exchanged = [words * sum(at != node for at in nodes) for node, words in enumerate(own)]
    without = nodes[root] if kind == "broadcast" else (nodes[root] + 1) % count
    return {"all_gather": gathered, "reduce_scatter": scattered, "all_to_all": exchanged,
            "all_reduce": [a + b for a, b in zip(gathered, scattered)]}.get(
        kind, [whole * (node != without and count > 1) for node in range(count)])
