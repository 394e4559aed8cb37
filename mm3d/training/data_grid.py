"""Join the ranks that hold one stage in all replicas of a model."""

from typing import Any

from mm3d.grid.axis import Axis
from mm3d.grid.grid import Grid, GridAxes
from mm3d.grid.shape import GridShape


class DataGrid(GridAxes):
    """Extend the grid of a tensor parallelism by the directions of data parallelism.

    Direction d joins the ranks of equal place among which ZeRO divides a copy of the model, and r
    those that hold the same part in the other copies.  Sums along both add in the order of the
    ranks, except with NCCL.  The traffic is that along r and d.

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
        self.axes = self._create_axes("rd", ordered=True)
        self.replicated = self.axes["r"]

    def __getitem__(self, name: str) -> Axis:
        return self.axes[name] if name in self.axes else self.grid[name]
