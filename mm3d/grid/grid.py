"""Arrange ranks in a process grid, with coordinates and an `Axis` for each direction."""

from typing import Any, Callable, Iterable, NoReturn

from mpi4py import MPI

from mm3d.arrays import backend as backends
from mm3d.arrays.backend import Backend
from mm3d.grid.agreement import environment_facts, same_arguments
from mm3d.grid.axis import Axis, TrafficCounts
from mm3d.grid.shape import GridShape
from mm3d.transport.choice import (IN_NODES, choose_device, choose_transport,
                                   create_transports)
from mm3d.transport.communicators import DryCommunicator, Freed, create
from mm3d.transport.nodes import gather_nodes, own_node


def join_ranks(comm: MPI.Intracomm | DryCommunicator, shape: GridShape,
               names: str) -> MPI.Intracomm | DryCommunicator:
    """Create the communicator of the ranks that differ from this one along `names` alone.

    They keep the order that they have in `comm`, whose ranks are numbered as `shape` says; all
    ranks of it call this.
    """
    coords = shape.coordinates(comm.rank)
    if isinstance(comm, DryCommunicator):
        joined = GridShape.from_sizes({name: shape[name] for name in shape if name in names})
        return DryCommunicator(joined.ranks, joined.rank(coords))
    first = shape.rank({**coords, **dict.fromkeys(names, 0)})    # of the ranks that are joined
    return create(comm.Split, first, comm.rank)


class FreedAxes(dict[str, Axis]):
    """Stand in for the axes of a grid that was freed: to look one up is an error that says so."""

    def __missing__(self, name: str) -> NoReturn:
        raise RuntimeError(f"direction {name!r} is of a grid that was freed: a new grid, mesh or "
                           f"model would do")


class GridAxes:
    """Join ranks along directions of a grid: an `Axis` for each, with its traffic.

    It is the base of `Grid`, and of `mm3d.training.mesh.DataGrid` of replicas.  A subclass sets
    the attributes, as in `Grid`, and makes `axes` by `_create_axes`.
    """

    comm: MPI.Intracomm | DryCommunicator
    backend: Backend
    shape: GridShape
    coords: dict[str, int]
    axes: dict[str, Axis]    # by direction: the ranks that differ from this one along it alone
    nodes = 0    # that the ranks are on; 0 when dry, on devices, and with ``MM3D_TRANSPORT=mpi``

    def _create_axes(self, names: Iterable[str], ordered: bool = False) -> dict[str, Axis]:
        """Create the axes of the directions `names`; `ordered` as in `create_transports`."""
        kind = choose_transport(self.comm, self.backend)
        node = 0
        if kind in IN_NODES:
            node = own_node(self.comm)
            self.nodes = len(set(gather_nodes(self.comm, node)))
        lines = {name: join_ranks(self.comm, self.shape, name) for name in names}
        transports = create_transports(self.comm, lines, self.backend, kind, node, ordered)
        return {name: Axis(name, line, self.backend, transports[name])
                for name, line in lines.items()}

    def stride(self, name: str) -> int:
        """Return the difference between the ranks, in a mesh, of neighbours along a direction."""
        return self.shape.stride(name)

    def traffic(self) -> TrafficCounts:
        """Return the traffic of this rank since `reset_traffic`, by (direction, collective)."""
        return TrafficCounts({(name, collective): traffic for name, axis in self.axes.items()
                              for collective, traffic in axis.traffic.items()})

    def reset_traffic(self) -> None:
        """Reset the counts of traffic to zero."""
        for axis in self.axes.values():
            axis.traffic.clear()

    def free(self) -> None:
        """Free the communicators of the axes.

        Every rank must call it: MPI libraries have a few thousand communicators at most.  It may
        be repeated.  Directions cannot be used afterwards: to look one up, or to communicate along
        it, raises RuntimeError.
        """
        for axis in self.axes.values():
            axis.transport.free()
            axis.comm.Free()
            axis.comm = axis.transport = Freed(f"the grid of direction {axis.name!r}")
        self.comm, self.axes = Freed("the grid"), FreedAxes()


class Grid(GridAxes):
    """Arrange the ranks of a communicator as a Cartesian grid with named directions.

    Ranks are numbered as `mm3d.grid.shape.GridShape` says, the first direction varying slowest.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or DryCommunicator
        The ranks of the grid; every rank must create it, and call `free` when it is not used any
        more.
    backend : str or Backend, optional
        The array library, see `mm3d.arrays.backend.get`.
    **shape : int
        Sizes of the directions, which are single letters.

    Attributes
    ----------
    shape : GridShape
        Sizes of the directions.
    size, rank : int
        Number of ranks, and the number of this one.
    coords : dict of str to int
        Coordinate of this rank along each direction.
    axes, nodes
        See `GridAxes`.

    Raises
    ------
    ValueError
        When the product of the sizes is not the number of ranks, or a name is not one letter.
    OSError
        When ``MM3D_TRANSPORT`` asks for memory that some ranks cannot share.
    RuntimeError
        When MPI has no communicators left.

    Examples
    --------
    >>> grid = Grid(comm, x=2, y=2, z=2)
    >>> a.shape, grid["x"].all_gather(a, dim=0).shape
    ((2, 3), (4, 3))
    """

    def __init__(self, comm: MPI.Intracomm | DryCommunicator, backend: str | Backend | None = None,
                 **shape: int) -> None:
        with same_arguments(comm, "Grid") as given:
            self.backend = backends.get(backend)
            self.comm, self.shape = comm, GridShape.from_sizes(shape)
            if self.shape.ranks != comm.size:
                raise ValueError(f"a grid of {self.shape} has {self.shape.ranks} ranks, but the "
                                 f"communicator has {comm.size}: start that many ranks, or give "
                                 f"sizes whose product is {comm.size}")
            for name in ("MM3D_ABORT", "MM3D_CUDNN", "MM3D_TF32"):    # also where nothing reads it
                backends.setting(name)
            given |= {"backend": self.backend.name, "sizes": self.shape} | environment_facts()
        if not isinstance(comm, DryCommunicator):
            choose_device(comm, self.backend)
        self.size, self.rank = comm.size, comm.rank
        self.coords = self.shape.coordinates(comm.rank)
        self.axes = self._create_axes(self.shape)

    def __getitem__(self, name: str) -> Axis:
        return self.axes[name]

    def __getattr__(self, name: str) -> Axis:
        if name in self.__dict__.get("shape", ()):
            return self.axes[name]
        raise AttributeError(f"the grid has no direction or attribute {name!r}")

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.shape.items())
        return f"Grid({sizes}; rank {self.rank} at {tuple(self.coords.values())})"

    def graph(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Record `step`, which communicates on this grid, as a CUDA graph; see `Backend.graph`.

        Raises
        ------
        ValueError
            On every rank alike, when the backend has no graphs or messages pass through the host.
        """
        host = sorted({axis.transport.name for axis in self.axes.values()
                       if axis.size > 1 and axis.transport.on_host})
        if host:
            raise ValueError(f"a graph of a step has no place for what the host does, as with "
                             f"MM3D_TRANSPORT={host[0]}: choose nccl, or one rank")
        return self.backend.graph(step)
