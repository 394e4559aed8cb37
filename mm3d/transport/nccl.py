"""Carry out collectives on device arrays by NCCL, on a stream of its own."""

import math
from contextlib import contextmanager
from typing import Any, Callable, Iterator

from mm3d.arrays.backend import Array, Backend
from mm3d.transport.device import ExchangeTransport, lengths_and_starts
from mm3d.transport.ordered import BlockLengths


class NcclTransport(ExchangeTransport):
    """Call NCCL on a stream of its own; events order it with the computing stream.

    The host waits for nothing.  All directions of a grid share the stream, so that every rank
    begins their collectives in the same order.  NCCL needs a GPU for each rank.
    """

    name = "nccl"
    on_host = False

    def __init__(self, comm, backend: Backend) -> None:
        super().__init__(comm, backend)
        self._at_once = True    # whether what is computed next waits for a collective
        self.nccl, self.stream = backend.nccl, backend.side_stream("nccl")
        key = self.nccl.get_unique_id() if comm.rank == 0 else None
        self.group = self.nccl.NcclCommunicator(comm.size, comm.bcast(key), comm.rank)

    def free(self) -> None:
        self.backend.synchronize()
        self.group.destroy()

    @contextmanager
    def _on_stream(self) -> Iterator[int]:
        """Order NCCL's stream after the work so far, and later work after it; yield its pointer.

        Later work does not wait if the collective is only begun.
        """
        self.backend.join_stream()
        computing = self.backend.stream
        self.stream.wait_event(computing.record())
        yield self.stream.ptr
        if self._at_once:
            computing.wait_event(self.stream.record())

    def _begin(self, collective: Callable, *arguments: Any) -> Callable[[], Any]:
        """Start a collective; return the function that lets the computing stream wait for it."""
        self._at_once = False
        try:
            collective(*arguments)
        finally:
            self._at_once = True
        arrived = self.stream.record()
        return lambda: self.backend.stream.wait_event(arrived)

    def _begin_exchange(self, *buffers: Any) -> Callable[[], Any]:
        return self._begin(self._exchange, *buffers)

    def _begin_all_gather(self, *buffers: Any) -> Callable[[], Any]:
        return self._begin(self._all_gather, *buffers)

    def _begin_reduce_scatter(self, send: Array, recv: Array,
                              lengths: BlockLengths) -> Callable[[], Any]:
        if self._summed(send) is None:
            return super()._begin_reduce_scatter(send, recv, lengths)
        return self._begin(self._reduce_scatter, send, recv, lengths)

    @contextmanager
    def _grouped(self) -> Iterator[int]:
        """Group several calls on NCCL's stream, which NCCL starts as one."""
        with self._on_stream() as stream:
            self.nccl.groupStart()
            try:
                yield stream
            finally:
                self.nccl.groupEnd()

    def _all_gather(self, send: Array, recv: Array, lengths: BlockLengths) -> None:
        source, into, size = self._bytes(send, recv)
        if len(set(lengths)) == 1:
            with self._on_stream() as stream:
                self.group.allGather(source, into, lengths[0] * size, self.nccl.NCCL_UINT8, stream)
            return
        with self._grouped() as stream:
            for root, (length, start) in enumerate(lengths_and_starts(lengths)):
                if length:
                    self.group.broadcast(source, into + start * size, length * size,
                                         self.nccl.NCCL_UINT8, root, stream)

    def _broadcast(self, buffer: Array, root: int) -> None:
        where, _, size = self._bytes(buffer, buffer)
        with self._on_stream() as stream:
            self.group.broadcast(where, where, math.prod(buffer.shape) * size,
                                 self.nccl.NCCL_UINT8, root, stream)

    def _exchange(self, send: Array, recv: Array, sends: BlockLengths,
                  receives: BlockLengths) -> None:
        source, into, size = self._bytes(send, recv)
        with self._grouped() as stream:
            for peer, (length, start) in enumerate(lengths_and_starts(sends)):
                if length:
                    self.group.send(source + start * size, length * size, self.nccl.NCCL_UINT8,
                                    peer, stream)
            for peer, (length, start) in enumerate(lengths_and_starts(receives)):
                if length:
                    self.group.recv(into + start * size, length * size, self.nccl.NCCL_UINT8,
                                    peer, stream)

    def _reduce_scatter(self, send: Array, recv: Array, lengths: BlockLengths) -> None:
        kind = self._summed(send)
        if kind is None:
            super()._reduce_scatter(send, recv, lengths)
            return
        self._moved = math.nan
        source, into, size = self._bytes(send, recv)
        if len(set(lengths)) == 1:
            with self._on_stream() as stream:
                self.group.reduceScatter(source, into, lengths[0], kind, self.nccl.NCCL_SUM,
                                         stream)
            return
        with self._grouped() as stream:
            for root, (length, start) in enumerate(lengths_and_starts(lengths)):
                if length:
                    self.group.reduce(source + start * size, into, length, kind,
                                      self.nccl.NCCL_SUM, root, stream)

    def _all_reduce(self, send: Array, recv: Array) -> None:
        if not self._sum(self.group.allReduce, send, recv):
            super()._all_reduce(send, recv)

    def _reduce(self, send: Array, recv: Array | None, root: int) -> None:
        if not self._sum(self.group.reduce, send, send if recv is None else recv, root):
            super()._reduce(send, recv, root)

    def _sum(self, call: Callable, send: Array, recv: Array, *root: int) -> bool:
        """Sum whole arrays by a call of NCCL's; return False for types that it does not sum."""
        kind = self._summed(send)
        if kind is None:
            return False
        self._moved = math.nan
        source, into, _ = self._bytes(send, recv)
        with self._on_stream() as stream:
            call(source, into, math.prod(send.shape), kind, self.nccl.NCCL_SUM, *root, stream)
        return True

    def _bytes(self, send: Array, recv: Array) -> tuple[int, int, int]:
        """Return the addresses of two buffers, and the bytes of an element."""
        return self.backend.pointer(send), self.backend.pointer(recv), send.dtype.itemsize

    def _summed(self, a: Array) -> int | None:
        """Return NCCL's code for the dtype of `a`; None for 16 bits, whose sums NCCL rounds."""
        return {"float32": self.nccl.NCCL_FLOAT32, "float64": self.nccl.NCCL_FLOAT64,
                "int32": self.nccl.NCCL_INT32, "int64": self.nccl.NCCL_INT64}.get(str(a.dtype))
