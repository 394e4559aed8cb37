"""Exchange arrays between nodes in lanes: one rank per node, with a share of the node's data.

The ranks of a line divide what their node sends and receives into as many shares as the smallest
node has ranks.  Rank l of each node carries share l, so all of a node's ranks work at once, and
each block crosses the link of a node once.  All messages are bytes: MPI need not know the dtype.
Where each rank is alone on its node, all of them are one lane, and only broadcasts and reductions
go through it, in a chain: MPI's own algorithms are trees, in which the root sends the whole array
several times through its link.
"""

import math
from typing import Sequence

import numpy as np
from mpi4py import MPI

from mm3d.arrays.backend import Array, Backend
from mm3d.arrays.blocks import block_bounds
from mm3d.transport import sums
from mm3d.transport.mpi import MpiTransport

MOST_CHUNK_BYTES = 1 << 18    # that a node passes on at a time, while it receives more
MAX_MPI_BYTES = 1 << 14    # that a chain leaves to MPI, in fewer successive messages
CHUNK_COST = 1 << 14    # bytes that a link carries in the time that a further chunk costs
DIRECT_BYTES = 1 << 12    # up to which a root exchanges with every node: a chain takes longer


class Requests:
    """Hold the requests of several messages, with the interface of one request of MPI.

    The requests of receives, with the bytes of each message, come before those of sends.  Raises
    ValueError when a message that has come is shorter.
    """

    def __init__(self, requests: list[MPI.Request], lengths: list[int]) -> None:
        self.requests, self.lengths = requests, lengths
        self.statuses = [MPI.Status() for _ in requests]

    def Test(self) -> bool:
        """Let MPI make progress; return whether all messages are complete."""
        if self.requests and not MPI.Request.Testall(self.requests, self.statuses):
            return False
        self._finish()
        return True

    def Wait(self) -> None:
        """Wait until all messages are complete."""
        if self.requests:
            MPI.Request.Waitall(self.requests, self.statuses)
            self._finish()

    def _finish(self) -> None:
        self.requests = []    # a complete request has no length any more
        for status, length in zip(self.statuses, self.lengths):
            found = status.Get_count(MPI.BYTE)
            if found != length:
                raise ValueError(f"{found} bytes came from another node where {length} were to "
                                 f"come: the ranks of this line make different calls, give the "
                                 f"same dtype and blocks of one array on all of them")


def share(start: int, length: int, parts: int, part: int) -> slice:
    """Return one of equal parts of `length` elements from `start` on."""
    before, own = block_bounds(length, parts, part)
    return slice(start + before, start + before + own)


def chunk_bytes(length: int, nodes: int) -> int:
    """Return the bytes of the chunks in which a chain of nodes passes on `length` bytes.

    The last node receives k chunks after the first has travelled over ``nodes - 2`` others: the
    chain takes k + nodes - 2 times as long as a chunk with its cost, which is shortest for
    k = sqrt((nodes - 2) length / CHUNK_COST).
    """
    if nodes < 3:
        return MOST_CHUNK_BYTES
    return min(MOST_CHUNK_BYTES, max(1, round(math.sqrt(length * CHUNK_COST / (nodes - 2)))))


class Lane:
    """Exchange arrays with the ranks of the same lane, one on each node, in the order of nodes."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.node, self.nodes = comm, comm.rank, comm.size
        # Nodes begin with different partners, so that no link gets all messages first.
        self._partners = [(comm.rank + step) % comm.size for step in range(1, comm.size)]

    def exchange(self, sends: Sequence[np.ndarray], receives: Sequence[np.ndarray]) -> Requests:
        """Start to send a contiguous array to each other node, in their order, and to receive one.
        """
        nodes = self._partners[::-1]
        requests = [self.comm.Irecv(_as_bytes(receives[node]), node) for node in nodes]
        requests += [self.comm.Isend(_as_bytes(sends[node]), node) for node in self._partners]
        return Requests(requests, [receives[node].nbytes for node in nodes])

    def broadcast(self, a: np.ndarray, root: int) -> None:
        """Send `a` of the node `root` to all nodes, in a chain that begins there."""
        place, flat, sending = (self.node - root) % self.nodes, _as_bytes(a), []
        if flat.size <= DIRECT_BYTES:
            self.comm.Bcast(flat, root)
            return
        length = chunk_bytes(flat.size, self.nodes)
        chunks = [flat[start:start + length] for start in range(0, flat.size, length)]
        before, after = ((self.node + step) % self.nodes for step in (-1, 1))
        arriving = [self.comm.Irecv(chunk, before) for chunk in chunks] if place else []
        for index, chunk in enumerate(chunks):
            if arriving:
                Requests([arriving[index]], [chunk.nbytes]).Wait()
            if place < self.nodes - 1:
                sending.append(self.comm.Isend(chunk, after))
        MPI.Request.Waitall(sending)

    def reduce(self, a: np.ndarray, root: int) -> int:
        """Sum `a` of all nodes on the node `root`, in place; `a` of the others is overwritten.

        Terms are added in cyclic order from the node after `root` on.  Returns the words received.
        """
        place = (root - self.node) % self.nodes
        if a.nbytes <= DIRECT_BYTES:
            return self._reduce_directly(a, root)
        length = max(1, chunk_bytes(a.nbytes, self.nodes) // a.itemsize)
        chunks = [a[start:start + length] for start in range(0, a.size, length)]
        before, after = ((self.node + step) % self.nodes for step in (-1, 1))
        first = place == self.nodes - 1
        terms = [] if first else [np.empty_like(chunk) for chunk in chunks]
        arriving = [self.comm.Irecv(_as_bytes(term), before) for term in terms]
        sending = []
        for index, chunk in enumerate(chunks):
            if not first:
                Requests([arriving[index]], [chunk.nbytes]).Wait()
                np.add(terms[index], chunk, out=chunk)
            if place:
                sending.append(self.comm.Isend(_as_bytes(chunk), after))
        MPI.Request.Waitall(sending)
        return 0 if first else a.size

    def _reduce_directly(self, a: np.ndarray, root: int) -> int:
        """Reduce a small array: `root` adds the terms that all nodes send, as a chain does."""
        if self.node != root:
            self.comm.Send(_as_bytes(a), root)
            return 0
        terms = np.empty((self.nodes, a.size), a.dtype)
        terms[root] = a
        Requests([self.comm.Irecv(_as_bytes(terms[node]), node) for node in self._partners],
                 [a.nbytes] * len(self._partners)).Wait()
        a[...] = terms[self._partners[0]]
        for node in (*self._partners[1:], root):
            np.add(a, terms[node], out=a)
        return (self.nodes - 1) * a.size


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


def _as_bytes(a: np.ndarray) -> np.ndarray:
    """View a contiguous array as bytes."""
    return a.reshape(-1).view(np.uint8)
