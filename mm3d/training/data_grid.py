"""Join the ranks that hold one stage in all replicas of a model."""

from typing import Any

from mm3d.grid.axis import Axis, Traffic
from mm3d.grid.grid import Grid
from mm3d.grid.shape import GridShape
from mm3d.transport.choice import IN_NODES, choose_transport, create_transports
from mm3d.transport.nodes import node_of


class DataGrid:
    """Extend the grid of a tensor parallelism by the directions of data parallelism.

    Direction d joins the ranks of equal place among which ZeRO divides a copy of the model, and r
    those that hold the same part in the other copies.  Sums along both add in the order of the
    ranks, except with NCCL.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks of all replicas of this stage, replica by replica; all create it.
    grid : Grid
        The tensor parallelism of this replica.
    shards : int
        Size of direction d, a divisor of the number of replicas.

    Attributes
    ----------
    shape : GridShape
        Sizes of r, d, and the directions of `grid`.
    coords : dict of str to int
        Coordinate of this rank along each direction.
    replicated : Axis
        Direction r.
    """

    def __init__(self, comm: Any, grid: Grid, shards: int) -> None:
        copies = comm.size // grid.size // shards
        self.comm, self.grid, self.backend = comm, grid, grid.backend
        self.shape = GridShape.from_sizes({"r": copies, "d": shards, **grid.shape})
        self.coords = self.shape.coordinates(comm.rank)
        kind = choose_transport(comm, self.backend)
        node = node_of(comm) if kind in IN_NODES else 0
        lines = {name: self._line(name) for name in "rd"}
        transports = create_transports(comm, lines, self.backend, kind, node, ordered=True)
        self.axes = {name: Axis(name, line, self.backend, transports[name])
                     for name, line in lines.items()}
        self.replicated = self.axes["r"]

    def _line(self, name: str) -> Any:
        """Create the communicator of the ranks that differ from this one along `name`."""
        return self.comm.Split(self.shape.rank({**self.coords, name: 0}), self.coords[name])

    def __getitem__(self, name: str) -> Axis:
        return self.axes[name] if name in self.axes else self.grid[name]

    def traffic(self) -> dict[tuple[str, str], Traffic]:
        """Return the traffic of this rank along r and d, by (direction, collective)."""
        return {(name, collective): traffic for name, axis in self.axes.items()
                for collective, traffic in axis.traffic.items()}

    def reset_traffic(self) -> None:
        """Reset the counts of traffic along r and d to zero."""
        for axis in self.axes.values():
            axis.traffic = {}

    def free(self) -> None:
        """Free the communicators of r and d; every rank must call it."""
        for axis in self.axes.values():
            axis.transport.free()
            axis.comm.Free()
