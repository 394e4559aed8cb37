"""Stand in for missing ranks in dry runs: a communicator and a transport that move nothing."""

import math
from typing import Any, Iterator

from mm3d.arrays.backend import Array, Backend, accumulation_dtype
from mm3d.arrays.blocks import block_lengths
from mm3d.transport.mpi import MpiTransport
from mm3d.transport.pending import Pending


class DryCommunicator:
    """Stand in for a communicator whose other ranks do not exist.

    A mesh or a grid on it has all its directions, coordinates and blocks, and collectives and
    messages that move nothing.  Received values are undefined, so it is for arrays without
    contents.

    Parameters
    ----------
    size, rank : int
        Number of ranks, and the number of this one.
    """

    def __init__(self, size: int, rank: int = 0) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size} does not exist: 0 to {size - 1} would do")
        self.size, self.rank = size, rank

    def Free(self) -> None:
        """Do nothing: there is no communicator to free."""

    def Dup(self) -> "DryCommunicator":
        """Return this communicator."""
        return self

    def Get_attr(self, key: int) -> int:
        """Return the largest tag, which no schedule reaches."""
        return 2 ** 62

    def allgather(self, own: Any) -> list[Any]:
        """Return this rank's object once for each rank, as if all gave the same."""
        return [own] * self.size

    def Isend(self, buffer: Any, target: int, tag: int) -> "DryRequest":
        """Send nothing."""
        return DryRequest()

    Issend = Irecv = Isend


class DryRequest:
    """Stand in for the request of a message, which is complete at once."""

    def Test(self) -> bool:
        """Return True."""
        return True

    def Wait(self) -> None:
        """Do nothing."""


class SilentTransport(MpiTransport):
    """Do nothing in every collective: the other ranks do not exist.

    Collectives hold their buffers as long as MPI's do, so that their memory is counted: also the
    float32 copies for sums of 16 bits or, with `ordered`, what `OrderedTransport` receives.
    """

    name = "silent"
    note = "nothing travels between ranks that do not exist"
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
            own = block_lengths(math.prod(send.shape), self.comm.size)[self.rank]
            recv = self.backend.empty((own,), send.dtype)
        self._summed(send, recv)

    def _broadcast(self, buffer: Array, root: int) -> None:
        """Send nothing."""

    def _reduce(self, send: Array, recv: Array | None, root: int) -> None:
        """Sum nothing."""
        self._summed(send, recv)

    def _exchange(self, send: Array, recv: Array, sends: list[int], receives: list[int]) -> None:
        """Send nothing."""

    def _pieces(self, flat: Array, a: Array, dim: int,
                counts: list[int]) -> Iterator[tuple[Array, Array]]:
        """Return all pieces as one: they have no contents, and there may be a million."""
        yield self.backend.xp.reshape(flat, a.shape), a
