"""Allocate memory that the ranks of one node share, and pass small arrays through it.

The memory has no name in the file system, so nothing is left behind however a program ends: a
rank opens it through the file descriptor of the rank that created it.

Regions of memory are allocated without messages, because all ranks make the same calls in the
same order and keep the same lists.  A rank notes the regions it is done with for the next barrier
where all ranks wait (`mm3d.transport.barrier`), and there all read all notes.  A note is
overwritten only two such barriers later, when every rank has read it.
"""

import collections
import contextlib
import errno
import mmap
import os
from typing import Callable, Iterable, Sequence

import numpy as np
from mpi4py import MPI

from mm3d.arrays.blocks import block_indices
from mm3d.arrays.pool import size_class
from mm3d.transport.barrier import (BARRIER, BARRIER_BYTES, IN_MESSAGES, MORE_MEMORY, NO_ROOM,
                                    SLOTS, Barrier, PackedCall, encode_call)
from mm3d.transport.regions import MemoryPlace, Regions

PAGE_BYTES = 4096
SEGMENT_BYTES = 1 << 30   # mapped at a time; pages never touched take no memory
MAX_RETURNED = 63         # regions that a rank can give back at one barrier; the rest waits
MAX_TAKEN = 32            # regions taken since the last barrier before `take` adds one
MESSAGE_BYTES = 1 << 16   # that a rank can pass to all others at a barrier

_BARRIER = encode_call(BARRIER)
_MORE_MEMORY = encode_call(MORE_MEMORY)


