"""Build all collectives of device arrays from three that move bytes; sum on the device."""

import math
from abc import ABC, abstractmethod
from typing import Any, Callable

from mm3d.arrays.backend import Array, accumulation_dtype, namespace
from mm3d.arrays.blocks import block_lengths, block_starts
from mm3d.transport.mpi import MpiTransport
from mm3d.transport.pending import Pending

# An all-reduce of at most this many elements, of all ranks together, gathers all terms: one
# exchange instead of two, and a second takes longer than 128 KiB take to arrive.
MAX_GATHERED_ELEMENTS = 1 << 15

BlockLengths = list[int]


class ExchangeTransport(MpiTransport, ABC):
    """Build all collectives from an all-gather, a broadcast and an exchange; sum on the device.

    Terms are summed in the order of the ranks, in float32 where the elements have 16 bits, so that
    a CUDA-aware MPI and staging give the same bits; NCCL sums wider types in an order of its own.
    """

    nonblocking_rooted = False    # on device buffers some of MPI's nonblocking collectives crash

    def _count_received(self, lengths: BlockLengths) -> None:
        """Count the words of the blocks that this rank receives, one from each rank."""
        self._moved += sum(lengths) - lengths[self.rank]

    @abstractmethod
    def _begin_exchange(self, send: Array, recv: Array, sends: BlockLengths,
                        receives: BlockLengths) -> Callable[[], Any]:
        """Start an `_exchange`, and return the function that ends it."""

    def begin_reduce_scatter(self, a: Array, dim: int, counts: list[int]) -> Pending:
        flat, lengths, out = self._terms(a, dim, counts)
        return Pending(out, self._begin_reduce_scatter(flat, out, lengths), kept=(flat,))

    def _begin_reduce_scatter(self, send: Array, recv: Array,
                              lengths: BlockLengths) -> Callable[[], Any]:
        """Start a `_reduce_scatter`, and return the function that ends it."""
        terms, receives = self._room_for_terms(send, lengths)
        arrive = self._begin_exchange(self._flatten(send), self._flatten(terms), lengths, receives)
        return lambda: (arrive(), _sum_terms(terms, recv))

    def _room_for_terms(self, send: Array, lengths: BlockLengths) -> tuple[Array, BlockLengths]:
        """Return memory for all terms of this rank's block, and their lengths; count the words."""
        receives = [lengths[self.rank]] * self.comm.size
        self._count_received(receives)
        return self.backend.empty((self.comm.size, receives[0]), send.dtype), receives

    def begin_all_gather(self, a: Array, dim: int, counts: list[int]) -> Pending:
        a, flat, lengths, out = self._whole(a, dim, counts)
        arrive = self._begin_all_gather(a, flat, lengths)
        return Pending(out, lambda: (arrive(), self._unpacked(flat, out, dim, counts)),
                       kept=(a,))

    @abstractmethod
    def _begin_all_gather(self, send: Array, recv: Array,
                          lengths: BlockLengths) -> Callable[[], Any]:
        """Start an `_all_gather`, and return the function that ends it."""

    def _reduce_scatter(self, send: Array, recv: Array, lengths: BlockLengths) -> None:
        terms, receives = self._room_for_terms(send, lengths)
        self._exchange(self._flatten(send), self._flatten(terms), lengths, receives)
        _sum_terms(terms, recv)

    def _all_reduce(self, send: Array, recv: Array) -> None:
        size, length = self.comm.size, math.prod(send.shape)
        if size * length <= MAX_GATHERED_ELEMENTS:
            self._count_received([length] * size)
            terms = self.backend.empty((size, length), send.dtype)
            self._all_gather(send, terms, [length] * size)
            _sum_terms(terms, recv)
            return
        part, lengths = self._sum_share(send)
        self._count_received(lengths)
        self._all_gather(part, recv, lengths)

    def _reduce(self, send: Array, recv: Array | None, root: int) -> None:
        part, lengths = self._sum_share(send)
        at_root = recv is not None
        sends = [lengths[self.rank] * (rank == root) for rank in range(self.comm.size)]
        receives = lengths if at_root else [0] * self.comm.size
        self._count_received(receives)
        into = self._flatten(recv) if at_root else self.backend.empty((0,), send.dtype)
        self._exchange(part, into, sends, receives)

    def _sum_share(self, send: Array) -> tuple[Array, BlockLengths]:
        """Compute this rank's even share of the sum; return it with the lengths of all shares."""
        lengths = block_lengths(math.prod(send.shape), self.comm.size)
        part = self.backend.empty((lengths[self.rank],), send.dtype)
        self._reduce_scatter(self._flatten(send), part, lengths)
        return part, lengths


def _sum_terms(terms: Array, out: Array) -> None:
    """Sum over the first dimension into `out`, in float32 at least."""
    xp = namespace(terms)
    total = xp.sum(terms, axis=0, dtype=accumulation_dtype(terms))
    out[...] = xp.reshape(xp.astype(total, out.dtype, copy=False), out.shape)


def lengths_and_starts(lengths: BlockLengths) -> list[tuple[int, int]]:
    """Return length and start of each of consecutive blocks."""
    return list(zip(lengths, block_starts(lengths)))
