"""The process grid: its directions, and how arrays travel along them.

An `Axis` is the set of ranks that differ from this one along one direction of the `Grid`; its
collectives take and return arrays.  A `Split` is one dimension of one matrix dealt over one
Axis, which is all an algorithm needs to know of a direction: what to gather and what to
scatter.  How the bytes travel is the transport's business.
"""

import itertools
import math
import numbers
from dataclasses import dataclass
from typing import Any, Iterator, Mapping

from mpi4py import MPI

from mm3d import backend as backends
from mm3d import environment
from mm3d.backend import Array, Backend
from mm3d.choice import settle, transport_for
from mm3d.shared import node_of
from mm3d.transport import Absent, Pending, host_dtype, resized


def blocks(extent: int, parts: int, unit: int = 1) -> list[int]:
    """Lengths of the `parts` contiguous blocks of `extent` elements.

    Whole units of `unit` elements are dealt, the first blocks getting one more where they do
    not come out even; `extent` must be a multiple of `unit`.
    """
    units, rest = divmod(extent, unit)
    if rest:
        raise ValueError(f"a length of {extent} cannot be dealt in units of {unit}: "
                         f"{unit * max(1, units)} or {unit * (units + 1)} would do")
    share, more = divmod(units, parts)
    return [(share + (part < more)) * unit for part in range(parts)]


@dataclass
class Traffic:
    """What one rank moved with one kind of collective along one direction.

    Counted as the bucket (ring) algorithms move it, which for gathers and reductions is the
    least possible: a gather receives and a reduction sends every block but the rank's own.

    Attributes
    ----------
    calls : int
        Collectives entered.
    messages : int
        Blocks received or sent.
    words : int
        Array elements received (gather, broadcast) or sent (reductions); an all-reduce is a
        reduce-scatter and an all-gather.
    bytes : int
        `words` times the size of an element.
    """

    calls: int = 0
    messages: int = 0
    words: int = 0
    bytes: int = 0


