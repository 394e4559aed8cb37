"""Carry out collectives on arrays in a device's memory.

`DeviceTransport` hands device buffers to a CUDA-aware MPI, `StagedTransport` copies them through
host memory and works with any MPI, `mm3d.transport.nccl` calls NCCL.  All three derive from
`ExchangeTransport`.  MPI's own reductions are not used: on device buffers some of
them crash (Open MPI's `Iallreduce`, `Ireduce_scatter_block`, `Reduce_scatter_block` in place),
others go through pageable host memory, and none supports bfloat16.
"""

import math
from typing import Any, Callable

from mm3d.arrays.backend import Array, accumulation_dtype, namespace
from mm3d.arrays.blocks import block_starts
from mm3d.transport.ordered import BlockLengths, OrderedTransport
from mm3d.transport.pending import Pending

# An all-reduce of at most this many elements, of all ranks together, gathers all terms: one
# exchange instead of two, and a second takes longer than 128 KiB take to arrive.
MAX_GATHERED_ELEMENTS = 1 << 15


class ExchangeTransport(OrderedTransport):
    """Build all collectives from an all-gather, a broadcast and an exchange; sum on the device.

    Terms are summed in the order of the ranks, in float32 where the elements have 16 bits, so that
    a CUDA-aware MPI and staging give the same bits; NCCL sums wider types in an order of its own.
    On device buffers some of MPI's nonblocking collectives crash: a subclass starts an `_exchange`
    by `_begin_exchange`, an `_all_gather` by `_begin_all_gather`, of the same arguments, and
    returns the function that ends it.
    """

    def begin_reduce_scatter(self, a: Array, dim: int, counts: list[int]) -> Pending:
        flat, lengths, out = self._terms(a, dim, counts)
        return Pending(out, self._begin_reduce_scatter(flat, out, lengths), kept=(flat,))

    def _begin_reduce_scatter(self, send: Array, recv: Array,
                              lengths: BlockLengths) -> Callable[[], Any]:
        """Start a `_reduce_scatter`, and return the function that ends it."""
        terms, receives = self._room_for_terms(send, lengths)
        arrive = self._begin_exchange(self._flatten(send), self._flatten(terms), lengths, receives)
        return lambda: (arrive(), self._add(terms, recv))

    def begin_all_gather(self, a: Array, dim: int, counts: list[int]) -> Pending:
        a, flat, lengths, out = self._whole(a, dim, counts)
        arrive = self._begin_all_gather(a, flat, lengths)
        return Pending(out, lambda: (arrive(), self._unpacked(flat, out, dim, counts)),
                       kept=(a,))

    def _add(self, terms: Array, out: Array) -> None:
        """Sum over the first dimension into `out`, in float32 at least."""
        xp = namespace(terms)
        total = xp.sum(terms, axis=0, dtype=accumulation_dtype(terms))
        out[...] = xp.reshape(xp.astype(total, out.dtype, copy=False), out.shape)

    def _all_reduce(self, send: Array, recv: Array) -> None:
        size, length = self.comm.size, math.prod(send.shape)
        if size * length > MAX_GATHERED_ELEMENTS:
            super()._all_reduce(send, recv)
            return
        self._count_received([length] * size)
        terms = self.backend.empty((size, length), send.dtype)
        self._all_gather(send, terms, [length] * size)
        self._add(terms, recv)

    def _reduce(self, send: Array, recv: Array | None, root: int) -> None:
        part, lengths = self._sum_share(send)
        at_root = recv is not None
        sends = [lengths[self.rank] * (rank == root) for rank in range(self.comm.size)]
        receives = lengths if at_root else [0] * self.comm.size
        self._count_received(receives)
        into = self._flatten(recv) if at_root else self.backend.empty((0,), send.dtype)
        self._exchange(part, into, sends, receives)


