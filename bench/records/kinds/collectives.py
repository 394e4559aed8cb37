"""Derive bandwidths of collectives, the fit of their times, and what nodes have to receive."""

from typing import Sequence

import numpy as np

from bench.least_squares import fit_line
from bench.records.kinds import BOUND, medians
from bench.records.measurements import Measurements, Variable, grid_shape
from mm3d.arrays.blocks import block_lengths
from mm3d.grid.shape import GridShape
from mm3d.transport.choice import in_place_collectives
from mm3d.transport.nodes import words_into_nodes

POINT = ("axis", "collective")


def derive(record: Measurements) -> dict[str, Variable]:
    """Return seconds, bus bandwidths, the fit alpha + beta n, and the least between nodes."""
    sizes = np.array(record.scales["size"], float)
    seconds = medians(record.raw["samples"].values)
    lines = np.array([fit_line(sizes, line) for line in seconds[..., 0].reshape(-1, len(sizes))])
    alpha, beta, error = np.moveaxis(lines.reshape(*seconds.shape[:2], 3), -1, 0)
    copies = ~left_in_place(record)[..., None]
    moved = record.raw["bytes_moved"].values
    found = {"seconds": Variable(seconds, "s", (*POINT, "size", *BOUND)),
             "bandwidth": Variable(np.where(copies, moved / seconds[..., 0], np.nan), "byte s-1",
                                   (*POINT, "size")),
             "alpha": Variable(alpha, "s", POINT), "beta": Variable(beta, "s byte-1", POINT),
             "fit_error": Variable(error, "1", POINT)}
    if "mpi_samples" in record.raw:
        found["mpi_seconds"] = Variable(medians(record.raw["mpi_samples"].values), "s",
                                        (*POINT, "size", *BOUND))
    if "wire_received" in record.raw:
        found["wire_least"] = Variable(_least_bytes(record), "byte", (*POINT, "node"))
    return found


def left_in_place(record: Measurements) -> np.ndarray:
    """Return which collectives leave their result in place, (axis, collective)."""
    return np.array([[kind in in_place_collectives(name) for kind in record.scales["collective"]]
                     for name in str(record.configuration["transports"]).split()])


def _least_bytes(record: Measurements) -> np.ndarray:
    """Compute the bytes of the largest array that each node has to receive."""
    chosen = record.configuration
    shape, item = grid_shape(chosen), np.dtype(chosen["dtype"]).itemsize
    nodes = [int(node) for node in record.environment["node_of_rank"].split()]
    return item * np.array([[least_words(shape, axis, kind, chosen["wire_size"] // item, nodes)
                             for kind in record.scales["collective"]]
                            for axis in record.scales["axis"]], float)


def least_words(shape: GridShape, axis: str, kind: str, words: int,
                nodes: Sequence[int]) -> list[int]:
    """Count the words that each node has to receive, for all lines of a direction.

    Parameters
    ----------
    shape : GridShape
        The grid.
    axis, kind : str
        The direction, and one of `mm3d.grid.axis.COLLECTIVES`, with rank 0 of a line as its root.
    words : int
        Elements of the array that the ranks of each line gather or sum.
    nodes : sequence of int
        The node of each rank of the grid.
    """
    into = [0] * (max(nodes) + 1)
    blocks = block_lengths(words, shape[axis])
    for coords in shape.all_coordinates():
        if coords[axis]:
            continue
        line = [nodes[shape.rank({**coords, axis: place})] for place in range(shape[axis])]
        known = list(dict.fromkeys(line))
        for node, count in zip(known, words_into_nodes(kind, blocks,
                                                       [known.index(node) for node in line])):
            into[node] += count
    return into
