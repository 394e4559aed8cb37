"""Send arrays from one rank to another while both compute.

Sends never block: the array lives until the message is complete.  So a schedule of messages that
is free of deadlock with asynchronous sends completes with every MPI, whatever it buffers.
"""

import time
from typing import Any, Callable

from mpi4py import MPI

from mm3d.arrays.backend import Array, Backend
from mm3d.transport.choice import choose_transport
from mm3d.transport.communicators import Freed, create
from mm3d.transport.pending import Pending

LONGEST_PAUSE = 1e-3    # seconds between two looks at a message, where a rank sleeps meanwhile


def tag_count(comm: MPI.Intracomm) -> int:
    """Return how many tags messages can have, from 0; nothing is sent."""
    # Open MPI 5 knows it of the world alone.
    return (comm.Get_attr(MPI.TAG_UB) or MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)) + 1


class PointToPoint:
    """Send and receive arrays between any two ranks of a communicator.

    Each of the ranks creates this; its messages use a duplicate of `comm`.  Device arrays are
    copied through host memory if MPI is not CUDA-aware.  If `synchronous`, a send completes only
    after its receive has begun, as with messages too large for MPI to buffer.  If `asleep`, a
    waiting rank sleeps between two looks at its message, as where ranks outnumber the cores.
    `bytes_sending` are those of the messages under way, `peak_sending` the most so far.
    """

    def __init__(self, comm: MPI.Intracomm, backend: Backend, synchronous: bool = False,
                 asleep: bool = False) -> None:
        self.comm, self.backend = create(comm.Dup), backend
        self._send = "Issend" if synchronous else "Isend"    # of MPI
        self.asleep = asleep
        self.in_place = backend.host_buffers or choose_transport(comm, backend) == "device"
        self._sending: list[tuple[MPI.Request, Any, int]] = []
        self.bytes_sending = self.peak_sending = 0

    def send(self, a: Array, target: int, tag: int) -> None:
        """Begin to send `a`, which must not be written any more, to the rank `target`."""
        a = self.backend.contiguous(a)
        if self.in_place:
            self.backend.synchronize()
            buffer = self.backend.mpi_buffer(a)
        else:
            a = buffer = self.backend.host_copy(a)
        request = getattr(self.comm, self._send)(buffer, target, tag)
        self._sending.append((request, a, a.nbytes))
        self.bytes_sending += a.nbytes
        self.peak_sending = max(self.peak_sending, self.bytes_sending)

    def begin_receive(self, shape: tuple[int, ...], dtype: Any, source: int,
                      tag: int) -> Pending:
        """Begin to receive an array of `shape` and `dtype` from the rank `source`."""
        out = self.backend.empty(shape, dtype)
        if self.in_place:
            self.backend.synchronize()    # the memory may be in use by earlier work of the device
            return Pending(out, None, self.comm.Irecv(self.backend.mpi_buffer(out), source, tag))
        buffer = self.backend.host_buffer(out)
        return Pending(out, lambda: self.backend.copy_from_host(buffer, out),
                       self.comm.Irecv(buffer, source, tag))

    def complete(self, pending: Pending) -> Array:
        """Wait for an array that `begin_receive` has begun to receive, and return it."""
        if self.asleep:
            self._sleep_until(pending.request.Test)
        return pending.take()

    def release_sent(self) -> None:
        """Release the arrays of completed messages; this also lets MPI make progress."""
        waiting = []
        for message in self._sending:
            if message[0].Test():
                self.bytes_sending -= message[2]
            else:
                waiting.append(message)
        self._sending = waiting

    def finish(self) -> None:
        """Wait until all messages of this rank are sent."""
        if self.asleep:
            self._sleep_until(lambda: self.release_sent() or not self._sending)
        for request, _, _ in self._sending:
            request.Wait()
        self._sending, self.bytes_sending = [], 0

    def _sleep_until(self, test: Callable[[], bool]) -> None:
        """Sleep until `test` is true."""
        pause = LONGEST_PAUSE / 20
        while not test():
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def free(self) -> None:
        """Free the communicator; every rank must call it."""
        self.comm.Free()
        self.comm = Freed("the model")
