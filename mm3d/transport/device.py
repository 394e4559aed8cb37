"""Carry out collectives on arrays in a device's memory.

`DeviceTransport` hands device buffers to a CUDA-aware MPI, `StagedTransport` copies them through
host memory and works with any MPI, `NcclTransport` calls NCCL.  All three derive from
`ExchangeTransport`, which builds every collective from an all-gather, a broadcast and an
all-to-all, and sums on the device.  MPI's own reductions are not used: on device buffers some of
them crash (Open MPI's `Iallreduce`, `Ireduce_scatter_block`, `Reduce_scatter_block` in place),
others go through pageable host memory, and none supports bfloat16.
"""

import math
from typing import Any, Callable

from mm3d.arrays.backend import Array
from mm3d.transport.exchange import Lengths, ExchangeTransport, flattened, messages, places
from mm3d.transport.nccl import NcclTransport


def _blocks(a: Array, lengths: Lengths) -> list[Array]:
    """Divide a flat buffer into views of the given lengths."""
    return [a[start:start + length] for length, start in places(lengths)]


class DeviceTransport(ExchangeTransport):
    """Pass device buffers to a CUDA-aware MPI.

    The stream is synchronised before every call: MPI reads and writes device memory at once, in
    no stream's order.  Only all-gather(v), all-to-all(v) and broadcast are called, and, for what
    goes on while the device computes, messages between two ranks: of Open MPI's nonblocking
    collectives some crash on device buffers, and these need none of them.
    """

    name = "device"

    def _all_gather(self, send: Array, recv: Array, lengths: Lengths) -> None:
        self.backend.synchronize()
        super()._all_gather(self.backend.mpi_buffer(send), self.backend.mpi_buffer(recv), lengths)

    def _broadcast(self, buffer: Array, root: int) -> None:
        self.backend.synchronize()
        super()._broadcast(self.backend.mpi_buffer(buffer), root)

    def _exchange(self, send: Array, recv: Array, sends: Lengths, receives: Lengths) -> None:
        self.backend.synchronize()
        self.comm.Alltoallv(*messages(self.backend.mpi_buffer(send),
                                      self.backend.mpi_buffer(recv), sends, receives))

    def _begin_exchange(self, send: Array, recv: Array, sends: Lengths,
                        receives: Lengths) -> Callable[[], Any]:
        return self._begin(_blocks(send, sends), _blocks(recv, receives))

    def _begin_all_gather(self, send: Array, recv: Array,
                          lengths: Lengths) -> Callable[[], Any]:
        return self._begin([flattened(send)] * self.comm.size,
                           _blocks(flattened(recv), lengths))

    def _begin(self, there: list[Array], back: list[Array]) -> Callable[[], Any]:
        """Start sending a block to every rank and receiving one from each; return the wait."""
        back[self.rank][...] = there[self.rank]
        self.backend.synchronize()
        requests = [start(self.backend.mpi_buffer(block), peer)
                    for start, blocks in ((self.comm.Irecv, back), (self.comm.Isend, there))
                    for peer, block in enumerate(blocks) if peer != self.rank and block.size]
        return lambda: [request.Wait() for request in requests]


class StagedTransport(ExchangeTransport):
    """Copy device arrays to host memory for any MPI, and copy results back.

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
        self._begin_exchange(send, recv, sends, receives)()

    def _begin_exchange(self, send: Array, recv: Array, sends: Lengths,
                        receives: Lengths) -> Callable[[], Any]:
        there, back = self.backend.host_copy(send), self.backend.host_buffer(recv)
        request = self.comm.Ialltoallv(*messages(there, back, sends, receives))
        return lambda: self._end(request, there, back, recv)

    def _begin_all_gather(self, send: Array, recv: Array,
                          lengths: Lengths) -> Callable[[], Any]:
        there, back = self.backend.host_copy(send), self.backend.host_buffer(recv)
        starts = [start for _, start in places(lengths)]
        request = self.comm.Iallgatherv(there, [back, (lengths, starts)])
        return lambda: self._end(request, there, back, recv)

    def _end(self, request: Any, there: Array, back: Array, recv: Array) -> None:
        """Wait for MPI, which reads `there` until then, and copy the result to the device."""
        request.Wait()
        if math.prod(recv.shape):
            self.backend.deliver(back, recv)


TRANSPORTS = {kind.name: kind for kind in (DeviceTransport, StagedTransport, NcclTransport)}