class DeviceTransport(ExchangeTransport):
    """Pass device buffers to a CUDA-aware MPI.

    The stream is synchronised before every call: MPI reads and writes device memory at once, in
    no stream's order.  Only all-gather(v), all-to-all(v) and broadcast are called, and, for what
    goes on while the device computes, messages between two ranks: of Open MPI's nonblocking
    collectives some crash on device buffers, and these need none of them.
    """

    name = "device"

    def _all_gather(self, send: Array, recv: Array, lengths: BlockLengths) -> None:
        self.backend.synchronize()
        super()._all_gather(send, recv, lengths)

    def _broadcast(self, buffer: Array, root: int) -> None:
        self.backend.synchronize()
        super()._broadcast(buffer, root)

    def _exchange(self, send: Array, recv: Array, sends: BlockLengths,
                  receives: BlockLengths) -> None:
        self.backend.synchronize()
        super()._exchange(send, recv, sends, receives)

    def _begin_exchange(self, send: Array, recv: Array, sends: BlockLengths,
                        receives: BlockLengths) -> Callable[[], Any]:
        return self._begin(_divide(send, sends), _divide(recv, receives))

    def _begin_all_gather(self, send: Array, recv: Array,
                          lengths: BlockLengths) -> Callable[[], Any]:
        return self._begin([self._flatten(send)] * self.comm.size,
                           _divide(self._flatten(recv), lengths))

    def _begin(self, outgoing: list[Array], incoming: list[Array]) -> Callable[[], Any]:
        """Start sending a block to every rank and receiving one from each; return the wait."""
        incoming[self.rank][...] = outgoing[self.rank]
        self.backend.synchronize()
        requests = [start(self.backend.mpi_buffer(block), peer)
                    for start, blocks in ((self.comm.Irecv, incoming),
                                          (self.comm.Isend, outgoing))
                    for peer, block in enumerate(blocks) if peer != self.rank and block.size]
        return lambda: [request.Wait() for request in requests]


class StagedTransport(ExchangeTransport):
    """Copy device arrays to host memory for any MPI, and copy results back.

    A GPU's copies go through pinned memory, each way on a stream of its own.
    """

    name = "staged"

    def _all_gather(self, send: Array, recv: Array, lengths: BlockLengths) -> None:
        outgoing, incoming = self.backend.host_copy(send), self.backend.host_buffer(recv)
        super()._all_gather(outgoing, incoming, lengths)
        self.backend.copy_from_host(incoming, recv)

    def _broadcast(self, buffer: Array, root: int) -> None:
        sends = self.rank == root
        host = self.backend.host_copy(buffer) if sends else self.backend.host_buffer(buffer)
        super()._broadcast(host, root)
        if not sends:
            self.backend.copy_from_host(host, buffer)

    def _exchange(self, send: Array, recv: Array, sends: BlockLengths,
                  receives: BlockLengths) -> None:
        self._begin_exchange(send, recv, sends, receives)()

    def _begin_exchange(self, send: Array, recv: Array, sends: BlockLengths,
                        receives: BlockLengths) -> Callable[[], Any]:
        outgoing, incoming = self.backend.host_copy(send), self.backend.host_buffer(recv)
        request = self.comm.Ialltoallv([outgoing, (sends, block_starts(sends))],
                                       [incoming, (receives, block_starts(receives))])
        return lambda: self._end(request, outgoing, incoming, recv)

    def _begin_all_gather(self, send: Array, recv: Array,
                          lengths: BlockLengths) -> Callable[[], Any]:
        outgoing, incoming = self.backend.host_copy(send), self.backend.host_buffer(recv)
        request = self.comm.Iallgatherv(outgoing, [incoming, (lengths, block_starts(lengths))])
        return lambda: self._end(request, outgoing, incoming, recv)

    def _end(self, request: Any, outgoing: Array, incoming: Array, recv: Array) -> None:
        """Wait for MPI, which reads `outgoing` until then, and copy the result to the device."""
        request.Wait()
        self.backend.copy_from_host(incoming, recv)


def lengths_and_starts(lengths: BlockLengths) -> list[tuple[int, int]]:
    """Return length and start of each of consecutive blocks."""
    return list(zip(lengths, block_starts(lengths)))


def _divide(a: Array, lengths: BlockLengths) -> list[Array]:
    """View consecutive blocks of a flat buffer."""
    return [a[start:start + length] for length, start in lengths_and_starts(lengths)]
