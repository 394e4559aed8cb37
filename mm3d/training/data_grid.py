"""Join the ranks that hold one stage in all replicas of a model."""

import math
from typing import Any

from mm3d.grid.axis import Axis
from mm3d.grid.grid import Grid, GridAxes
from mm3d.grid.shape import GridShape


class DataGrid(GridAxes):
    """Extend the grid of a tensor parallelism by the directions of data parallelism.

    Direction d joins the ranks among which ZeRO divides one copy of the model, and r the ranks
    with the same part of the other copies.  Sums along both add in the order of the ranks, except
    with NCCL.  Its traffic is counted along r, d and e.

    Experts that are divided among replicas have a grid of their own on the same ranks, see
    `with_experts`: e joins neighbouring replicas with different experts, and d and r replicas with
    copies of the same experts.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks of all replicas of this stage, replica by replica; all create it.
    grid : Grid
        The tensor parallelism of this replica.
    shards : int
        Size of direction d.
    experts : int
        Size of direction e, which is there if it is above 1.  The product of both divides the
        number of replicas.
    stages : int
        Number of stages of a replica: they multiply the `stride` along r, d and e.

    Attributes
    ----------
    shape : GridShape
        Sizes of r, d and e, and the directions of `grid`.
    coords : dict of str to int
        Coordinate of this rank along each direction.
    replicated : Axis
        Direction r.
    """

    def __init__(self, comm: Any, grid: Grid, shards: int, experts: int = 1,
                 stages: int = 1) -> None:
        copies = comm.size // grid.size // shards // experts
        sizes = {"r": copies, "d": shards} | ({"e": experts} if experts > 1 else {})
        self.comm, self.grid, self.backend, self.stages = comm, grid, grid.backend, stages
        self.shape = GridShape.from_sizes(sizes | dict(grid.shape))
        self.coords = self.shape.coordinates(comm.rank)
        self.axes = self._create_axes(sizes, ordered=True)
        self.replicated = self.axes["r"]

    def __getitem__(self, name: str) -> Axis:
        return self.axes[name] if name in self.axes else self.grid[name]

    def stride(self, name: str) -> int:
        return self.shape.stride(name) * (self.stages if name in self.axes else 1)

    @property
    def replicas(self) -> list[Axis]:
        """Return the directions along which ranks have other sequences, the slowest first."""
        return list(self.axes.values())

    def with_experts(self, parts: int) -> "DataGrid":
        """Return the grid of experts that every `parts` neighbouring replicas divide.

        ZeRO divides a rank's experts further, among `expert_shards` of their copies: with n shards
        among n / parts where that is a whole number, and not at all where n divides `parts`.
        """
        return DataGrid(self.comm, self.grid, expert_shards(self.shape["d"], parts), parts,
                        self.stages)


class ContextGrid(GridAxes):
    """Extend the grid of a tensor parallelism by direction c: neighbouring replicas of a context.

    They have the same sequences, and each other positions of them.

    Parameters
    ----------
    comm, grid, stages
        As for `DataGrid`.
    size : int
        Size of direction c, a divisor of the number of replicas.
    """

    def __init__(self, comm: Any, grid: Grid, size: int, stages: int = 1) -> None:
        sizes = {"d": comm.size // grid.size // size, "c": size} | dict(grid.shape)
        self.comm, self.backend, self.stages = comm, grid.backend, stages
        self.shape = GridShape.from_sizes(sizes)
        self.coords = self.shape.coordinates(comm.rank)
        self.axes = self._create_axes("c")

    def stride(self, name: str) -> int:
        return self.shape.stride(name) * self.stages


def expert_shards(shards: int, parts: int) -> int:
    """Return among how many copies ZeRO divides experts that `parts` replicas divide already.

    Both numbers divide the number of replicas, and so does `parts` times the result: their least
    common multiple.
    """
    return math.lcm(shards, parts) // parts
