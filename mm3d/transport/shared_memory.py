"""Carry out collectives through memory that the ranks of one node share.

A gather copies nothing: every rank's block is allocated as a part of the whole array, which the
others read in place after a barrier.  A sum over the ranks is made in place: the first rank's
term is in the memory of the result, and every rank adds the others' terms to its part of it, also
when only one rank needs the sum; float16 is added in float32 and rounded once.  Small arrays that
are not in shared memory, such as biases and statistics, are passed to all ranks as messages.

Other arrays that are not in shared memory are copied there: the ranks compare their regions at
the barrier, and if these differ all copy to a new region.  Calls that differ in kind, dtype,
shape or counts raise a ValueError on all ranks before any array is read.
"""

import functools
import math
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mm3d.arrays.backend import Array, Backend
from mm3d.arrays.blocks import block_bounds, block_lengths, resized_shape
from mm3d.arrays.pool import Lease
from mm3d.transport import sums
from mm3d.transport.barrier import (ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, KNOWN_CALLS,
                                    NO_ROOM, REDUCE, REDUCE_SCATTER, PackedCall, encode_call)
from mm3d.transport.mpi import MpiTransport
from mm3d.transport.segments import (MESSAGE_BYTES, SharedMemory, join_blocks,
                                     read_only_view)


@dataclass(frozen=True)
class _Divided:
    """Describe a collective on an array that is divided along one dimension."""

    call: PackedCall    # the description that ranks compare
    along: tuple[int, tuple[int, ...]]    # the dimension, and the lengths of the blocks
    # Shape of the whole array, and index of this rank's block.
    shape: tuple[int, ...]
    own: tuple
    # Bytes of the longest block, and of the whole.
    block_bytes: int
    bytes: int


@functools.lru_cache(KNOWN_CALLS)
def _divided(kind: int, dtype: np.dtype, shape: tuple[int, ...], dim: int,
             counts: tuple[int, ...], rank: int) -> _Divided:
    """Describe a collective; the length of `shape` along `dim` does not matter."""
    dim, start = dim % len(shape), sum(counts[:rank])
    shape, longest = (resized_shape(shape, dim, length) for length in (sum(counts), max(counts)))
    return _Divided(encode_call(kind, dtype, shape, dim, counts), (dim, counts), shape,
                    (slice(None),) * dim + (slice(start, start + counts[rank]),),
                    *(math.prod(one) * dtype.itemsize for one in (longest, shape)))


class _SharedLease(Lease):
    """A region that this rank uses; it counts an equal share of the bytes as its own."""

    memory: SharedMemory    # that the region is in
    # The array returned to the caller, a weakref to it: this rank's part of the whole, or its term
    # of a sum.
    handed_out: Any = staticmethod(lambda: None)
    along: tuple = ()    # the dimension along which the whole is divided, and the parts' lengths
    # For a term that is not summed yet: on the first rank all other terms, elsewhere the first.
    partner: np.ndarray | None = None
    number: int = NO_ROOM    # for a term: the region of the first's, by which all identify the sum


