"""How arrays travel that lie in a device's memory, out of the host's reach.

`DeviceTransport` hands device buffers to a CUDA-aware MPI, `StagedTransport` carries them through
host memory with any MPI, `NcclTransport` leaves them to NCCL.  They share `WireTransport`, which
builds every collective from three ways to move bytes and sums on the device.  The reductions of an
MPI are never asked for: on device buffers some of them crash (Open MPI's `Iallreduce`,
`Ireduce_scatter_block`, `Reduce_scatter_block` in place), others go through pageable host memory,
and none knows bfloat16.
"""

import itertools
import math
from contextlib import contextmanager
from typing import Iterator

from mm3d.backend import Array, Backend, namespace, wide_dtype
from mm3d.transport import MpiTransport

# Elements up to which an all-reduce gathers all terms: one exchange instead of two.
SMALL = 4096

Lengths = list[int]


class WireTransport(MpiTransport):
    """Collectives made of a gather, a broadcast and an exchange; sums are the device's own.

    Terms are summed in the order of the ranks, in float32 where the elements have 16 bits, so that
    every transport gives the same bits.
    """

    def _exchange(self, send: Array, recv: Array, sends: Lengths, receives: Lengths) -> None:
        """Elements to and from every rank, one rank's after another's in both flat buffers."""
        raise NotImplementedError

    def _reduce_scatter(self, send: Array, recv: Array, lengths: Lengths) -> None:
        own = lengths[self.rank]
        terms = self.backend.empty((self.comm.size, own), send.dtype)
        self._exchange(_flat(send), _flat(terms), lengths, [own] * self.comm.size)
        _sum(terms, recv)

    def _all_reduce(self, send: Array, recv: Array) -> None:
        size, length = self.comm.size, math.prod(send.shape)
        if length <= SMALL:
            terms = self.backend.empty((size, length), send.dtype)
            self._all_gather(send, terms, [length] * size)
            _sum(terms, recv)
            return
        part, lengths = self._part(send)
        self._all_gather(part, recv, lengths)

    def _reduce(self, send: Array, recv: Array | None, root: int) -> None:
        part, lengths = self._part(send)
        at_root = recv is not None
        sends = [lengths[self.rank] * (rank == root) for rank in range(self.comm.size)]
        receives = lengths if at_root else [0] * self.comm.size
        into = _flat(recv) if at_root else self.backend.empty((0,), send.dtype)
        self._exchange(part, into, sends, receives)

    def _part(self, send: Array) -> tuple[Array, Lengths]:
        """This rank's even share of the sum, and the lengths of all shares."""
        share, more = divmod(math.prod(send.shape), self.comm.size)
        lengths = [share + (rank < more) for rank in range(self.comm.size)]
        part = self.backend.empty((lengths[self.rank],), send.dtype)
        self._reduce_scatter(_flat(send), part, lengths)
        return part, lengths


class DeviceTransport(WireTransport):
    """A CUDA-aware MPI on the device buffers themselves.

    The stream is synchronised before every call: MPI reads and writes device memory at once, in
    no stream's order.  Only all-gather(v), all-to-all(v) and broadcast are called.
    """

    name = "device"

    def _all_gather(self, send: Array, recv: Array, lengths: Lengths) -> None:
        self.backend.synchronize()
        super()._all_gather(self.backend.wire(send), self.backend.wire(recv), lengths)

    def _broadcast(self, buffer: Array, root: int) -> None:
        self.backend.synchronize()
        super()._broadcast(self.backend.wire(buffer), root)

    def _exchange(self, send: Array, recv: Array, sends: Lengths, receives: Lengths) -> None:
        self.backend.synchronize()
        _all_to_all(self.comm, self.backend.wire(send), self.backend.wire(recv), sends, receives)


class StagedTransport(WireTransport):
    """Copies in host memory travel, with any MPI; the arrays' library makes the copies.

    A GPU's copies go through pinned memory, each way on a stream of its own.
    """

    name = "staged"

    def _all_gather(self, send: Array, recv: Array, lengths: Lengths) -> None:
        there, back = self.backend.host_copy(send), self.backend.host_buffer(recv)
        super()._all_gather(there, back, lengths)
        self.backend.deliver(back, recv)

    def _broadcast(self, buffer: Array, root: int) -> None:
        here = self.rank == root
        host = self.backend.host_copy(buffer) if here else self.backend.host_buffer(buffer)
        super()._broadcast(host, root)
        if not here:
            self.backend.deliver(host, buffer)

    def _exchange(self, send: Array, recv: Array, sends: Lengths, receives: Lengths) -> None:
        there, back = self.backend.host_copy(send), self.backend.host_buffer(recv)
        _all_to_all(self.comm, there, back, sends, receives)
        if sum(receives):
            self.backend.deliver(back, recv)


