"""Find out which ranks are on the same node.

A node is a set of ranks between which MPI can share memory.  With ``MM3D_NODE_SIZE=n`` every n
ranks of a node, in the order of the world, count as a node of their own, to try on one machine
the behaviour on several.
"""

import os

import numpy as np
from mpi4py import MPI

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

    Raises ValueError when ``MM3D_NODE_SIZE`` is no positive integer.
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
