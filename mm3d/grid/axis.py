"""Call collectives on arrays along one direction of the process grid, and count them.

An `Axis` is the set of ranks that differ from this one along one direction of the grid; its
collectives take and return arrays.  A transport moves the bytes (`mm3d.transport`).
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from html import escape
from typing import Any, Callable

from mpi4py import MPI

from mm3d.arrays.backend import Array, Backend, host_dtype
from mm3d.arrays.blocks import block_bounds, block_lengths, total_length
from mm3d.transport.mpi import MpiTransport
from mm3d.transport.pending import Pending

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all")


class Axis:
    """Call collectives of the ranks that differ from this one along one direction.

    Parameters
    ----------
    name : str
        Letter of the direction.
    comm : mpi4py.MPI.Intracomm
        The ranks, in the order of their coordinate.
    backend : Backend
        The array library.
    transport : MpiTransport
        Moves the bytes; see `mm3d.transport.choice.create_transports`.

    `size` is the number of these ranks, `rank` the coordinate of this one, and `traffic` has a
    `Traffic` for each kind of collective that was called.
    """

    def __init__(self, name: str, comm: MPI.Intracomm, backend: Backend,
                 transport: MpiTransport) -> None:
        self.name, self.comm, self.backend = name, comm, backend
        self.size, self.rank = comm.size, comm.rank
        self.transport = transport
        self.traffic: dict[str, Traffic] = defaultdict(Traffic)

    def __repr__(self) -> str:
        return f"Axis({self.name}: rank {self.rank} of {self.size})"

    def all_gather(self, a: Array, dim: int = 0, counts: list[int] | None = None) -> Array:
        """Gather the blocks of all ranks, joined along `dim`.

        Parameters
        ----------
        a : Array
            This rank's block, of the same dtype on all ranks and the same shape but along `dim`.
            Where ranks share memory, an array from `Split.empty` is not copied if it is passed
            itself and not as a view; every rank may also pass another array.
        dim : int
            The dimension that the blocks divide.
        counts : list of int, optional
            Lengths of the ranks' blocks along `dim`, given on all ranks or on none; by default
            they are gathered first.

        Returns
        -------
        Array
            The joined array, `sum(counts)` long along `dim`; `a` itself on an axis of one.  If
            ranks share memory, it is one array for all of them and must not be written; if `a` is
            a part of it (`Split.empty`), writes to `a` are visible to every rank.

        Raises
        ------
        ValueError
            When `a` does not fit `counts`.  Where ranks share memory, also for different calls on
            different ranks; then all ranks raise it, before any array is read.
        """
        if self.size == 1:
            return a
        if counts is None:
            counts = self.comm.allgather(self._length(a, dim))
        self._check(counts, self._length(a, dim), gathered=True)
        out = self.transport.all_gather(a, dim, counts)
        self._count("all_gather", a, out.size - a.size, self.size - 1)
        return out

    def prefetch(self, a: Array, dim: int, counts: list[int]) -> Array | Pending:
        """Start an `all_gather`, which `mm3d.grid.split.gather` completes; else return `a`."""
        if self.size == 1 or not self.transport.nonblocking:
            return a
        self._check(counts, self._length(a, dim), gathered=True)
        pending = self.transport.begin_all_gather(a, dim, counts)
        self._count("all_gather", a, pending.out.size - a.size, self.size - 1)
        return pending

    def reduce_scatter(self, a: Array, dim: int = 0, counts: list[int] | None = None) -> Array:
        """Sum `a` over all ranks, and return this rank's block of the sum along `dim`.

        Parameters
        ----------
        a : Array
            This rank's term of the sum, of the same shape and dtype on every rank.  An array from
            `Split.term` may be overwritten; every rank may also pass another array.
        dim, counts
            As in `all_gather`; the blocks' lengths are by default `block_lengths`.

        Returns
        -------
        Array
            ``counts[rank]`` long along `dim`; `a` itself on an axis of one rank.  Errors are
            those of `all_gather`.
        """
        if self.size == 1:
            return a
        if counts is None:
            counts = block_lengths(self._length(a, dim), self.size)
        self._check(counts, self._length(a, dim))
        out = self.transport.reduce_scatter(a, dim, counts)
        self._count("reduce_scatter", a, a.size - out.size, self.size - 1)
        return out

    def begin_reduce_scatter(self, a: Array, dim: int, counts: list[int]) -> Pending:
        """Start a `reduce_scatter` that may run while this rank computes."""
        if self.size == 1:
            return Pending(a)
        self._check(counts, self._length(a, dim))
        pending = self.transport.begin_reduce_scatter(a, dim, counts)
        self._count("reduce_scatter", a, a.size - pending.out.size, self.size - 1)
        return pending

    def all_reduce(self, a: Array) -> Array:
        """Return the sum of `a` over all ranks, on every rank (`a` itself on an axis of one)."""
        if self.size == 1:
            return a
        _, own = block_bounds(size := self._length(a), self.size, self.rank)
        out = self.transport.all_reduce(a)
        self._count("all_reduce", a, 2 * (size - own), 2 * (self.size - 1))
        return out

    def broadcast(self, a: Array, root: int) -> Array:
        """Broadcast `a` of the rank `root` to all ranks.

        On the other ranks `a` gives shape and dtype and may be overwritten.  The result may be an
        array that several ranks share, which must not be written.  Shape, dtype and root must be
        the same on all ranks.  A root that is no rank raises ValueError; if ranks share memory, so
        does a difference, at the latest in the next collective that gathers or sums for all ranks.
        """
        return self._rooted("broadcast", self.transport.broadcast, a, root)

    def begin_broadcast(self, a: Array, root: int) -> Pending:
        """Start a `broadcast` that may run while this rank computes."""
        return self._rooted("broadcast", self.transport.begin_broadcast, a, root, Pending)

    def reduce(self, a: Array, root: int) -> Array | None:
        """Return the sum of `a` over all ranks on the rank `root`; None on the others.

        An `a` from `Split.reduce_term` may be overwritten.  Shape, dtype and root must be the same
        on all ranks, as for `broadcast`.
        """
        return self._rooted("reduce", self.transport.reduce, a, root)

    def begin_reduce(self, a: Array, root: int) -> Pending:
        """Start a `reduce` that may run while this rank computes."""
        return self._rooted("reduce", self.transport.begin_reduce, a, root, Pending)

    def all_to_all(self, a: Array, sends: list[int], receives: list[int], dim: int = 0) -> Array:
        """Send a block of `a` to every rank, and join the blocks that they send to this one.

        Parameters
        ----------
        a : Array
            The blocks for the ranks in their order, joined along `dim`; of the same dtype on all
            ranks and the same shape but along `dim`.
        sends : list of int
            Lengths of these blocks; 0 where there is nothing for a rank.
        receives : list of int
            Lengths of the blocks that the ranks send to this one: what they have in `sends`.
        dim : int
            The dimension that the blocks divide.

        Returns
        -------
        Array
            The blocks received, in the order of the ranks, `sum(receives)` long along `dim`; `a`
            itself on an axis of one.

        Raises
        ------
        ValueError
            When `a` does not fit `sends`, or a rank sends itself another length than it receives.
            Where ranks share memory, on all ranks, when two of them do not agree on a length.
        """
        if self.size == 1:
            return a
        self._check(sends, self._length(a, dim))
        if len(receives) != self.size or receives[self.rank] != sends[self.rank]:
            raise ValueError(f"blocks of {receives} cannot come to rank {self.rank} of "
                             f"{self.size} along {self.name}, which sends blocks of {sends}")
        out = self.transport.all_to_all(a, dim, sends, receives)
        away = sum(sends) - sends[self.rank]
        blocks = sum(map(bool, sends)) - bool(sends[self.rank])
        self._count("all_to_all", a, math.prod(a.shape) // max(1, a.shape[dim]) * away, blocks)
        return out

    def _length(self, a: Array, dim: int | None = None) -> int:
        """Return the length of an array along `dim`, by default the number of its elements.

        Raises ValueError for what has none.
        """
        try:
            return a.size if dim is None else a.shape[dim]
        except (AttributeError, IndexError, TypeError):
            said = "" if dim is None else f"dim={dim!r} of "
            raise ValueError(f"{said}{getattr(a, 'shape', type(a).__name__)} along {self.name}: "
                             f"an array, and one of its dimensions, would do") from None

    def _check(self, counts: list[int], length: int, gathered: bool = False) -> None:
        """Raise ValueError unless all blocks are so long, or this rank's if it is `gathered`."""
        if len(counts) != self.size or length != (
                counts[self.rank] if gathered else total_length(counts)):
            raise ValueError(f"an array {length} long does not fit blocks of {counts[:8]} on rank "
                             f"{self.rank} of {self.size} along {self.name}")

    def _rooted(self, collective: str, call: Callable[[Array, int], Any], a: Array, root: int,
                alone: Callable[[Array], Any] = lambda a: a) -> Any:
        """Make a call of the transport that has one root, and count it; return its result.

        On an axis of one rank it is `alone` of `a`.
        """
        if self.size == 1:
            return alone(a)
        if not 0 <= root < self.size:    # in shared memory nobody would write the result
            raise ValueError(f"{collective} along {self.name}: no rank is root {root}, 0 to "
                             f"{self.size - 1} would do")
        moved, words = int(self.rank != root), self._length(a)
        result = call(a, root)
        self._count(collective, a, moved * words, moved)
        return result

    def _count(self, collective: str, a: Array, words: int, messages: int) -> None:
        """Add one call of a collective on `a` to the traffic."""
        traffic = self.traffic[collective]
        traffic.calls += 1
        traffic.messages += messages
        traffic.words += words
        traffic.bytes += words * (getattr(a.dtype, "itemsize", 0) or host_dtype(a).itemsize)
        traffic.moved += self.transport.take_moved()