class SharedTransport(MpiTransport):
    """Carry out all collectives through memory that the ranks of the line share.

    Raises OSError when a rank cannot open the memory of another.
    """

    name = "shared"
    nonblocking = False    # a gather copies nothing, and sums are made at once
    nonblocking_rooted = False

    def __init__(self, comm: MPI.Intracomm, backend: Backend) -> None:
        super().__init__(comm, backend)
        self.size = comm.size
        # The largest array of each rank that is passed as a message: reading all of them is fast.
        self._message_bytes = min(MESSAGE_BYTES, 4 * MESSAGE_BYTES // self.size)
        self.memory, self.pool = SharedMemory(comm), backend.pool

    def barrier(self) -> None:
        self.memory.synchronize()

    def block(self, shape: tuple[int, ...], dtype: Any, dim: int, counts: list[int]) -> Array:
        dtype = np.dtype(dtype)
        divided = _divided(ALL_GATHER, dtype, shape, dim, tuple(counts), self.rank)
        return _mark_placed(*self._lend(*self._take(divided.shape, dtype)), divided)

    def term(self, shape: tuple[int, ...], dtype: Any) -> Array:
        first, lease = self._lend(*self._take(shape, dtype))
        others, elsewhere = self._lend(*self._take((self.size - 1, *shape), dtype))
        number, term, partner = lease.item, first, others
        if self.rank:
            term, partner, lease = others[self.rank - 1], first, elsewhere
        lease.handed_out, lease.partner, lease.number = weakref.ref(term), partner, number
        return term

    def reduce_term(self, shape: tuple[int, ...], dtype: Any) -> Array:
        small = self._fits_message(shape, np.dtype(dtype))    # then only the root sums
        return (self.backend.empty if small else self.term)(shape, dtype)

    def all_gather(self, a: Array, dim: int, counts: list[int]) -> Array:
        divided = _divided(ALL_GATHER, a.dtype, a.shape, dim, tuple(counts), self.rank)
        lease = self._find_lease(a)
        if lease is not None and lease.along == divided.along:
            if self.memory.synchronize(divided.call, lease.item):
                return read_only_view(a.base)
        elif divided.block_bytes <= self._message_bytes:
            parts = self.memory.all_gather(a, divided.call)
            if parts is not None:
                out = self.backend.empty(divided.shape, a.dtype)
                self._moved += a.size + out.size
                return join_blocks(parts, out, *divided.along)
        else:
            whole, region = self._take(divided.shape, a.dtype, trial=True)
            if whole is not None:
                self._copy(a, whole[divided.own])
            if self.memory.synchronize(divided.call, region):
                return read_only_view(self._lend(whole, region)[0])
        # Some blocks were placed and some were not, or there was no room: copy all to new memory.
        return self.all_gather(self._copy(a, self.block(a.shape, a.dtype, dim, counts)), dim,
                               counts)

    def reduce_scatter(self, a: Array, dim: int, counts: list[int]) -> Array:
        divided = _divided(REDUCE_SCATTER, a.dtype, a.shape, dim, tuple(counts), self.rank)
        lease = self._find_lease(a)
        if divided.bytes <= self._message_bytes and (lease is None or lease.partner is None):
            parts = self.memory.all_gather(a, divided.call)
            if parts is not None:
                self._moved += a.size
                return self._sum_messages(parts, a, divided.own)
            a = self._copy(a, self.term(a.shape, a.dtype))
            lease = self._find_lease(a)
        first, others = self._shared_terms(a, lease, divided.call)
        part = _mark_placed(first, self.pool.lease_of(first), divided)
        return self._add(part, [other[divided.own] for other in others])

    def _shared_terms(self, a: Array, lease: _SharedLease | None,
                      call: PackedCall) -> tuple[Array, Array]:
        """Return the first rank's term and the others', in shared memory, where `a` may lie."""
        if lease is not None and lease.partner is not None:
            first, others = (lease.partner, a.base) if self.rank else (a, lease.partner)
            if self.memory.synchronize(call, lease.number):
                lease.partner = None
                return first, others
        else:
            first, region = self._take(a.shape, a.dtype, trial=True)
            others, elsewhere = self._take((self.size - 1, *a.shape), a.dtype, trial=True)
            room = first is not None and others is not None
            if room:
                self._copy(a, others[self.rank - 1] if self.rank else first)
            if self.memory.synchronize(call, region if room else NO_ROOM):
                return self._lend(first, region)[0], self._lend(others, elsewhere)[0]
        term = self._copy(a, self.term(a.shape, a.dtype))
        return self._shared_terms(term, self._find_lease(term), call)

    def _add(self, part: Array, others: list[Array]) -> Array:
        """Add the `others` to `part`, in their order, in place."""
        sums.add_terms([part, *others], part)
        self._moved += len(others) * part.size
        return part

    def all_reduce(self, a: Array) -> Array:
        if self._fits_message(a.shape, a.dtype):
            self._moved += a.size
            call = encode_call(ALL_REDUCE, a.dtype, a.shape)
            return self._sum_messages(self.memory.all_gather(a, call), a, ())
        counts = block_lengths(a.size, self.size)
        part = self.reduce_scatter(np.reshape(a, -1), 0, counts)
        out = self.backend.empty(a.shape, a.dtype)
        return self._copy(self.all_gather(part, 0, counts).reshape(a.shape), out)

    def broadcast(self, a: Array, root: int) -> Array:
        call = encode_call(BROADCAST, a.dtype, a.shape, root)
        if self._fits_message(a.shape, a.dtype):
            self._moved += a.size
            received = self.memory.broadcast(a, root, call)
            if self.rank != root:
                a[...] = received[:a.size].reshape(a.shape)
            return a
        whole, region = self._take(a.shape, a.dtype, trial=True)
        if self.rank == root and whole is not None:
            self._copy(a, whole)
        if not self.memory.synchronize(call, region):    # there was no room
            whole, region = self._take(a.shape, a.dtype)
            if self.rank == root:
                self._copy(a, whole)
            self.memory.synchronize(call, region)
        whole, _ = self._lend(whole, region)
        return a if self.rank == root else read_only_view(whole)

    def reduce(self, a: Array, root: int) -> Array | None:
        call = encode_call(REDUCE, a.dtype, a.shape, root)
        if self._fits_message(a.shape, a.dtype):
            self._moved += a.size
            terms = self.memory.gather(a, root, call)
            return None if terms is None else self._sum_messages(terms, a, ())
        first, others = self._shared_terms(a, self._find_lease(a), call)
        start, length = block_bounds(a.size, self.size, self.rank)
        own = slice(start, start + length)
        self._add(first.reshape(-1)[own], [other.reshape(-1)[own] for other in others])
        self.memory.synchronize(call)
        return first if self.rank == root else None

    def all_to_all(self, a: Array, dim: int, sends: list[int], receives: list[int]) -> Array:
        dim %= a.ndim
        shape = resized_shape(a.shape, dim, 0)
        call = encode_call(ALL_TO_ALL, a.dtype, shape, dim)
        words = math.prod(resized_shape(a.shape, dim, 1)) * self._gather_counts(
            sends, receives, call)
        flat, _ = self._packed(a, dim, sends)
        totals = words.sum(axis=1)
        if self._fits_message((int(totals.max()),), a.dtype):
            parts = self.memory.all_gather(self._flatten(flat), call)
        else:
            whole, lease = self._lend(*self._take((int(totals.sum()),), a.dtype))
            parts = np.split(whole, np.cumsum(totals[:-1]))
            parts[self.rank][...] = self._flatten(flat)
            self.memory.synchronize(call, lease.item)
        out = self.backend.empty(resized_shape(a.shape, dim, sum(receives)), a.dtype)
        starts = words[:, :self.rank].sum(axis=1)
        self._moved += a.size + out.size
        blocks = (part[start:] for part, start in zip(parts, starts))
        return join_blocks(blocks, out, dim, receives)

    def _gather_counts(self, sends: list[int], receives: list[int],
                       call: PackedCall) -> np.ndarray:
        """Gather the lengths that every rank sends to each rank, and compare those received."""
        given = np.array([sends, receives])
        parts = self.memory.all_gather(given.reshape(-1), call)
        self._moved += given.size
        sent, received = np.array([part[:given.size].reshape(given.shape)
                                   for part in parts]).swapaxes(0, 1)
        for source, target in np.argwhere(sent != received.T)[:1]:
            raise ValueError(f"rank {source} sends a block of {sent[source, target]} to rank "
                             f"{target} of this line, which is to receive "
                             f"{received[target, source]}: give both the same length")
        return sent

    def free(self) -> None:
        self.memory.synchronize()

    def _take(self, shape: tuple[int, ...], dtype: Any,
              trial: bool = False) -> tuple[Array | None, int]:
        """Return an array in a new region, None if a `trial` finds no room, and the region."""
        dtype = np.dtype(dtype)
        length = math.prod(shape) * dtype.itemsize
        region, place = (self.memory.try_take if trial else self.memory.take)(length)
        return None if place is None else np.ndarray(shape, dtype, *place), region

    def _lend(self, whole: Array, region: int) -> tuple[Array, _SharedLease]:
        """Begin this rank's lease of an array of `_take`; return both."""
        lease = self.pool.lend(whole, whole.nbytes // self.size, self.memory.give_back, region,
                               _SharedLease)
        lease.memory = self.memory
        return whole, lease

    def _find_lease(self, a: Array) -> _SharedLease | None:
        """Return the lease of `a`; None for views, and for arrays not allocated here."""
        lease = self.pool.lease_of(a)
        known = (type(lease) is _SharedLease and lease.memory is self.memory
                 and lease.handed_out() is a)
        return lease if known else None

    def _fits_message(self, shape: tuple[int, ...], dtype: np.dtype) -> bool:
        """Return whether arrays of all ranks are passed as messages."""
        return math.prod(shape) * dtype.itemsize <= self._message_bytes

    def _sum_messages(self, terms: list[Array], a: Array, own: tuple) -> Array:
        """Sum the part `own` of the flat `terms`, which are arrays like `a`, in their order."""
        terms = [term[:a.size].reshape(a.shape)[own] for term in terms]
        out = self.backend.empty(terms[0].shape, a.dtype)
        sums.add_terms(terms, out)
        self._moved += (self.size - 1) * out.size
        return out


def _mark_placed(whole: Array, lease: _SharedLease, divided: _Divided) -> Array:
    """Return this rank's part of a shared array, which is gathered without a copy."""
    part = whole[divided.own]
    lease.handed_out, lease.along = weakref.ref(part), divided.along
    return part
