"""Broadcast and reduce in a chain, between ranks on three or more nodes, each alone.

MPI's own algorithms are trees, in which the root sends the whole array several times through its
link.  In a chain every node sends it once.
"""

import numpy as np
from mpi4py import MPI

from mm3d.arrays.backend import Array, Backend
from mm3d.transport import sums
from mm3d.transport.lanes import Lane
from mm3d.transport.mpi import MpiTransport

MAX_MPI_BYTES = 1 << 14    # of an array that goes by MPI, in fewer successive messages


class ChainTransport(MpiTransport):
    """Pass broadcasts and reductions from node to node; leave all other collectives to MPI.

    A sum adds the terms in cyclic order, beginning with the rank after the root.  Nonblocking
    broadcasts and reductions are MPI's own: a chain needs each rank to pass the array on.
    """

    name = "chain"
    mpi_bytes = MAX_MPI_BYTES

    def __init__(self, comm: MPI.Intracomm, backend: Backend) -> None:
        super().__init__(comm, backend)
        self.lane = Lane(comm)

    def _broadcast(self, a: Array, root: int) -> None:
        if a.nbytes <= MAX_MPI_BYTES:
            super()._broadcast(a, root)
        else:
            self.lane.broadcast(a, root)

    def _reduce(self, send: Array, recv: Array | None, root: int) -> None:
        if send.nbytes <= MAX_MPI_BYTES:
            super()._reduce(send, recv, root)
            return
        total = np.array(sums.widen(send)).reshape(-1)
        self._moved += self.lane.reduce(total, root)
        if recv is not None:
            recv[...] = total.reshape(recv.shape)
