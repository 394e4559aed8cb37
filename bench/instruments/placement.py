"""Which direction of the grid stays inside a node.

Launchers fill one node after the other with consecutive ranks.  The direction whose coordinate
varies fastest from rank to rank is therefore the one whose lines lie within a node, as far as
they fit; where a node holds more, the next direction follows.  The grid itself always counts in
its own order: `placed` gives it the ranks in another.
"""

from dataclasses import dataclass

from mpi4py import MPI

from mm3d import ModelSizes, model_spec
from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.transport.nodes import node_numbers

Sizes = dict[str, int]


@dataclass(frozen=True)
class Placement:
    """How the ranks of a grid are dealt to nodes.

    Attributes
    ----------
    placement : str
        The directions from the one that varies slowest to the one that varies fastest.
    within_nodes : str
        Those of more than one rank whose lines all lie within a node, as MPI saw the nodes.
    nodes : int
        How many nodes the ranks are on.
    node_of_rank : str
        The number of each rank's node, in the order of the grid; nodes are numbered as they come.
    """

    placement: str
    within_nodes: str
    nodes: int
    node_of_rank: str


def words_by_direction(scheme: str, shape: Sizes, model: ModelSizes) -> Sizes:
    """Words that a step of the model moves along each direction, over all ranks.

    Parameters
    ----------
    scheme : str
        Its name.
    shape : dict of str to int
        Sizes of the directions.
    model : ModelSizes
        Sizes of the model.
    """
    moved = dict.fromkeys(shape, 0)
    for phase in cost.words(scheme, shape, model_spec(model)).values():
        for (axis, _), count in phase.items():
            moved[axis] += count
    return moved


def direction_order(inside: str, scheme: str, shape: Sizes, model: ModelSizes) -> str:
    """The directions from slowest to fastest, so that `inside` stays inside a node.

    Parameters
    ----------
    inside : str
        A direction, or "auto" for the one that moves the most words.  The others follow by their
        words, whatever comes first.
    scheme, shape, model
        As in `words`.

    Raises
    ------
    ValueError
        When the grid has no such direction.
    """
    if inside != "auto" and inside not in shape:
        raise ValueError(f"--inside {inside}: the grid of scheme {scheme!r} has the directions "
                         f"{', '.join(shape)}; choose one of them, or auto")
    moved = words_by_direction(scheme, shape, model)
    # Directions of one rank move nothing and come first; of equals the grid's own order holds.
    return "".join(sorted(shape, key=lambda axis: (axis == inside, moved[axis])))


def reorder_ranks(comm: MPI.Intracomm, shape: Sizes, chosen: str) -> MPI.Intracomm:
    """The ranks of `comm` so numbered that the last direction of `chosen` varies fastest in it.

    Every rank calls this.  Rank 0 stays rank 0; the caller frees the communicator.
    """
    launched = GridShape(chosen, [shape[axis] for axis in chosen])
    return comm.Split(0, GridShape.from_sizes(shape).rank(launched.coordinates(comm.rank)))


def placement_outcome(comm: MPI.Intracomm, shape: Sizes, chosen: str) -> Placement:
    """What became of the order `chosen` on the nodes that there are.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks as the grid numbers them; every one of them calls this.
    shape : dict of str to int
        Sizes of the grid's directions.
    chosen : str
        See `order`.
    """
    nodes, grid = node_numbers(comm), GridShape.from_sizes(shape)

    def within_nodes(axis: str) -> bool:
        first = [grid.rank({**coords, axis: 0}) for coords in grid.all_coordinates()]
        return all(nodes[rank] == nodes[start] for rank, start in enumerate(first))

    within = "".join(axis for axis, size in grid.items() if size > 1 and within_nodes(axis))
    return Placement(chosen, within, len(set(nodes)), " ".join(map(str, nodes)))
