"""Call collectives on arrays along one direction of the process grid, and count them.

An `Axis` is the set of ranks that differ from this one along one direction of the grid; its
collectives take and return arrays.  A `Split` is one dimension of one matrix divided over one
Axis: all that an algorithm needs to gather and to scatter it.  The bytes are moved by a transport
(`mm3d.transport`).
"""

from dataclasses import dataclass, field
from typing import Any

from mpi4py import MPI

from mm3d.arrays.backend import Array, Backend, host_dtype
from mm3d.arrays.blocks import blocks, resized
from mm3d.transport.mpi import MpiTransport
from mm3d.transport.pending import Pending

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")


@dataclass
class Traffic:
    """Count what one rank moves with one kind of collective along one direction.

    Calls, messages, words and bytes are counted from the arrays' shapes, as if the bucket (ring)
    algorithms moved them, for which gathers and reductions move the least possible: a gather
    receives and a reduction sends every block but the rank's own.  They are the same for every
    transport; `moved` is the transport's own count.

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
    moved : float
        Words that the transport moved on this rank by its own statement, see
        `mm3d.transport.mpi.MpiTransport.take_moved`; NaN where it does not know.
    """

    calls: int = 0
    messages: int = 0
    words: int = 0
    bytes: int = 0
    moved: float = field(default=0, compare=False, repr=False)


class Axis:
    """Call collectives between the ranks that differ from this one along one direction.

    Parameters
    ----------
    name : str
        The direction's letter.
    comm : mpi4py.MPI.Intracomm
        These ranks, in order.
    backend : Backend
        Whose arrays are communicated.
    transport : MpiTransport
        Moves the bytes; see `mm3d.transport.choice.transports_for`.
    """

    def __init__(self, name: str, comm: MPI.Intracomm, backend: Backend,
                 transport: MpiTransport) -> None:
        self.name, self.comm, self.backend = name, comm, backend
        self.size, self.rank = comm.size, comm.rank
        self.transport = transport
        self.traffic: dict[str, Traffic] = {}

    def __repr__(self) -> str:
        return f"Axis({self.name}: rank {self.rank} of {self.size})"

    def split(self, dim: int, extent: int, unit: int = 1) -> "Split":
        """Divide dimension `dim`, of `extent` elements in all, over this axis."""
        return Split(self, dim, extent, unit)

    def all_gather(self, a: Array, dim: int = 0, counts: list[int] | None = None) -> Array:
        """Gather the blocks of all ranks, joined along `dim`.

        Parameters
        ----------
        a : Array
            This rank's block, of the same dtype on all ranks and the same shape but along `dim`.
            Where ranks share memory an array from `Split.empty` is not copied, if it is passed
            itself and not as a view; any rank may pass another array.
        dim : int
            The dimension that the blocks divide.
        counts : list of int, optional
            The blocks' lengths along `dim`, on all ranks or on none; if not given they are
            gathered first.

        Returns
        -------
        Array
            The whole, `sum(counts)` long along `dim`; `a` itself on an axis of one rank.  Where
            ranks share memory it is one array for all of them and must not be written; if `a` is
            a part of it (`Split.empty`), writes to `a` are visible to every rank.

        Raises
        ------
        ValueError
            When `a` does not fit `counts`; where ranks share memory, on all of them, also when
            they make different calls, before any array is read.
        """
        if self.size == 1:
            return a
        if counts is None:
            counts = self.comm.allgather(a.shape[dim])
        self._check(counts, a.shape[dim], counts[self.rank])
        out = self.transport.all_gather(a, dim, counts)
        self._count("all_gather", a, out.size - a.size, self.size - 1)
        return out

    def reduce_scatter(self, a: Array, dim: int = 0, counts: list[int] | None = None) -> Array:
        """Sum `a` over all ranks, and return this rank's block of the sum along `dim`.

        Parameters
        ----------
        a : Array
            This rank's term of the sum, of the same shape and dtype on every rank.  An array from
            `Split.term` may be overwritten; any rank may pass another array.
        dim : int
            The dimension to divide.
        counts : list of int, optional
            The blocks' lengths along `dim`; by default those of `mm3d.arrays.blocks.blocks`.

        Returns
        -------
        Array
            ``counts[rank]`` long along `dim`; `a` itself on an axis of one rank.

        Raises
        ------
        ValueError
            As `all_gather`.
        """
        if self.size == 1:
            return a
        counts = counts or blocks(a.shape[dim], self.size)
        self._check(counts, a.shape[dim], sum(counts))
        out = self.transport.reduce_scatter(a, dim, counts)
        self._count("reduce_scatter", a, a.size - out.size, self.size - 1)
        return out

    def begin_reduce_scatter(self, a: Array, dim: int = 0,
                             counts: list[int] | None = None) -> Pending:
        """Start a `reduce_scatter`, which may go on while this rank multiplies."""
        if self.size == 1:
            return Pending(a)
        counts = counts or blocks(a.shape[dim], self.size)
        self._check(counts, a.shape[dim], sum(counts))
        pending = self.transport.begin_reduce_scatter(a, dim, counts)
        self._count("reduce_scatter", a, a.size - pending.out.size, self.size - 1)
        return pending

    def prefetch(self, a: Array, dim: int, counts: list[int]) -> Array | Pending:
        """Start an `all_gather` that goes on while this rank computes; `a` where none can."""
        if self.size == 1 or not self.transport.nonblocking:
            return a
        self._check(counts, a.shape[dim], counts[self.rank])
        pending = self.transport.begin_all_gather(a, dim, counts)
        self._count("all_gather", a, pending.out.size - a.size, self.size - 1)
        return pending

    def all_reduce(self, a: Array) -> Array:
        """Sum `a` over all ranks, on every rank; `a` itself on an axis of one rank."""
        if self.size == 1:
            return a
        out = self.transport.all_reduce(a)
        own = blocks(a.size, self.size)[self.rank]
        self._count("all_reduce", a, 2 * (a.size - own), 2 * (self.size - 1))
        return out

    def broadcast(self, a: Array, root: int) -> Array:
        """Broadcast `a` of the rank `root` to all ranks.

        On the other ranks `a` gives the shape and may be overwritten; the result may be another
        array, shared by several ranks, which must not be written.  Shape, dtype and root must be
        the same on all ranks; where these share memory, a difference is a ValueError at the latest
        in the next collective that gathers or sums for all ranks.
        """
        if self.size == 1:
            return a
        out = self.transport.broadcast(a, root)
        received = int(self.rank != root)
        self._count("broadcast", a, received * a.size, received)
        return out

    def reduce(self, a: Array, root: int) -> Array | None:
        """Sum `a` over all ranks on the rank `root`; None on the others.

        An `a` from `Split.reduce_term` may be overwritten.  Shape, dtype and root must be the same
        on all ranks, as for `broadcast`.
        """
        if self.size == 1:
            return a
        out = self.transport.reduce(a, root)
        sent = int(self.rank != root)
        self._count("reduce", a, sent * a.size, sent)
        return out

    def _check(self, counts: list[int], length: int, expected: int) -> None:
        if length != expected or len(counts) != self.size:
            raise ValueError(f"an array {length} long does not fit blocks of {counts} on rank "
                             f"{self.rank} of {self.size} along {self.name}")

    def _count(self, collective: str, a: Array, words: int, messages: int) -> None:
        traffic = self.traffic.get(collective)
        if traffic is None:
            traffic = self.traffic[collective] = Traffic()
        traffic.calls += 1
        traffic.messages += messages
        traffic.words += words
        traffic.bytes += words * (getattr(a.dtype, "itemsize", 0) or host_dtype(a).itemsize)
        traffic.moved += self.transport.take_moved()


