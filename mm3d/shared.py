"""Collectives through memory that the ranks of one node share.

A gather then copies nothing: every rank's block is placed as its part of the whole array, which
the others read where it lies once all have arrived.  A sum over the ranks is made in place: the
first rank's term lies where the result is to be, and every rank adds the others' terms to its
part of it.  Small arrays that were not placed, such as biases and statistics, are handed to all.
"""

import math
import os
import weakref
from typing import Any

import numpy as np
from mpi4py import MPI

from mm3d.backend import Array, Backend
from mm3d.memory import MAIL, SharedMemory, available
from mm3d.pool import Loan
from mm3d.transport import MpiTransport, block_indices, resized


class _Lease(Loan):
    """One use of a region by this rank, of which an equal share counts as its memory.

    Attributes
    ----------
    memory : SharedMemory
        What the region is of.
    handed_out : weakref to ndarray
        The array that was made here: this rank's part of the whole, or its term of a sum.
    divided : tuple
        The dimension and the lengths of the parts of the whole.
    partner : ndarray or None
        Of a term that is to be summed: on the first rank all other terms, elsewhere the first.
    """

    memory: SharedMemory
    handed_out: Any = staticmethod(lambda: None)
    divided: tuple = ()
    partner: np.ndarray | None = None


class SharedTransport(MpiTransport):
    """All collectives through memory that all ranks of the line share.

    Raises
    ------
    OSError
        When a rank cannot open the memory of another.
    """

    name = "shared"
    note = ("ranks read each other's blocks where they lie: gathers of blocks that were placed "
            "move nothing, the products read them; sums read the other ranks' terms, and what "
            "was not placed is copied")
    goes_on = False    # a gather copies nothing, and sums are made at once
    in_place = frozenset({"all_gather", "broadcast"})

    def __init__(self, comm: MPI.Intracomm, backend: Backend) -> None:
        super().__init__(comm, backend)
        self.size = comm.size
        self.memory, self.pool = SharedMemory(comm), backend.pool

    def meet(self) -> None:
        self.memory.meet()

    def block(self, shape: tuple[int, ...], dtype: Any, dim: int, counts: list[int]) -> Array:
        whole, lease = self._lend(resized(shape, dim, sum(counts)), dtype)
        return _placed(whole, lease, dim, counts, self._own(whole.ndim, dim, counts))

    def term(self, shape: tuple[int, ...], dtype: Any) -> Array:
        first, lease = self._lend(shape, dtype)
        others, elsewhere = self._lend((self.size - 1, *shape), dtype)
        term, partner = first, others
        if self.rank:
            term, partner, lease = others[self.rank - 1], first, elsewhere
        lease.handed_out, lease.partner = weakref.ref(term), partner
        return term

    def all_gather(self, a: Array, dim: int, counts: list[int]) -> Array:
        lease = self._lease(a)
        if lease is None or lease.divided != (dim % a.ndim, counts):
            if self._small(resized(a.shape, dim, max(counts)), a.dtype):
                return self._small_gather(a, dim, counts)
            block = self.block(a.shape, a.dtype, dim, counts)
            block[...] = a
            self._moved += a.size
            a = block
        self.memory.meet()
        return _common(a.base)

    def reduce_scatter(self, a: Array, dim: int, counts: list[int]) -> Array:
        lease = self._lease(a)
        if lease is None or lease.partner is None:
            if self._small(a.shape, a.dtype):
                self._moved += a.size
                return self._sum_mail(self.memory.exchange(a), a, self._own(a.ndim, dim, counts))
            term = self.term(a.shape, a.dtype)
            term[...] = a
            self._moved += a.size
            lease, a = self._lease(term), term
        first, others = (a, lease.partner) if self.rank == 0 else (lease.partner, a.base)
        lease.partner = None
        self.memory.meet()
        own = self._own(a.ndim, dim, counts)
        part = _placed(first, self.pool.loan(first), dim, counts, own)
        for other in others:
            np.add(part, other[own], out=part)
        self._moved += (self.size - 1) * part.size
        return part

    def all_reduce(self, a: Array) -> Array:
        if self._small(a.shape, a.dtype):
            self._moved += a.size
            return self._sum_mail(self.memory.exchange(a), a, ())
        share, more = divmod(a.size, self.size)
        counts = [share + (rank < more) for rank in range(self.size)]
        part = self.reduce_scatter(np.reshape(a, -1), 0, counts)
        out = self.backend.empty(a.shape, a.dtype)
        out[...] = self.all_gather(part, 0, counts).reshape(a.shape)
        self._moved += a.size
        return out

    def broadcast(self, a: Array, root: int) -> Array:
        if self._small(a.shape, a.dtype):
            self._moved += a.size
            told = self.memory.tell(a, root)
            if self.rank != root:
                a[...] = told[:a.size].reshape(a.shape)
            return a
        whole, _ = self._lend(a.shape, a.dtype)
        if self.rank == root:
            whole[...] = a
            self._moved += a.size
        self.memory.meet()
        return a if self.rank == root else _common(whole)

    def reduce(self, a: Array, root: int) -> Array | None:
        self._moved += a.size * (self.rank != root)
        if self._small(a.shape, a.dtype):
            self._moved += a.size * (self.rank == root)
            terms = self.memory.collect(a, root)
            return None if terms is None else self._sum_mail(terms, a, ())
        terms, _ = self._lend((self.size, *a.shape), a.dtype)
        if self.rank != root:
            terms[self.rank] = a
        self.memory.meet()
        if self.rank != root:
            return None
        return self._sum([a if rank == root else term for rank, term in enumerate(terms)])

    def free(self) -> None:
        self.memory.meet()

    def _lend(self, shape: tuple[int, ...], dtype: Any) -> tuple[Array, _Lease]:
        """An array that all ranks share."""
        dtype = np.dtype(dtype)
        length = math.prod(shape) * dtype.itemsize
        region, place = self.memory.take(length)
        whole = np.ndarray(shape, dtype, *place)
        lease = self.pool.lend(whole, length // self.size, self.memory.give_back, region, _Lease)
        lease.memory = self.memory
        return whole, lease

    def _own(self, ndim: int, dim: int, counts: list[int]) -> tuple:
        """What to index a whole array with for this rank's part."""
        start = sum(counts[:self.rank])
        return (slice(None),) * (dim % ndim) + (slice(start, start + counts[self.rank]),)

    def _lease(self, a: Array) -> _Lease | None:
        """The lease that `a`, and no view of it, was made by; None if it was not made here."""
        lease = self.pool.loan(a)
        known = type(lease) is _Lease and lease.memory is self.memory and lease.handed_out() is a
        return lease if known else None

    def _small(self, shape: tuple[int, ...], dtype: np.dtype) -> bool:
        """Whether an array of each rank can be handed to all, and be read by all."""
        return math.prod(shape) * dtype.itemsize <= min(MAIL, 4 * MAIL // self.size)

    def _small_gather(self, a: Array, dim: int, counts: list[int]) -> Array:
        out = self.backend.empty(resized(a.shape, dim, sum(counts)), a.dtype)
        for part, index in zip(self.memory.exchange(a), block_indices(a.ndim, dim, counts)):
            place = out[index]
            place[...] = part[:place.size].reshape(place.shape)
        self._moved += a.size + out.size
        return out

    def _sum_mail(self, terms: list[Array], a: Array, own: tuple) -> Array:
        """The part `own` of the sum of the flat `terms`, which are arrays like `a`."""
        return self._sum([term[:a.size].reshape(a.shape)[own] for term in terms])

    def _sum(self, terms: list[Array]) -> Array:
        """The sum, in the order of the ranks, in new memory."""
        out = self.backend.empty(terms[0].shape, terms[0].dtype)
        np.add(terms[0], terms[1], out=out)
        for term in terms[2:]:
            np.add(out, term, out=out)
        self._moved += (self.size - 1) * out.size
        return out


def _placed(whole: Array, lease: _Lease, dim: int, counts: list[int], own: tuple) -> Array:
    """This rank's part of a shared array, its `own`, which can be gathered without a copy."""
    part = whole[own]
    lease.handed_out, lease.divided = weakref.ref(part), (dim % whole.ndim, counts)
    return part


def _common(whole: Array) -> Array:
    """An array of all ranks, to be read only: what one wrote there the others would see."""
    view = whole.view()
    view.setflags(write=False)
    return view


def node_of(comm: MPI.Intracomm) -> int:
    """A number that the ranks of `comm` on one node have in common; all must call it.

    With ``MM3D_NODE_SIZE=n`` every n ranks of a node count as a node of their own, which shows
    on one machine what happens on several.

    Raises
    ------
    ValueError
        When ``MM3D_NODE_SIZE`` is no positive integer.
    """
    wanted = os.environ.get("MM3D_NODE_SIZE")
    if wanted is not None and not (wanted.isdecimal() and int(wanted) > 0):
        raise ValueError(f"MM3D_NODE_SIZE={wanted!r}: give the number of ranks, 1 or more, that "
                         "count as one node")
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    ranks = np.empty(node.size, np.int64)
    node.Allgather(np.array([comm.rank]), ranks)
    size = int(wanted or node.size)
    first = int(ranks[node.rank // size * size])
    node.Free()
    return first


def one_node(comm: MPI.Intracomm, node: int) -> bool:
    """Whether the ranks of `comm`, this one's node being `node`, can share memory."""
    nodes = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([node]), nodes)
    return comm.size > 1 and available() and bool((nodes == node).all())
