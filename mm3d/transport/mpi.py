"""Carry out collectives between the ranks of one communicator by MPI.

`mm3d.grid.axis.Axis` counts the collectives it is asked for; a transport carries them out, and
states the words it moved.  `MpiTransport` passes the arrays themselves to MPI; with
`mm3d.transport.shared_memory` the ranks of one node read each other's blocks in place;
`mm3d.transport.device` is for arrays in a device's memory.
"""

import math
from typing import Any, Iterator

from mm3d.arrays.backend import Array, Backend
from mm3d.arrays.blocks import block_indices, block_starts, resized_shape, total_length
from mm3d.transport import sums
from mm3d.transport.pending import Pending


class MpiTransport:
    """Call MPI's own collectives on the arrays in place.

    `counts` are the lengths of blocks along the dimension `dim`, `lengths` their numbers of
    elements.  MPI would sum float16 in float16, so such terms are converted to float32, with twice
    the bytes, and the result is rounded once.
    """

    name = "mpi"    # in results and settings
    nonblocking = True    # whether a collective that is begun goes on while this rank computes
    nonblocking_rooted = True    # the same of broadcasts, and of reductions onto one rank
    on_host = True    # whether the host takes part, beyond starting a collective
    mpi_bytes: float = math.inf    # largest whole array that goes by MPI's own collectives

    def __init__(self, comm, backend: Backend) -> None:
        self.comm, self.backend, self.rank = comm, backend, comm.rank
        self._moved: float = 0

    def take_moved(self) -> float:
        """Return the words that this rank has moved since the last call.

        Words count that it receives in messages or, in shared memory, copies or reads from others.
        NaN where a library sums, by an algorithm that it chooses.
        """
        moved, self._moved = self._moved, 0
        return moved

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        self.comm.Barrier()

    def free(self) -> None:
        """Free the resources that all ranks share; every rank calls this."""

    def block(self, shape: tuple[int, ...], dtype: Any, dim: int, counts: list[int]) -> Array:
        """Allocate this rank's block, of local `shape`, of an array divided along `dim`.

        A transport may place it so that gathering it costs nothing.  Every rank calls this.
        """
        return self.backend.empty(shape, dtype)

    def term(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate this rank's term of a sum that is reduce-scattered.  Every rank calls this."""
        return self.backend.empty(shape, dtype)

    def reduce_term(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate this rank's term of a sum for one root.  Every rank calls this."""
        return self.backend.empty(shape, dtype)

    def all_gather(self, a: Array, dim: int, counts: list[int]) -> Array:
        """Gather the blocks `a` of all ranks, `counts` long along `dim`, in one array."""
        a, flat, lengths, out = self._whole(a, dim, counts)
        self._all_gather(a, flat, lengths)
        return self._unpacked(flat, out, dim, counts)

    def begin_all_gather(self, a: Array, dim: int, counts: list[int]) -> Pending:
        """Start an `all_gather`; where the transport cannot, complete it at once."""
        if not self.nonblocking:
            return Pending(self.all_gather(a, dim, counts))
        a, flat, lengths, out = self._whole(a, dim, counts)
        as_mpi, starts = self.backend.mpi_buffer, block_starts(lengths)
        request = self.comm.Iallgatherv(as_mpi(a), [as_mpi(flat), (lengths, starts)])
        return Pending(out, lambda: self._unpacked(flat, out, dim, counts), request, (a,))

    def reduce_scatter(self, a: Array, dim: int, counts: list[int]) -> Array:
        """Sum the ranks' terms `a`, and return this rank's block of the sum along `dim`."""
        flat, lengths, out = self._terms(a, dim, counts)
        self._reduce_scatter(flat, out, lengths)
        return out

    def begin_reduce_scatter(self, a: Array, dim: int, counts: list[int]) -> Pending:
        """Start a `reduce_scatter`; where the transport cannot, complete it at once."""
        if not self.nonblocking:
            return Pending(self.reduce_scatter(a, dim, counts))
        flat, lengths, out = self._terms(a, dim, counts)
        # MPICH sums here in the order of the blocking collective, also where blocks are even;
        # with another MPI the last bits may differ if three or more ranks sum.
        self._moved = math.nan
        terms, total = sums.widen(flat), sums.accumulator(out)
        request = self.comm.Ireduce_scatter(terms, total, lengths)
        return Pending(out, lambda: sums.store_rounded(total, out), request, (terms,))

    def all_reduce(self, a: Array) -> Array:
        """Sum the ranks' terms `a`, on every rank."""
        out = self.backend.empty(a.shape, a.dtype)
        self._all_reduce(self.backend.contiguous(a), out)
        return out

    def broadcast(self, a: Array, root: int) -> Array:
        """Broadcast `a` of the rank `root`, over `a` of the others."""
        a = self.backend.contiguous(a)
        self._broadcast(a, root)
        self._moved += a.size * (self.rank != root)
        return a

    def begin_broadcast(self, a: Array, root: int) -> Pending:
        """Start a `broadcast`; where the transport cannot, complete it at once."""
        if not self.nonblocking_rooted:
            return Pending(self.broadcast(a, root))
        a = self.backend.contiguous(a)
        self._moved += a.size * (self.rank != root)
        return Pending(a, request=self.comm.Ibcast(self.backend.mpi_buffer(a), root))

    def reduce(self, a: Array, root: int) -> Array | None:
        """Sum the ranks' terms `a` on the rank `root`; None on the others."""
        out = self.backend.empty(a.shape, a.dtype) if self.rank == root else None
        self._reduce(self.backend.contiguous(a), out, root)
        return out

    def begin_reduce(self, a: Array, root: int) -> Pending:
        """Start a `reduce`; where the transport cannot, complete it at once."""
        if not self.nonblocking_rooted:
            return Pending(self.reduce(a, root))
        out = self.backend.empty(a.shape, a.dtype) if self.rank == root else None
        self._moved = math.nan
        terms = sums.widen(self.backend.contiguous(a))
        total = None if out is None else sums.accumulator(out)
        request = self.comm.Ireduce(terms, total, root=root)
        return Pending(out, None if out is None else lambda: sums.store_rounded(total, out),
                       request, (terms,))

    def all_to_all(self, a: Array, dim: int, sends: list[int], receives: list[int]) -> Array:
        """Send the blocks of `a`, `sends` long along `dim`, and join those that arrive."""
        out = self.backend.empty(resized_shape(a.shape, dim, sum(receives)), a.dtype)
        send, outgoing = self._packed(a, dim, sends)
        recv, incoming = self._flat(out, dim, receives)
        self._exchange(self._flatten(send), self._flatten(recv), outgoing, incoming)
        self._moved += out.size - math.prod(resized_shape(out.shape, dim, receives[self.rank]))
        return self._unpacked(recv, out, dim, receives)

    # Flat buffers, which have the blocks of an array one after another.

    def _whole(self, a: Array, dim: int,
               counts: list[int]) -> tuple[Array, Array, list[int], Array]:
        """Return the array to send, the receive buffer, the blocks' lengths, and the result."""
        out = self.backend.empty(resized_shape(a.shape, dim, total_length(counts)), a.dtype)
        self._moved += out.size - a.size
        return (self.backend.contiguous(a), *self._flat(out, dim, counts), out)

    def _terms(self, a: Array, dim: int, counts: list[int]) -> tuple[Array, list[int], Array]:
        """Return the blocks of `a` one after another, their lengths, and memory for the sum."""
        flat, lengths = self._packed(a, dim, counts)
        shape = resized_shape(a.shape, dim, counts[self.rank])
        return flat, lengths, self.block(shape, a.dtype, dim, counts)

    def _packed(self, a: Array, dim: int, counts: list[int]) -> tuple[Array, list[int]]:
        """Return the blocks of `a` one after another, in `a` or a copy, and their lengths."""
        a = self.backend.contiguous(a)
        flat, lengths = self._flat(a, dim, counts)
        if flat is not a:
            for piece, block in self._pieces(flat, a, dim, counts):
                piece[...] = block
        return flat, lengths

    def _unpacked(self, flat: Array, out: Array, dim: int, counts: list[int]) -> Array:
        """Copy the blocks in `flat` to `out`, if that is another buffer, and return `out`."""
        if flat is not out:
            for piece, block in self._pieces(flat, out, dim, counts):
                block[...] = piece
        return out

    def _pieces(self, flat: Array, a: Array, dim: int,
                counts: list[int]) -> Iterator[tuple[Array, Array]]:
        """Iterate over the blocks, as views of the flat buffer and of the array."""
        offset = 0
        for index in block_indices(len(a.shape), dim, counts):
            block = a[index]
            length = math.prod(block.shape)
            yield self.backend.xp.reshape(flat[offset:offset + length], block.shape), block
            offset += length

    def _flat(self, a: Array, dim: int, counts: list[int]) -> tuple[Array, list[int]]:
        """Return a buffer for the blocks of `a` one after another, and the blocks' lengths.

        The buffer is `a` itself where its blocks are contiguous.
        """
        outer = math.prod(a.shape[:dim % len(a.shape)])
        share = math.prod(a.shape) // max(1, a.shape[dim])
        lengths = [count * share for count in counts]
        return (a if outer <= 1 else self.backend.empty((sum(lengths),), a.dtype)), lengths

    def _flatten(self, a: Array) -> Array:
        """View a contiguous array as one dimension."""
        return self.backend.xp.reshape(a, (math.prod(a.shape),))

    def _copy(self, a: Array, place: Array) -> Array:
        """Copy `a` to `place`, and count its words as moved."""
        place[...] = a
        self._moved += a.size
        return place

    # The collectives on flat, contiguous buffers.

    def _all_gather(self, send: Array, recv: Array, lengths: list[int]) -> None:
        send, recv = self.backend.mpi_buffer(send), self.backend.mpi_buffer(recv)
        if len(set(lengths)) == 1:
            self.comm.Allgather(send, recv)
        else:
            self.comm.Allgatherv(send, [recv, (lengths, block_starts(lengths))])

    def _reduce_scatter(self, send: Array, recv: Array, lengths: list[int]) -> None:
        self._moved = math.nan
        total = sums.accumulator(recv)
        if len(set(lengths)) == 1:
            self.comm.Reduce_scatter_block(sums.widen(send), total)
        else:
            self.comm.Reduce_scatter(sums.widen(send), total, lengths)
        sums.store_rounded(total, recv)

    def _all_reduce(self, send: Array, recv: Array) -> None:
        self._moved = math.nan
        total = sums.accumulator(recv)
        self.comm.Allreduce(sums.widen(send), total)
        sums.store_rounded(total, recv)

    def _broadcast(self, buffer: Array, root: int) -> None:
        self.comm.Bcast(self.backend.mpi_buffer(buffer), root)

    def _reduce(self, send: Array, recv: Array | None, root: int) -> None:
        self._moved = math.nan
        total = None if recv is None else sums.accumulator(recv)
        self.comm.Reduce(sums.widen(send), total, root=root)
        if total is not None:
            sums.store_rounded(total, recv)

    def _exchange(self, send: Array, recv: Array, sends: list[int], receives: list[int]) -> None:
        """Exchange elements with every rank; both buffers are flat and in rank order."""
        self.comm.Alltoallv([self.backend.mpi_buffer(send), (sends, block_starts(sends))],
                            [self.backend.mpi_buffer(recv), (receives, block_starts(receives))])
