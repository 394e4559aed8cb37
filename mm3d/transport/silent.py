"""Stand in for the transport of ranks that do not exist, in dry runs: it moves nothing."""

import math
from typing import Iterator

from mm3d.arrays.backend import Array, Backend, accumulation_dtype
from mm3d.arrays.blocks import block_bounds
from mm3d.transport.communicators import DryCommunicator
from mm3d.transport.mpi import MpiTransport
from mm3d.transport.pending import Pending


class SilentTransport(MpiTransport):
    """Move nothing; hold buffers as long as MPI would, so that a dry run counts their memory.

    Counted are also the float32 copies for sums of 16 bits or, with `ordered`, what
    `OrderedTransport` receives.
    """

    name = "silent"
    on_host = False

    def __init__(self, comm: DryCommunicator, backend: Backend, ordered: bool = False) -> None:
        super().__init__(comm, backend)
        self.ordered = ordered

    def take_moved(self) -> float:
        """Return 0."""
        return 0

    def begin_all_gather(self, a: Array, dim: int, counts: list[int]) -> Pending:
        """Hold the buffers of an all-gather in flight; nothing arrives."""
        a, flat, _, out = self._whole(a, dim, counts)
        return Pending(out, lambda: self._unpacked(flat, out, dim, counts), kept=(a,))

    def begin_reduce_scatter(self, a: Array, dim: int, counts: list[int]) -> Pending:
        """Hold the buffers of a reduce-scatter in flight; nothing is summed."""
        flat, _, out = self._terms(a, dim, counts)
        return Pending(out, lambda: None, kept=self._summed(flat, out))

    def begin_broadcast(self, a: Array, root: int) -> Pending:
        """Hold the buffer of a broadcast in flight; nothing arrives."""
        return Pending(self.backend.contiguous(a), lambda: None)

    def begin_reduce(self, a: Array, root: int) -> Pending:
        """Hold the buffers of a reduction in flight; nothing is summed."""
        out = self.backend.empty(a.shape, a.dtype) if self.rank == root else None
        return Pending(out, lambda: None, kept=self._summed(self.backend.contiguous(a), out))

    def _summed(self, terms: Array, out: Array | None) -> tuple[Array, ...]:
        """Return the buffers of a sum by MPI, which are float32 where the elements have 16 bits.

        With `ordered` they are the terms sent, and room for all terms of this rank's block.
        """
        if self.ordered:
            own = 0 if out is None else math.prod(out.shape)
            return terms, self.backend.empty((self.comm.size, own), terms.dtype)
        return tuple(a if (wide := accumulation_dtype(a)) == a.dtype
                     else self.backend.xp.empty(a.shape, dtype=wide)
                     for a in (terms, out) if a is not None)

    def _all_gather(self, send: Array, recv: Array, lengths: list[int]) -> None:
        """Gather nothing."""

    def _reduce_scatter(self, send: Array, recv: Array, lengths: list[int]) -> None:
        """Sum nothing."""
        self._summed(send, recv)

    def _all_reduce(self, send: Array, recv: Array) -> None:
        """Sum nothing."""
        if self.ordered:
            _, own = block_bounds(math.prod(send.shape), self.comm.size, self.rank)
            recv = self.backend.empty((own,), send.dtype)
        self._summed(send, recv)

    def _broadcast(self, buffer: Array, root: int) -> None:
        """Send nothing."""

    def _reduce(self, send: Array, recv: Array | None, root: int) -> None:
        """Sum nothing."""
        self._summed(send, recv)

    def _exchange(self, send: Array, recv: Array, sends: list[int], receives: list[int]) -> None:
        """Send nothing."""

    def _flat(self, a: Array, dim: int, counts: list[int]) -> tuple[Array, list[int]]:
        """Return a buffer for all blocks, without their lengths: there may be a million."""
        return super()._flat(a, dim, [a.shape[dim]])

    def _pieces(self, flat: Array, a: Array, dim: int,
                counts: list[int]) -> Iterator[tuple[Array, Array]]:
        """Return all pieces as one: they have no contents, and there may be a million."""
        yield self.backend.xp.reshape(flat, a.shape), a