class Split:
    """Divide one dimension of a matrix over one axis, and call collectives on its blocks.

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
        """Allocate this rank's block, of local `shape`, so that `all_gather` need not copy it.

        Every rank of the axis must call it, with the same dtype and with shapes that fit;
        `all_gather` accepts any other array as well.
        """
        if self.axis.size == 1:
            return self.axis.backend.empty(shape, dtype)
        return self.axis.transport.block(shape, dtype, self.dim, self.counts)

    def term(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate this rank's term of a sum for `reduce_scatter`.

        Every rank of the axis must call it, with the same shape and dtype; `reduce_scatter`
        accepts any other array as well.
        """
        if self.axis.size == 1:
            return self.axis.backend.empty(shape, dtype)
        return self.axis.transport.term(shape, dtype)

    def reduce_term(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate this rank's term of a sum for `reduce`; otherwise like `term`."""
        if self.axis.size == 1:
            return self.axis.backend.empty(shape, dtype)
        return self.axis.transport.summand(shape, dtype)

    def all_gather(self, a: Array) -> Array:
        """Gather the whole dimension from the blocks of all ranks."""
        return self.axis.all_gather(a, self.dim, self.counts)

    def reduce_scatter(self, a: Array) -> Array:
        """Sum `a`, whose dimension is whole, over the ranks; return this rank's block."""
        return self.axis.reduce_scatter(a, self.dim, self.counts)

    def begin_reduce_scatter(self, a: Array) -> Pending:
        """Start a `reduce_scatter`, which may go on while this rank multiplies."""
        return self.axis.begin_reduce_scatter(a, self.dim, self.counts)

    def prefetch(self, a: Array) -> Array | Pending:
        """Start an `all_gather` that goes on while this rank computes; `a` where none can."""
        return self.axis.prefetch(a, self.dim, self.counts)

    def broadcast(self, a: Array, root: int) -> Array:
        """Broadcast the block of the rank `root` to all ranks."""
        if self.axis.rank != root:
            shape = resized(a.shape, self.dim, self.counts[root])
            a = self.axis.backend.empty(shape, a.dtype)
        return self.axis.broadcast(a, root)

    def reduce(self, a: Array, root: int) -> Array | None:
        """Sum the ranks' terms of the block of `root` on that rank; None on the others."""
        return self.axis.reduce(a, root)
