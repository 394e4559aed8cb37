"""Sum over the ranks in their order, whatever the lengths of arrays and blocks.

MPI chooses the algorithm of a sum by lengths, so the last bits of an element depend on the array
that it is in.  Here an element has the same bits in every collective that sums it.
"""

import math

from mm3d.arrays.backend import Array
from mm3d.arrays.blocks import block_lengths, block_starts
from mm3d.transport import sums
from mm3d.transport.mpi import MpiTransport
from mm3d.transport.pending import Pending

BlockLengths = list[int]


class OrderedTransport(MpiTransport):
    """Exchange the terms of a sum by MPI, and add them in the order of the ranks.

    A rank receives the terms of its block from all others: as many words as a bucket algorithm
    sends.  Numbers of 16 bits are added in float32 and rounded once.
    """

    name = "ordered"
    nonblocking_rooted = False    # MPI would choose the order of a sum onto one rank

    def begin_reduce_scatter(self, a: Array, dim: int, counts: list[int]) -> Pending:
        flat, lengths, out = self._terms(a, dim, counts)
        terms, receives = self._room_for_terms(flat, lengths)
        request = self.comm.Ialltoallv(
            [self.backend.mpi_buffer(flat), (lengths, block_starts(lengths))],
            [self.backend.mpi_buffer(terms), (receives, block_starts(receives))])
        return Pending(out, lambda: self._add(terms, out), request, (flat, terms))

    def _reduce_scatter(self, send: Array, recv: Array, lengths: BlockLengths) -> None:
        terms, receives = self._room_for_terms(send, lengths)
        self._exchange(self._flatten(send), self._flatten(terms), lengths, receives)
        self._add(terms, recv)

    def _room_for_terms(self, send: Array, lengths: BlockLengths) -> tuple[Array, BlockLengths]:
        """Return memory for all terms of this rank's block, and their lengths; count the words."""
        receives = [lengths[self.rank]] * self.comm.size
        self._count_received(receives)
        return self.backend.empty((self.comm.size, receives[0]), send.dtype), receives

    def _count_received(self, lengths: BlockLengths) -> None:
        """Count the words of the blocks that this rank receives, one from each rank."""
        self._moved += sum(lengths) - lengths[self.rank]

    def _add(self, terms: Array, out: Array) -> None:
        """Add the terms, one after another in `terms`, in the order of the ranks."""
        sums.add_terms([*terms], out.reshape(-1))

    def _all_reduce(self, send: Array, recv: Array) -> None:
        part, lengths = self._sum_share(send)
        self._count_received(lengths)
        self._all_gather(part, recv, lengths)

    def _sum_share(self, send: Array) -> tuple[Array, BlockLengths]:
        """Compute this rank's even share of the sum; return it with the lengths of all shares."""
        lengths = block_lengths(math.prod(send.shape), self.comm.size)
        part = self.backend.empty((lengths[self.rank],), send.dtype)
        self._reduce_scatter(self._flatten(send), part, lengths)
        return part, lengths

    def _reduce(self, send: Array, recv: Array | None, root: int) -> None:
        as_mpi, terms, received = self.backend.mpi_buffer, None, None
        if recv is not None:
            terms = self.backend.empty((self.comm.size, send.size), send.dtype)
            received = as_mpi(terms)
            self._moved += terms.size - send.size
        self.comm.Gather(as_mpi(send), received, root=root)
        if terms is not None:
            self._add(terms, recv)