@dataclass
class Traffic:
    """Count the traffic of one rank by one kind of collective along one direction.

    Calls, messages, words and bytes are computed from the arrays' shapes, for bucket (ring)
    algorithms, with which gathers and reductions move the fewest words possible: a gather
    receives and a reduction sends all blocks except the rank's own, and so does an all-to-all.
    They are the same for every transport; only `moved` is counted by the transport.

    Attributes
    ----------
    calls : int
        Calls of the collective.
    messages : int
        Blocks received or sent; in an all-to-all, blocks sent that are not empty.
    words : int
        Array elements received (gather, broadcast) or sent (reductions, all-to-all); an all-reduce
        is a reduce-scatter and an all-gather.
    bytes : int
        `words` times the size of an element.
    moved : float
        Words that the transport moved on this rank by its own count, see
        `mm3d.transport.mpi.MpiTransport.take_moved`; NaN if it does not count them.
    """

    calls: int = 0
    messages: int = 0
    words: int = 0
    bytes: int = 0
    moved: float = field(default=0, compare=False, repr=False)

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(getattr(self, one.name) + getattr(other, one.name)
                         for one in fields(self)))


class Shown:
    """Show an object in notebooks as it prints."""

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


class TrafficCounts(Shown, dict[tuple[str, str], Traffic]):
    """Hold traffic by (direction, collective); printed it is a table.

    >>> print(TrafficCounts({("x", "all_gather"): Traffic(calls=2, words=64)}))
    collective     along  calls      words
    all_gather     x          2         64
    all                       2         64
    """

    def beside(self, closed_form: Mapping[tuple[str, str], float] | None = None) -> str:
        """Format as a table, beside the words of the closed form, by the same keys.

        See `mm3d.model.cost.step_words` for those of a step.
        """
        stated, whole = dict(closed_form or {}), ("", "all")
        stated[whole] = sum(stated.values())
        found = dict.fromkeys([*self, *stated], Traffic()) | self
        found[whole] = sum(self.values(), Traffic())
        rows = [("collective", "along", "calls", "words", "closed form, mean"),
                *((kind, along, one.calls, one.words, f"{stated.get((along, kind), 0):.10g}")
                  for (along, kind), one in found.items())]
        return "\n".join(f"{kind:15}{along:7}{calls:>5}{words:>11}"
                         + f"{form:>19}" * (closed_form is not None)
                         for kind, along, calls, words, form in rows)

    __str__ = beside
