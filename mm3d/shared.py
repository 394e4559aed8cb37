"""Blocks in memory that the ranks of one node share.

A gather then copies nothing: every rank's block is placed as its part of the whole array, which
the others read where it lies once all have arrived; and a sum over the ranks adds their terms
where they lie.  The memory never has a name, so nothing is left behind however a program ends: a
rank opens it through the descriptor of the rank that made it.

A region of memory has one use at a time.  The first rank of the line chooses a region that every
rank has given back, or makes one, and tells the others which.  What a rank has given back it notes
in shared memory, so no block changes while another rank still reads it, whatever the ranks keep.
"""

import math
import mmap
import os
import time
from typing import Any, Iterator

import numpy as np
from mpi4py import MPI

from mm3d.backend import Array, Backend
from mm3d.transport import MpiTransport, block_indices, resized

RING = 1024      # choices that the first rank may be ahead of the slowest
REGIONS = 4096   # regions that a line of ranks can have
PAGE = 4096
SEGMENT = 1 << 30  # bytes mapped at a time; what is never used takes no memory
LARGE = 16384    # elements from which an all-reduce goes through shared memory


class SharedMemory:
    """Memory of the ranks of one node, handed out to all of them in regions.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks; all of them make it.
    """

    def __init__(self, comm) -> None:
        self.rank, self.size = comm.rank, comm.size
        maker = np.array([os.getpid(), 0])
        words = 1 + RING + 4 * REGIONS + self.size * (1 + REGIONS)
        if self.rank == 0:
            maker[1] = self._create(8 * words)
        comm.Bcast(maker)
        self._maker = int(maker[0])
        board = self._map(int(maker[1]), 8 * words).view(np.int64)
        parts = np.split(board, np.cumsum([1, RING, 4 * REGIONS, self.size]))
        self._told, self._choices, table, self._followed, returned = parts
        # Of each region its segment, that segment's descriptor, and offset and bytes in it.
        self._table = table.reshape(REGIONS, 4)
        self._returned = returned.reshape(self.size, REGIONS)
        self._lent = np.zeros(REGIONS, np.int64)        # times this rank has been lent each
        self._segments: list[np.ndarray] = []           # what this rank has opened
        self._by_size: dict[int, list[int]] = {}        # what the first rank chooses from
        self._next = (-1, -1, SEGMENT)                  # segment, descriptor, bytes in use
        self._made: list[tuple[int, int]] = []          # turn and descriptor, while needed
        comm.Barrier()
        if self.rank == 0:
            os.close(int(maker[1]))

    def take(self, length: int) -> tuple[int, np.ndarray]:
        """A region of at least `length` bytes, the same on every rank; all must ask for it.

        Returns
        -------
        region, memory : int, ndarray of uint8
            Its number, for `give_back`, and the bytes.
        """
        turn = int(self._followed[self.rank])
        if self.rank == 0:
            self._close(int(self._followed.min()))
            self._choices[turn % RING] = self._choose(-(-max(1, length) // PAGE) * PAGE)
            self._told[0] = turn + 1
        else:
            _wait(lambda: self._told[0] > turn)
        region = int(self._choices[turn % RING])
        segment, descriptor, offset, size = map(int, self._table[region])
        if segment == len(self._segments):
            self._segments.append(self._map(descriptor, max(SEGMENT, size)))
        self._followed[self.rank] = turn + 1
        self._lent[region] += 1
        return region, self._segments[segment][offset:offset + size]

    def give_back(self, region: int) -> None:
        """Say that this rank is done with a region."""
        self._returned[self.rank, region] += 1

    def _choose(self, size: int) -> int:
        """A region of `size` bytes that every rank is done with."""
        _wait(lambda: self._followed.min() > self._followed[0] - RING)
        known = self._by_size.setdefault(size, [])
        for region in known:
            if (self._returned[:, region] == self._lent[region]).all():
                return region
        region = sum(map(len, self._by_size.values()))
        if region == REGIONS:
            raise MemoryError(f"a line of ranks shares more than {REGIONS} arrays: set "
                              "MM3D_TRANSPORT=mpi")
        segment, descriptor, used = self._next
        if used + size > SEGMENT:
            segment, descriptor, used = segment + 1, self._create(max(SEGMENT, size)), 0
            self._made.append((int(self._followed[0]), descriptor))
        self._table[region] = segment, descriptor, used, size
        self._next = segment, descriptor, used + size
        known.append(region)
        return region

    def _close(self, followed: int) -> None:
        """Close the descriptors of segments that every rank has opened, `followed` turns on."""
        while self._made and self._made[0][0] < followed:
            os.close(self._made.pop(0)[1])

    @staticmethod
    def _create(size: int) -> int:
        """A descriptor of nameless memory, filled with zeros."""
        descriptor = os.memfd_create("mm3d")
        os.ftruncate(descriptor, size)
        return descriptor

    def _map(self, descriptor: int, size: int) -> np.ndarray:
        """The memory behind a descriptor of the first rank."""
        file = os.open(f"/proc/{self._maker}/fd/{descriptor}", os.O_RDWR)
        memory = np.frombuffer(mmap.mmap(file, size), np.uint8)
        os.close(file)
        return memory

    def free(self) -> None:
        """Close what is still open; all ranks have taken all regions.  Arrays stay valid."""
        self._close(int(self._followed.min()))


def _wait(ready) -> None:
    """Until another rank has done its part, giving the core away meanwhile."""
    pause = 0
    while not ready():
        time.sleep(pause)
        pause = 2e-5


class _Lease:
    """One use of a region by this rank; every array in it keeps it alive."""

    def __init__(self, memory: SharedMemory, shape: tuple[int, ...], dtype: np.dtype,
                 counts: list[int] | None, dim: int) -> None:
        self.memory, self.shape, self.dtype, self.counts = memory, shape, dtype, counts
        self.dim = dim
        self.region, storage = memory.take(math.prod(shape) * dtype.itemsize)
        self.__array_interface__ = storage.__array_interface__

    def __del__(self) -> None:
        self.memory.give_back(self.region)

    def array(self) -> np.ndarray:
        """The whole of it."""
        length = math.prod(self.shape) * self.dtype.itemsize
        return np.asarray(self)[:length].view(self.dtype).reshape(self.shape)


class SharedTransport(MpiTransport):
    """Gathers and sums in memory that all ranks of the line share; the rest by MPI."""

    name = "shared"

    def __init__(self, comm, backend: Backend) -> None:
        super().__init__(comm, backend)
        self.memory = SharedMemory(comm)

    def block(self, shape: tuple[int, ...], dtype: Any, dim: int, counts: list[int]) -> Array:
        whole = _Lease(self.memory, resized(shape, dim, sum(counts)), np.dtype(dtype),
                       list(counts), dim % len(shape)).array()
        return self._own(whole, dim, counts)

    def term(self, shape: tuple[int, ...], dtype: Any) -> Array:
        terms = _Lease(self.memory, (self.comm.size, *shape), np.dtype(dtype), None, 0).array()
        return terms[self.rank]

    def all_gather(self, a: Array, dim: int, counts: list[int]) -> Array:
        whole = self._whole(a, dim, counts)
        if whole is None:
            block = self.block(a.shape, a.dtype, dim, counts)
            block[...] = a
            whole = self._whole(block, dim, counts)
        self.comm.Barrier()
        return whole

    def reduce_scatter(self, a: Array, dim: int, counts: list[int]) -> Array:
        lease = _lease(a, self.memory)
        if lease is None or lease.counts is not None or lease.shape[1:] != a.shape:
            term = self.term(a.shape, a.dtype)
            term[...] = a
            lease = _lease(term, self.memory)
        out = self.block(resized(a.shape, dim, counts[self.rank]), a.dtype, dim, counts)
        self.comm.Barrier()
        first, second, *others = (self._own(term, dim, counts) for term in lease.array())
        np.add(first, second, out=out)
        for other in others:
            out += other
        return out

    def all_reduce(self, a: Array) -> Array:
        length = math.prod(a.shape)
        if length < LARGE:
            return super().all_reduce(a)
        share, more = divmod(length, self.comm.size)
        counts = [share + (rank < more) for rank in range(self.comm.size)]
        part = self.reduce_scatter(np.reshape(a, -1), 0, counts)
        out = self.backend.empty(a.shape, a.dtype)
        out[...] = self.all_gather(part, 0, counts).reshape(a.shape)
        return out

    def free(self) -> None:
        self.comm.Barrier()
        self.memory.free()

    def _own(self, whole: Array, dim: int, counts: list[int]) -> Array:
        """This rank's block of a whole array."""
        return whole[tuple(block_indices(whole.ndim, dim, counts))[self.rank]]

    def _whole(self, a: Array, dim: int, counts: list[int]) -> Array | None:
        """The array that `a` was placed in as this rank's block; None if it was not."""
        lease = _lease(a, self.memory)
        if lease is None or lease.counts != counts or lease.dim != dim % a.ndim:
            return None
        whole = lease.array()
        own = self._own(whole, dim, counts)
        same = own.shape == a.shape and (own.size == 0 or own.__array_interface__["data"]
                                         == a.__array_interface__["data"])
        return whole if same and own.strides == a.strides else None


def _lease(a: Array, memory: SharedMemory) -> _Lease | None:
    """The lease of `memory` that the array lies in, if it lies in one."""
    for owner in _owners(a):
        if isinstance(owner, _Lease):
            return owner if owner.memory is memory else None
    return None


def _owners(a: Any) -> Iterator[Any]:
    while a is not None:
        yield a
        a = getattr(a, "base", None)


def one_node(comm) -> bool:
    """Whether the ranks of `comm` all run on one node, whose memory they can share."""
    if comm.size == 1 or not hasattr(os, "memfd_create"):
        return False
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    alone = node.size < comm.size
    node.Free()
    return not alone