class NcclTransport(WireTransport):
    """NCCL on a stream of its own; events order it with the stream that computes.

    The host waits for nothing.  All directions of a grid share the stream, so that every rank
    begins their collectives in the same order.  NCCL needs a GPU for each rank.
    """

    name = "nccl"

    def __init__(self, comm, backend: Backend) -> None:
        super().__init__(comm, backend)
        self.nccl, self.stream = backend.nccl, backend.side_stream("nccl")
        key = self.nccl.get_unique_id() if comm.rank == 0 else None
        self.group = self.nccl.NcclCommunicator(comm.size, comm.bcast(key), comm.rank)

    def free(self) -> None:
        self.backend.synchronize()
        self.group.destroy()

    @contextmanager
    def _on_stream(self) -> Iterator[int]:
        """The pointer of NCCL's stream, which starts after what has been computed so far; what
        is computed from now on comes after it."""
        computing = self.backend.stream
        self.stream.wait_event(computing.record())
        yield self.stream.ptr
        computing.wait_event(self.stream.record())

    @contextmanager
    def _grouped(self) -> Iterator[int]:
        """The same, for several calls that NCCL starts as one."""
        with self._on_stream() as stream:
            self.nccl.groupStart()
            try:
                yield stream
            finally:
                self.nccl.groupEnd()

    def _all_gather(self, send: Array, recv: Array, lengths: Lengths) -> None:
        source, into, size = self._bytes(send, recv)
        if len(set(lengths)) == 1:
            with self._on_stream() as stream:
                self.group.allGather(source, into, lengths[0] * size, self.nccl.NCCL_UINT8, stream)
            return
        with self._grouped() as stream:
            for root, (length, start) in enumerate(_places(lengths)):
                if length:
                    self.group.broadcast(source, into + start * size, length * size,
                                         self.nccl.NCCL_UINT8, root, stream)

    def _broadcast(self, buffer: Array, root: int) -> None:
        where, _, size = self._bytes(buffer, buffer)
        with self._on_stream() as stream:
            self.group.broadcast(where, where, math.prod(buffer.shape) * size,
                                 self.nccl.NCCL_UINT8, root, stream)

    def _exchange(self, send: Array, recv: Array, sends: Lengths, receives: Lengths) -> None:
        source, into, size = self._bytes(send, recv)
        with self._grouped() as stream:
            for peer, (length, start) in enumerate(_places(sends)):
                if length:
                    self.group.send(source + start * size, length * size, self.nccl.NCCL_UINT8,
                                    peer, stream)
            for peer, (length, start) in enumerate(_places(receives)):
                if length:
                    self.group.recv(into + start * size, length * size, self.nccl.NCCL_UINT8,
                                    peer, stream)

    def _reduce_scatter(self, send: Array, recv: Array, lengths: Lengths) -> None:
        kind = self._summed(send)
        if kind is None:
            super()._reduce_scatter(send, recv, lengths)
            return
        source, into, size = self._bytes(send, recv)
        if len(set(lengths)) == 1:
            with self._on_stream() as stream:
                self.group.reduceScatter(source, into, lengths[0], kind, self.nccl.NCCL_SUM,
                                         stream)
            return
        with self._grouped() as stream:
            for root, (length, start) in enumerate(_places(lengths)):
                if length:
                    self.group.reduce(source + start * size, into, length, kind,
                                      self.nccl.NCCL_SUM, root, stream)

    def _all_reduce(self, send: Array, recv: Array) -> None:
        kind = self._summed(send)
        if kind is None:
            super()._all_reduce(send, recv)
            return
        source, into, _ = self._bytes(send, recv)
        with self._on_stream() as stream:
            self.group.allReduce(source, into, math.prod(send.shape), kind, self.nccl.NCCL_SUM,
                                 stream)

    def _reduce(self, send: Array, recv: Array | None, root: int) -> None:
        kind = self._summed(send)
        if kind is None:
            super()._reduce(send, recv, root)
            return
        source, into, _ = self._bytes(send, send if recv is None else recv)
        with self._on_stream() as stream:
            self.group.reduce(source, into, math.prod(send.shape), kind, self.nccl.NCCL_SUM, root,
                              stream)

    def _bytes(self, send: Array, recv: Array) -> tuple[int, int, int]:
        """Where two buffers lie, and the bytes of an element: what only moves, moves as bytes."""
        return self.backend.pointer(send), self.backend.pointer(recv), send.dtype.itemsize

    def _summed(self, a: Array) -> int | None:
        """NCCL's name for the type of `a`; None for types of 16 bits, whose sums it rounds."""
        return {"float32": self.nccl.NCCL_FLOAT32, "float64": self.nccl.NCCL_FLOAT64,
                "int32": self.nccl.NCCL_INT32, "int64": self.nccl.NCCL_INT64}.get(str(a.dtype))


TRANSPORTS = {kind.name: kind for kind in (DeviceTransport, StagedTransport, NcclTransport)}


def _sum(terms: Array, out: Array) -> None:
    """`out` becomes the sum over the first dimension, in float32 at least."""
    xp = namespace(terms)
    total = xp.sum(terms, axis=0, dtype=wide_dtype(terms))
    out[...] = xp.reshape(xp.astype(total, out.dtype, copy=False), out.shape)


def _flat(a: Array) -> Array:
    """The elements of a contiguous array, where they lie."""
    return namespace(a).reshape(a, (math.prod(a.shape),))


def _places(lengths: Lengths) -> list[tuple[int, int]]:
    """Length and start of blocks that lie one after another."""
    return list(zip(lengths, itertools.accumulate(lengths, initial=0)))


def _all_to_all(comm, send: Array, recv: Array, sends: Lengths, receives: Lengths) -> None:
    """Elements to and from every rank of an MPI communicator."""
    starts = [[start for _, start in _places(lengths)] for lengths in (sends, receives)]
    comm.Alltoallv([send, (sends, starts[0])], [recv, (receives, starts[1])])