class Axis:
    """The ranks that differ from this one along one direction of the grid.

    Parameters
    ----------
    name : str
        The direction's letter.
    comm : mpi4py.MPI.Intracomm
        These ranks, in order.
    backend : Backend
        Whose arrays travel.
    kind : str
        The name of their transport; see `mm3d.choice.settle`.
    node : int
        This rank's node; see `mm3d.shared.node_of`.
    """

    def __init__(self, name: str, comm: MPI.Intracomm, backend: Backend, kind: str,
                 node: int) -> None:
        self.name, self.comm, self.backend = name, comm, backend
        self.size, self.rank = comm.size, comm.rank
        self.transport = transport_for(comm, backend, kind, node)
        self.traffic: dict[str, Traffic] = {}

    def __repr__(self) -> str:
        return f"Axis({self.name}: rank {self.rank} of {self.size})"

    def split(self, dim: int, extent: int, unit: int = 1) -> "Split":
        """Dimension `dim`, of `extent` elements in all, dealt over this axis."""
        return Split(self, dim, extent, unit)

    def all_gather(self, a: Array, dim: int = 0, counts: list[int] | None = None) -> Array:
        """The blocks of all ranks joined along `dim`.

        Parameters
        ----------
        a : Array
            This rank's block.
        dim : int
            The dimension that the blocks divide.
        counts : list of int, optional
            The blocks' lengths along `dim`; the ranks tell each other when not given.

        Returns
        -------
        Array
            The whole, `sum(counts)` long along `dim`; `a` itself on an axis of one rank.
        """
        if self.size == 1:
            return a
        if counts is None:
            counts = self.comm.allgather(a.shape[dim])
        self._check(counts, a.shape[dim], counts[self.rank])
        out = self.transport.all_gather(a, dim, counts)
        self._count("all_gather", a, math.prod(out.shape) - math.prod(a.shape), self.size - 1)
        return out

    def reduce_scatter(self, a: Array, dim: int = 0, counts: list[int] | None = None) -> Array:
        """This rank's block, along `dim`, of the sum of `a` over all ranks.

        Parameters
        ----------
        a : Array
            This rank's term of the sum, of the same shape on every rank.
        dim : int
            The dimension to divide.
        counts : list of int, optional
            The blocks' lengths along `dim`; as `blocks` deals them when not given.

        Returns
        -------
        Array
            ``counts[rank]`` long along `dim`; `a` itself on an axis of one rank.
        """
        return self._scattered(a, dim, counts, "reduce_scatter")

    def begin_reduce_scatter(self, a: Array, dim: int = 0,
                             counts: list[int] | None = None) -> Pending:
        """`reduce_scatter` that may go on while this rank multiplies; see `Pending`."""
        found = self._scattered(a, dim, counts, "begin_reduce_scatter")
        return found if isinstance(found, Pending) else Pending(self.backend, found)

    def _scattered(self, a: Array, dim: int, counts: list[int] | None,
                   way: str) -> Array | Pending:
        """What the transport's method `way` gives."""
        if self.size == 1:
            return a
        if counts is None:
            counts = blocks(a.shape[dim], self.size)
        self._check(counts, a.shape[dim], sum(counts))
        found = getattr(self.transport, way)(a, dim, counts)
        own = resized(a.shape, dim, counts[self.rank])
        self._count("reduce_scatter", a, math.prod(a.shape) - math.prod(own), self.size - 1)
        return found

    def prefetch(self, a: Array, dim: int, counts: list[int]) -> Array | Pending:
        """`all_gather` that goes on while this rank computes; `a` itself where none can."""
        if self.size == 1 or not self.transport.prefetches:
            return a
        self._check(counts, a.shape[dim], counts[self.rank])
        found = self.transport.begin_all_gather(a, dim, counts)
        self._count("all_gather", a, math.prod(found.out.shape) - math.prod(a.shape),
                    self.size - 1)
        return found

    def all_reduce(self, a: Array) -> Array:
        """The sum of `a` over all ranks; `a` itself on an axis of one rank."""
        if self.size == 1:
            return a
        out = self.transport.all_reduce(a)
        length = math.prod(a.shape)
        own = blocks(length, self.size)[self.rank]
        self._count("all_reduce", a, 2 * (length - own), 2 * (self.size - 1))
        return out

    def broadcast(self, a: Array, root: int) -> Array:
        """`a` of the rank `root`, on every rank.

        On the other ranks `a` gives the shape and is overwritten.
        """
        if self.size == 1:
            return a
        out = self.transport.broadcast(a, root)
        received = int(self.rank != root)
        self._count("broadcast", a, received * math.prod(a.shape), received)
        return out

    def reduce(self, a: Array, root: int) -> Array | None:
        """The sum of `a` over all ranks on the rank `root`, None on the others."""
        if self.size == 1:
            return a
        out = self.transport.reduce(a, root)
        sent = int(self.rank != root)
        self._count("reduce", a, sent * math.prod(a.shape), sent)
        return out

    def _check(self, counts: list[int], length: int, expected: int) -> None:
        if length != expected or len(counts) != self.size:
            raise ValueError(f"an array {length} long does not fit blocks of {counts} on rank "
                             f"{self.rank} of {self.size} along {self.name}")

    def _count(self, collective: str, a: Array, words: int, messages: int) -> None:
        traffic = self.traffic.setdefault(collective, Traffic())
        traffic.calls += 1
        traffic.messages += messages
        traffic.words += words
        traffic.bytes += words * host_dtype(a).itemsize


