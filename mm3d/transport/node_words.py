"""Number the nodes of a job; count the words that each receives, and say what is not copied."""

import functools
from typing import Sequence

from mpi4py import MPI

from mm3d.arrays.blocks import block_lengths
from mm3d.transport.nodes import gather_nodes, own_node

# Collectives whose result all ranks read in the same memory, unless it is small.  Their words do
# not travel, so their time gives no bandwidth.  A gather of blocks that were placed copies
# nothing; a broadcast is copied once, by its root.
IN_PLACE = {"shared": frozenset({"all_gather", "broadcast"})}


def number_nodes(comm: MPI.Intracomm) -> list[int]:
    """Number the nodes in rank order, and return the node of every rank; all must call it."""
    nodes = gather_nodes(comm, own_node(comm))
    known = list(dict.fromkeys(nodes))
    return [known.index(node) for node in nodes]


def words_into_nodes(kind: str, blocks: Sequence[int], nodes: Sequence[int]) -> list[int]:
    """Count the words that each node has to receive from others in a collective.

    They are the words of bucket (ring) algorithms among nodes instead of ranks, the fewest
    possible: each block crosses the link of a node once.  `kind` is one of
    `mm3d.grid.axis.COLLECTIVES`.  `blocks` has the words of each rank's block; only their sum
    matters but for gathers, scatters and all-to-alls, in which every rank sends each rank a block
    of that rank's length.  `nodes` has the node of each rank, numbered from 0 in the order of the
    ranks.

    The root of a broadcast or a reduce is rank 0; a reduce goes through the nodes in a chain, and
    its first node, the one after the root's, receives none.
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


@functools.cache
def in_place_collectives(names: str) -> frozenset[str]:
    """Return the collectives whose results each of these transports leaves in place.

    `names` are one or more transports, such as "shared" or "mpi shared".
    """
    kinds = [IN_PLACE.get(name, frozenset()) for name in names.split()]
    return frozenset.intersection(*kinds) if kinds else frozenset()