class SharedMemory:
    """Allocate regions of memory that all ranks of one node share.

    All ranks of `comm` make it, and make the same calls in the same order; `regions` is the same
    on all.  After each barrier of all ranks, idle regions hold at most twice the most bytes
    recently in use, or 16 MiB if that is more (see `mm3d.arrays.pool`); the rest goes back to the
    system, and all of it when the last rank ends.  Raises OSError on every rank alike when one
    cannot make the memory, or open that of another: here, and in `take` when more is needed.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        # Each row has the data of barriers, with the numbers of the last two that the rank wrote
        # notes for; these notes; and slots of messages.
        notes = BARRIER_BYTES + 2 * 4 * (1 + MAX_RETURNED)
        stride = -(-(notes + SLOTS * MESSAGE_BYTES) // PAGE_BYTES) * PAGE_BYTES
        # The first segment is mapped here, so that a limit on shared memory is found here.
        length = self.size * stride
        segment = self._open_segment(length + SEGMENT_BYTES, comm.allgather)
        rows = np.frombuffer(segment, np.uint8, length).reshape(self.size, stride)
        self.barrier = Barrier(comm, rows)
        self._noted = [rows[:, 8 * word:8 * word + 8].view(np.int64)[:, 0].data for word in (2, 3)]
        self._notes = [[row[BARRIER_BYTES:notes].view(np.int32).reshape(2, -1)[turn].data
                        for row in rows]
                       for turn in (0, 1)]
        first = [notes + slot * MESSAGE_BYTES for slot in range(SLOTS)]
        self._messages = [[row[start:start + MESSAGE_BYTES] for row in rows] for start in first]
        self._all = range(self.size)
        self._given_back: collections.deque[int] = collections.deque()
        self.give_back = self._given_back.append        # noted at the next barrier
        self.regions = Regions(self.size, segment, length)
        self._taken = 0                                 # regions since the last barrier

    def synchronize(self, call: PackedCall = _BARRIER, region: int = IN_MESSAGES) -> bool:
        """Wait for all ranks; stores before it are visible to all of them afterwards.

        Returns whether all give the same `region`, that of the arrays that are read: if so, those
        taken on trial are kept, else undone.  Raises ValueError on all ranks alike when their
        calls, or those before, differ.
        """
        barrier, regions, differ = self.barrier, self.regions, ""
        if self._given_back:
            barrier.await_all(barrier.turn)
            self._write_note(barrier.turn + 1)
        turn = barrier.arrive(call, region)
        barrier.await_all(turn)
        agreed = barrier.is_agreed()
        if not agreed:
            differ = barrier.describe_difference(self._all)
        agreed = agreed and region != NO_ROOM
        # Most meetings have little to keep or drop, and each call of a method would be felt.
        if regions.trial:
            regions.settle(agreed)
        idle = regions.idle
        idle.note_in_use(regions.in_use)
        noted = self._noted[turn & 1]
        for rank in self._all:
            if noted[rank] == turn:
                note = self._notes[turn & 1][rank]
                regions.drop(note[1:1 + note[0]])
        if idle.bytes > idle.bound or regions.emptied:
            self._release_surplus()
        self._taken = barrier.earlier_calls = 0
        if differ:
            raise ValueError(differ)
        return agreed

    def _release_surplus(self) -> None:
        """Return idle memory over the bound to the system; the first rank does it for all."""
        for segment, start, size in self.regions.take_surplus():
            if self.rank == 0:
                # Advice only: where a kernel refuses it, the memory is used again as it is.
                with contextlib.suppress(OSError):
                    segment.madvise(mmap.MADV_REMOVE, start, size)

    def _write_note(self, turn: int) -> None:
        """Write down which regions this rank has given back."""
        note, given_back, count = self._notes[turn & 1][self.rank], self._given_back, 0
        while given_back and count < MAX_RETURNED:
            count += 1
            note[count] = given_back.popleft()
        note[0] = count
        self._noted[turn & 1][self.rank] = turn

    def all_gather(self, a: np.ndarray, call: PackedCall = _BARRIER) -> list[np.ndarray] | None:
        """Gather the small arrays `a` of all ranks, each flat, to be read before the next barrier.

        Values beyond the end of each are undefined.  None if some ranks passed a region instead.
        """
        slots = self._post(a, True)
        return _contents(slots, a.dtype) if self.synchronize(call) else None

    def broadcast(self, a: np.ndarray, root: int, call: PackedCall = _BARRIER) -> np.ndarray:
        """Broadcast the small array `a` of `root`, flat; the others wait for the root alone.

        A rank whose call differs from the root's raises ValueError; at the next `synchronize` all.
        """
        slots = self._post(a, self.rank == root)
        self.barrier.await_rank(root, self.barrier.arrive(call))
        self.barrier.compare_calls((self.rank, root), call)
        return _contents(slots[root:root + 1], a.dtype)[0]

    def gather(self, a: np.ndarray, root: int,
               call: PackedCall = _BARRIER) -> list[np.ndarray] | None:
        """Gather on `root`, which alone waits and compares the calls; None on the other ranks."""
        slots = self._post(a, True)
        turn = self.barrier.arrive(call)
        if self.rank != root:
            self.barrier.note_call(call)
            return None
        self.barrier.await_all(turn)
        self.barrier.compare_calls(self._all, call)
        return _contents(slots, a.dtype)

    def _post(self, a: np.ndarray, writes: bool) -> list[np.ndarray]:
        """Return the message slots of the next barrier, after writing `a` there if `writes`."""
        turn = self.barrier.turn + 1
        slots = self._messages[turn % SLOTS]
        if writes:
            self.barrier.await_slot(turn)
            if a.size:
                slots[self.rank][:a.nbytes].view(a.dtype).reshape(a.shape)[...] = a
        return slots

    def take(self, length: int) -> tuple[int, MemoryPlace]:
        """Take a region of at least `length` bytes, the same on every rank; all must call it.

        Returns its number, for `give_back`, and its place: the memory and its first byte there.
        """
        if self._taken == MAX_TAKEN:
            self.synchronize()
        self._taken += 1
        self.barrier.note_call(length)
        regions = self.regions
        region = regions.take(length)
        if region is None:
            size = max(SEGMENT_BYTES, size_class(length))
            regions.add(self._open_segment(size, self._gather_numbers))
            region = regions.take(length)
        return region, regions.places[region]

    def try_take(self, length: int) -> tuple[int, MemoryPlace | None]:
        """Take a region on trial, or `NO_ROOM` if there is none; ranks need not all call it."""
        region = self.regions.take(length, trial=True)
        return (NO_ROOM, None) if region is None else (region, self.regions.places[region])

    def _open_segment(self, size: int, gather: Callable[[list[int]], list]) -> mmap.mmap:
        """Map a new segment that the first rank creates; OSError on every rank if one fails.

        `gather` gathers numbers of all ranks, also of failures, so that no rank waits for another.
        """
        descriptor, file, error = -1, 0, 0
        if self.rank == 0:
            try:
                descriptor = os.memfd_create("mm3d")
                os.ftruncate(descriptor, size)
                file = os.fstat(descriptor).st_ino
            except OSError as failure:
                error = failure.errno
        maker, number, file, failed = gather([os.getpid(), descriptor, file, error])[0]
        if not failed:
            try:
                memory = _map(f"/proc/{maker}/fd/{number}", size, file)
            except OSError as failure:
                error = failure.errno
        errors = [numbers[0] for numbers in gather([error])]
        if descriptor >= 0:
            os.close(descriptor)
        if any(errors):
            raise OSError(f"the ranks of this node cannot share memory ({os.strerror(max(errors))}"
                          "): set MM3D_TRANSPORT=mpi")
        return memory

    def _gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        """Gather the numbers of all ranks by messages."""
        parts = self.all_gather(np.array(numbers), _MORE_MEMORY)
        return [part[:len(numbers)].tolist() for part in parts]


def join_blocks(parts: Iterable[np.ndarray], out: np.ndarray, dim: int,
                counts: Sequence[int]) -> np.ndarray:
    """Copy flat blocks, which may be longer, to their places along `dim` of `out`; return it."""
    for part, index in zip(parts, block_indices(out.ndim, dim, counts)):
        place = out[index]
        place[...] = part[:place.size].reshape(place.shape)
    return out


def read_only_view(whole: np.ndarray) -> np.ndarray:
    """Return a read-only view of a shared array: writes would be visible to every rank."""
    view = whole.view()
    view.setflags(write=False)
    return view


def _contents(slots: list[np.ndarray], dtype: np.dtype) -> list[np.ndarray]:
    """View the slots as arrays of a dtype, which may leave bytes at the end."""
    whole = MESSAGE_BYTES // dtype.itemsize * dtype.itemsize
    return [slot[:whole].view(dtype) for slot in slots]


def _map(path: str, size: int, file: int) -> mmap.mmap:
    """Map the memory behind a descriptor of another process, whose inode is `file`."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        # In another container the same process id belongs to another process.
        if os.fstat(descriptor).st_ino != file:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
