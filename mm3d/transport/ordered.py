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


class OrderedTransport(MpiTransport):
    """Exchange the terms of a sum by MPI, and add them in the order of the ranks.

    A rank receives the terms of its block from all others: as many words as a bucket algorithm
    sends.  Numbers of 16 bits are added in float32 and rounded once.
    """

    name = "ordered"
    nonblocking_rooted = False    # MPI would choose the order of a sum onto one rank

    def begin_reduce_scatter(self, a: Array, dim: int, counts: list[int]) -> Pending:
        flat, lengths, out = self._terms(a, dim, counts)
        send, terms, received = self._buffers(flat, lengths)
        request = self.comm.Ialltoallv(send, received)
        return Pending(out, lambda: self._add(terms, out), request, (flat, terms))

    def _reduce_scatter(self, send: Array, recv: Array, lengths: list[int]) -> None:
        sent, terms, received = self._buffers(send, lengths)
        self.comm.Alltoallv(sent, received)
        self._add(terms, recv)

    def _buffers(self, flat: Array, lengths: list[int]) -> tuple[list, Array, list]:
        """Return MPI's send argument, memory for this rank's terms, and MPI's receive argument."""
        own, size = lengths[self.rank], self.comm.size
        terms = self.backend.empty((size, own), flat.dtype)
        self._moved += own * (size - 1)
        return ([self.backend.mpi_buffer(flat), (lengths, block_starts(lengths))], terms,
                [self.backend.mpi_buffer(terms), ([own] * size, block_starts([own] * size))])

    def _add(self, terms: Array, out: Array) -> None:
        """Add the terms in the order of the ranks."""
        sums.add_terms([*terms], out.reshape(-1))

    def _all_reduce(self, send: Array, recv: Array) -> None:
        lengths = block_lengths(math.prod(send.shape), self.comm.size)
        part = self.backend.empty((lengths[self.rank],), send.dtype)
        self._reduce_scatter(send, part, lengths)
        self._moved += sum(lengths) - len(part)
        self._all_gather(part, recv, lengths)

    def _reduce(self, send: Array, recv: Array | None, root: int) -> None:
        as_mpi, terms, received = self.backend.mpi_buffer, None, None
        if recv is not None:
            terms = self.backend.empty((self.comm.size, *send.shape), send.dtype)
            received = as_mpi(terms)
            self._moved += terms.size - send.size
        self.comm.Gather(as_mpi(send), received, root=root)
        if terms is not None:
            self._add(terms.reshape(self.comm.size, -1), recv)
