"""Find out which ranks are on the same node, and which words come to it from others.

A node is a set of ranks between which MPI can share memory.  With ``MM3D_NODE_SIZE=n`` every n
ranks of a node, in the order of the world, count as a node of their own, to try on one machine
the behaviour on several.
"""

import os
from typing import Sequence

import numpy as np
from mpi4py import MPI

from mm3d.arrays.blocks import block_lengths
from mm3d.transport.communicators import create


def emulated_node_size() -> int | None:
    """Return the number of ranks that ``MM3D_NODE_SIZE`` counts as a node; None if it is not set.

    Raises ValueError when it is no positive integer.
    """
    wanted = os.environ.get("MM3D_NODE_SIZE", "")
    if not wanted:
        return None
    if not (wanted.isdecimal() and int(wanted) > 0):
        raise ValueError(f"MM3D_NODE_SIZE={wanted!r}: give the number of ranks, 1 or more, that "
                         "count as one node")
    return int(wanted)


def create_node_communicator(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Create a communicator of the ranks of `comm` on this node, in the order of the world.

    ``MM3D_NODE_SIZE`` does not matter.  All ranks call it; the caller frees the communicator.
    """
    return create(comm.Split_type, MPI.COMM_TYPE_SHARED, MPI.COMM_WORLD.rank)


def own_node(comm: MPI.Intracomm) -> int:
    """Return the number of this rank's node: its first rank in `comm`; all ranks must call it.

    Raises ValueError for a wrong ``MM3D_NODE_SIZE``.
    """
    wanted = emulated_node_size()
    node = create_node_communicator(comm)
    numbers = gather_nodes(node, comm.rank)    # in `comm`, of the ranks on this node
    size = wanted or node.size
    first = numbers[node.rank // size * size]
    node.Free()
    return first


def gather_nodes(comm: MPI.Intracomm, node: int) -> list[int]:
    """Gather the node of every rank of `comm`; `node` is this rank's; all ranks must call it."""
    nodes = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([node]), nodes)
    return nodes.tolist()


def number_nodes(comm: MPI.Intracomm) -> list[int]:
    """Number the nodes in rank order, and return the node of every rank; all must call it."""
    nodes = gather_nodes(comm, own_node(comm))
    known = list(dict.fromkeys(nodes))
    return [known.index(node) for node in nodes]


def words_into_nodes(kind: str, blocks: Sequence[int], nodes: Sequence[int]) -> list[int]:
    """Count the words that each node has to receive from others in a collective.

    They are those of bucket (ring) algorithms among nodes, the fewest possible: each block crosses
    the link of a node once.  `kind` is one of `mm3d.grid.axis.COLLECTIVES`, `blocks` has the words
    of each rank's block (in an all-to-all every rank sends each rank one of that rank's length),
    `nodes` the node of each rank, numbered from 0 in the order of the ranks.  The root is rank 0;
    a reduce goes through the nodes in a chain, and the one after the root's receives none.
    """
    count, whole = max(nodes) + 1, sum(blocks)
    own = [sum(words for words, at in zip(blocks, nodes) if at == node) for node in range(count)]
    if kind == "all_reduce":
        own = block_lengths(whole, count)
    gathered = [whole - words for words in own]
    scattered = [(count - 1) * words for words in own]
    exchanged = [words * sum(at != node for at in nodes) for node, words in enumerate(own)]
    without = 0 if kind == "broadcast" else 1 % count
    return {"all_gather": gathered, "reduce_scatter": scattered, "all_to_all": exchanged,
            "all_reduce": [a + b for a, b in zip(gathered, scattered)]}.get(
        kind, [whole * (node != without and count > 1) for node in range(count)])


def in_place_collectives(names: str) -> frozenset[str]:
    """Return the collectives whose results each of these transports leaves in place.

    `names` are one or more transports, such as "shared" or "mpi shared".  In shared memory all
    ranks read the result in the same memory, unless it is small: its words do not travel, so its
    time gives no bandwidth.
    """
    return frozenset({"all_gather", "broadcast"} if {*names.split()} == {"shared"} else ())
