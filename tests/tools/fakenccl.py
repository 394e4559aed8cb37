"""An NCCL whose work is done by MPI, when somebody waits for its stream."""
import numpy as np
from mpi4py import MPI

from fakecupy import at, enqueue

NCCL_UINT8, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_INT32, NCCL_INT64 = (
    np.uint8, np.float32, np.float64, np.int32, np.int64)
NCCL_SUM = "sum"

available = True
_open = None        # calls since groupStart


def get_unique_id() -> tuple[int, ...]:
    """A number of the world's rank that asks, and others that tell one group from another."""
    return MPI.COMM_WORLD.rank, *np.random.default_rng().integers(-128, 128, 127).tolist()


def groupStart() -> None:
    global _open
    assert _open is None
    _open = []


def groupEnd() -> None:
    global _open
    calls, _open = _open, None

    def work():
        requests = [request for call in calls for request in call() or ()]
        MPI.Request.Waitall(requests)
    if calls:
        enqueue(calls[0].stream, work)


def _later(method):
    """A method whose last argument is a stream, to be done in that stream's time."""
    def enqueued(self, *arguments):
        def call():
            return method(self, *arguments[:-1])
        call.stream = arguments[-1]
        if _open is not None:
            _open.append(call)
        else:
            enqueue(call.stream, lambda: MPI.Request.Waitall(call() or []))
    return enqueued


class NcclCommunicator:
    """The calls of CuPy's, by address, count and type."""

    def __init__(self, size: int, key: tuple[int, ...], rank: int) -> None:
        """All ranks of the group tell the one that made the key who they are."""
        world, tag = MPI.COMM_WORLD, 1000 + (key[1] + 128) * 256 + key[2] + 128
        if rank == 0:
            places = {0: world.rank}
            for _ in range(size - 1):
                places |= world.recv(tag=tag)
            for other in range(1, size):
                world.send(places, places[other], tag)
        else:
            world.send({rank: world.rank}, key[0], tag)
            places = world.recv(source=key[0], tag=tag)
        group = world.group.Incl([places[other] for other in range(size)])
        self.comm = world.Create_group(group, tag)
        assert (size, rank) == (self.comm.size, self.comm.rank)

    def destroy(self) -> None:
        self.comm.Free()

    @_later
    def allGather(self, send, recv, count, kind):
        self.comm.Allgather(at(send, kind, count), at(recv, kind, count * self.comm.size))

    @_later
    def reduceScatter(self, send, recv, count, kind, op):
        self.comm.Reduce_scatter_block(at(send, kind, count * self.comm.size),
                                       at(recv, kind, count))

    @_later
    def allReduce(self, send, recv, count, kind, op):
        self.comm.Allreduce(at(send, kind, count), at(recv, kind, count))

    @_later
    def reduce(self, send, recv, count, kind, op, root):
        self.comm.Reduce(at(send, kind, count),
                         at(recv, kind, count) if self.comm.rank == root else None, root=root)

    @_later
    def broadcast(self, send, recv, count, kind, root):
        buffer = at(recv, kind, count)
        if self.comm.rank == root:
            buffer[...] = at(send, kind, count).copy()
        self.comm.Bcast(buffer, root)

    @_later
    def send(self, send, count, kind, peer):
        return [self.comm.Isend(at(send, kind, count), peer)]

    @_later
    def recv(self, recv, count, kind, peer):
        return [self.comm.Irecv(at(recv, kind, count), peer)]