class Split:
    """One dimension of a matrix, dealt over one axis.

    Parameters
    ----------
    axis : Axis
        The direction.
    dim : int
        The dimension of the array that is divided.
    extent : int
        Its length before it is divided.
    unit : int
        Elements that stay together (the columns of a head).

    Attributes
    ----------
    counts : list of int
        Length of each rank's block.
    """

    def __init__(self, axis: Axis, dim: int, extent: int, unit: int = 1) -> None:
        self.axis, self.dim, self.extent = axis, dim, extent
        self.counts = blocks(extent, axis.size, unit)

    def __repr__(self) -> str:
        return f"Split(dimension {self.dim} of {self.extent} over {self.axis.name})"

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Memory for this rank's block, of local `shape`; every rank of the axis calls it."""
        if self.axis.size == 1:
            return self.axis.backend.empty(shape, dtype)
        return self.axis.transport.block(shape, dtype, self.dim, self.counts)

    def term(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Memory for this rank's term of a sum that `reduce_scatter` is to divide."""
        if self.axis.size == 1:
            return self.axis.backend.empty(shape, dtype)
        return self.axis.transport.term(shape, dtype)

    def all_gather(self, a: Array) -> Array:
        """The whole dimension, from every rank's block of it."""
        return self.axis.all_gather(a, self.dim, self.counts)

    def reduce_scatter(self, a: Array) -> Array:
        """This rank's block of the sum over the ranks of `a`, whose dimension is whole."""
        return self.axis.reduce_scatter(a, self.dim, self.counts)

    def begin_reduce_scatter(self, a: Array) -> Pending:
        """`reduce_scatter` that may go on while this rank multiplies; see `Pending`."""
        return self.axis.begin_reduce_scatter(a, self.dim, self.counts)

    def prefetch(self, a: Array) -> Array | Pending:
        """`all_gather` that goes on while this rank computes; `a` itself where none can."""
        return self.axis.prefetch(a, self.dim, self.counts)

    def broadcast(self, a: Array, root: int) -> Array:
        """The block of the rank `root`, on every rank."""
        if self.axis.rank != root:
            shape = resized(a.shape, self.dim, self.counts[root])
            a = self.axis.backend.empty(shape, a.dtype)
        return self.axis.broadcast(a, root)

    def reduce(self, a: Array, root: int) -> Array | None:
        """The sum of the ranks' terms of the block of `root`, there; None elsewhere."""
        return self.axis.reduce(a, root)


class Grid:
    """The ranks of a communicator as a Cartesian grid with named directions.

    The first direction varies slowest: on an X x Y x Z grid, rank (i Y + j) Z + l is (i, j, l).

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or Absent
        All ranks of the grid; every one of them must make it.
    backend : str or Backend, optional
        Whose arrays travel on it; see `mm3d.backend.get`.
    **shape : int
        The directions, single letters, and their sizes.

    Raises
    ------
    ValueError
        When the sizes do not multiply to the number of ranks, or a name is not one letter.

    Examples
    --------
    >>> grid = Grid(comm, x=2, y=2, z=2)
    >>> grid["x"].all_gather(a, dim=0)
    """

    def __init__(self, comm: MPI.Intracomm | Absent, backend: str | Backend | None = None,
                 **shape: int) -> None:
        self.backend = backend if isinstance(backend, Backend) else backends.get(backend)
        wrong = [f"{name}={size!r}" for name, size in shape.items()
                 if len(name) != 1 or not isinstance(size, numbers.Integral) or size < 1]
        if wrong:
            raise ValueError(f"grid directions are single letters with sizes of at least 1, "
                             f"not {', '.join(wrong)}")
        text = " x ".join(map(str, shape.values()))
        if math.prod(shape.values()) != comm.size:
            raise ValueError(f"a grid of {text} has {math.prod(shape.values())} ranks, but the "
                             f"communicator has {comm.size}: start that many ranks, or give "
                             f"sizes whose product is {comm.size}")
        environment.check_launcher(comm.size if comm == MPI.COMM_WORLD else None)
        self.comm, self.shape = comm, {name: int(size) for name, size in shape.items()}
        self.size, self.rank = comm.size, comm.rank
        self.coords = self.coordinates(comm.rank)
        kind = settle(comm, self.backend)
        node = node_of(comm) if kind == "shared" else 0
        self.axes = {name: Axis(name, self._line(name), self.backend, kind, node)
                     for name in shape}

    def _line(self, name: str) -> MPI.Intracomm | Absent:
        """The ranks that differ from this one along the direction `name`."""
        if isinstance(self.comm, Absent):
            return Absent(self.shape[name], self.coords[name])
        # Ranks are on one line when they have the same number but for this coordinate.
        return self.comm.Split(self.rank - self.stride(name) * self.coords[name],
                               self.coords[name])

    def stride(self, name: str) -> int:
        """How far apart neighbours along the direction `name` are in the numbering of ranks."""
        names = list(self.shape)
        return math.prod(self.shape[other] for other in names[names.index(name) + 1:])

    def __getitem__(self, name: str) -> Axis:
        return self.axes[name]

    def __getattr__(self, name: str) -> Axis:
        try:
            return self.__dict__["axes"][name]
        except KeyError:
            raise AttributeError(f"the grid has no direction or attribute {name!r}") from None

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.shape.items())
        return f"Grid({sizes}; rank {self.rank} at {tuple(self.coords.values())})"

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate along each direction of the rank numbered `rank`."""
        coords = {}
        for name, size in reversed(self.shape.items()):
            rank, coords[name] = divmod(rank, size)
        return {name: coords[name] for name in self.shape}

    def everywhere(self) -> Iterator[Mapping[str, int]]:
        """The coordinates of every rank, in rank order."""
        for point in itertools.product(*map(range, self.shape.values())):
            yield dict(zip(self.shape, point))

    def traffic(self) -> dict[tuple[str, str], Traffic]:
        """What this rank moved since `reset_traffic`, by (direction, collective)."""
        return {(name, collective): traffic for name, axis in self.axes.items()
                for collective, traffic in axis.traffic.items()}

    def reset_traffic(self) -> None:
        """Start counting anew."""
        for axis in self.axes.values():
            axis.traffic = {}

    def free(self) -> None:
        """Give the communicators of the directions back; the grid is of no use afterwards.

        Every rank must call it.  MPI libraries hold some thousand communicators at most, so a
        program that makes many grids frees those it is done with.
        """
        for axis in self.axes.values():
            axis.transport.free()
            axis.comm.Free()
        self.axes = {}
