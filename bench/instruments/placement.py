"""Choose the direction of the grid whose lines stay within a node.

Launchers fill one node after the other with consecutive ranks.  The direction whose coordinate
varies fastest from rank to rank is therefore the one whose lines lie within a node, as far as
they fit; where a node holds more, the next direction follows.  The grid itself always numbers its
ranks in its own order; `reorder_ranks` permutes the ranks of the communicator instead.
"""

from dataclasses import dataclass

from mpi4py import MPI

from mm3d import ModelSizes
from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.transport.nodes import number_nodes

GroupSizes = dict[str, int]


@dataclass(frozen=True)
class Placement:
    """The assignment of a grid's ranks to nodes, numbered in the order of the grid's ranks.

    Directions are placed from the one that varies slowest to the one that varies fastest; those
    within nodes are of more than one rank, and all of their lines lie within a node.
    """

    placement: str
    within_nodes: str
    nodes: int
    node_of_rank: str


def words_by_direction(scheme: str, shape: GroupSizes, model: ModelSizes) -> GroupSizes:
    """Count the words that a step of the model moves along each direction, over all ranks."""
    moved = dict.fromkeys(shape, 0)
    for phase in cost.words(scheme, shape, model).values():
        for (axis, _), count in phase.items():
            moved[axis] += count
    return moved


def direction_order(inside: str, scheme: str, shape: GroupSizes, model: ModelSizes) -> str:
    """Return the directions from slowest to fastest, so that `inside` stays within a node.

    With "auto" it is the one that moves the most words; the others are ordered by their words.
    Raises ValueError when the grid has no such direction.
    """
    if inside != "auto" and inside not in shape:
        raise ValueError(f"--inside {inside}: the grid of scheme {scheme!r} has the directions "
                         f"{', '.join(shape)}; choose one of them, or auto")
    moved = words_by_direction(scheme, shape, model)
    # Directions of one rank move nothing and come first; equal ones keep the grid's order.
    return "".join(sorted(shape, key=lambda axis: (axis == inside, moved[axis])))


def mesh_order(mesh: GroupSizes, inside: str) -> str:
    """Return the directions of a mesh from slowest to fastest, `inside` the fastest.

    The others keep their order, and with "" all do.  Raises ValueError when the mesh has no such
    direction.
    """
    if inside and inside not in mesh:
        raise ValueError(f"--inside {inside}: the mesh has the directions {', '.join(mesh)}; "
                         f"choose one of them")
    return "".join(mesh).replace(inside, "") + inside


def reorder_ranks(comm: MPI.Intracomm, shape: GroupSizes, chosen: str) -> MPI.Intracomm:
    """Renumber the ranks of `comm` so that the last direction of `chosen` varies fastest in it.

    Every rank calls this.  Rank 0 stays rank 0; the caller frees the communicator.
    """
    launched = GridShape(chosen, [shape[axis] for axis in chosen])
    return comm.Split(0, GridShape.from_sizes(shape).rank(launched.coordinates(comm.rank)))


def placement_outcome(comm: MPI.Intracomm, shape: GroupSizes, chosen: str) -> Placement:
    """Determine which directions lie within nodes with the order `chosen`.

    Each rank of `comm`, in the order of the grid, calls this.
    """
    nodes, grid = number_nodes(comm), GridShape.from_sizes(shape)

    def within_nodes(axis: str) -> bool:
        first = [grid.rank({**coords, axis: 0}) for coords in grid.all_coordinates()]
        return all(nodes[rank] == nodes[start] for rank, start in enumerate(first))

    within = "".join(axis for axis, size in grid.items() if size > 1 and within_nodes(axis))
    return Placement(chosen, within, len(set(nodes)), " ".join(map(str, nodes)))
