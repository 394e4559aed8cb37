"""Memory that the ranks of one node share, and what they hand each other there.

The memory never has a name, so nothing is left behind however a program ends: a rank opens it
through the descriptor of the rank that made it.

Regions of memory are handed out without a word between the ranks, because all of them make the
same calls in the same order and know the same: what a rank is done with it notes for the next
meeting where all wait for all, and there all read all notes.  A note is written over two meetings
later only, when everybody has been at the meeting in between and so has read it.  How ranks meet
is told in `mm3d.transport.barrier`.
"""

import collections
import contextlib
import errno
import mmap
import os
import platform
import sys
from typing import Callable

import numpy as np
from mpi4py import MPI

from mm3d.arrays.idle_memory import size_class
from mm3d.transport import call_check
from mm3d.transport.barrier import BYTES, IN_MESSAGES, CROWDED, Barrier, NOWHERE, SLOTS
from mm3d.transport.call_check import Call
from mm3d.transport.regions import Place, Regions

PAGE = 4096
SEGMENT = 1 << 30         # bytes mapped at a time; pages never touched take no memory
MAX_RETURNED = 63         # regions that a rank can give back at one barrier; the rest waits
MAX_TAKEN = 32            # regions taken since the last barrier before `take` adds one
MESSAGE_BYTES = 1 << 16   # bytes that a rank can pass to all others at a barrier

_BARRIER = call_check.call(call_check.BARRIER)
_MORE = call_check.call(call_check.MORE)


def available() -> bool:
    """Whether this system can share memory so."""
    return (sys.platform == "linux" and platform.machine() == "x86_64"
            and hasattr(os, "memfd_create"))


class SharedMemory:
    """Memory of the ranks of one node, handed out to all of them in regions.

    After each meeting of all ranks, regions that nobody uses hold at most twice the bytes that
    were in use at one time of late, or 16 MiB if that is more (see `mm3d.arrays.idle_memory`); the
    rest goes back to the system, and all of it with the last rank.  A region beyond 64 KiB is less
    than an eighth larger than what was asked for, in whole pages.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks; all of them make it, and make the same calls in the same order.
    looks : int
        How often a rank looks for another before it sleeps until it is woken.

    Attributes
    ----------
    regions : Regions
        Their books, the same on all ranks.

    Raises
    ------
    OSError
        On every rank alike when one cannot make the memory, or open that of another: here, and
        in `take` when more is needed.
    """

    def __init__(self, comm: MPI.Intracomm, looks: int = CROWDED) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        # Of each rank: what meetings need, with the last two that it left notes for; these
        # notes; slots of mail.
        notes = BYTES + 2 * 4 * (1 + MAX_RETURNED)
        stride = -(-(notes + SLOTS * MESSAGE_BYTES) // PAGE) * PAGE
        # With it the first segment, so that who may not share so much learns it here.
        length = self.size * stride
        segment = self._open(length + SEGMENT, comm.allgather)
        rows = np.frombuffer(segment, np.uint8, length).reshape(self.size, stride)
        self.barrier = Barrier(comm, rows, looks)
        self._noted = [rows[:, 8 * word:8 * word + 8].view(np.int64)[:, 0].data for word in (2, 3)]
        self._notes = [[row[BYTES:notes].view(np.int32).reshape(2, -1)[turn].data for row in rows]
                       for turn in (0, 1)]
        first = [notes + slot * MESSAGE_BYTES for slot in range(SLOTS)]
        self._messages = [[row[start:start + MESSAGE_BYTES] for row in rows] for start in first]
        self._all = range(self.size)
        self._given_back: collections.deque[int] = collections.deque()
        self.give_back = self._given_back.append        # say at the next meeting what is not used
        self.regions = Regions(self.size, segment, length)
        self._taken = 0                                 # regions since the last meeting

    def synchronize(self, call: Call = _BARRIER, region: int = IN_MESSAGES) -> bool:
        """Wait for all ranks; what each wrote before, the others see afterwards.

        Parameters
        ----------
        call : Call
            What this rank comes for.
        region : int
            Where the arrays lie that it is to read and to be read.

        Returns
        -------
        bool
            Whether all ranks named the same region, and one at all; if so, those that were taken
            on trial are taken, else they never were.

        Raises
        ------
        ValueError
            On all ranks alike when they come for different calls, or have made different ones.
        """
        barrier, regions, differ = self.barrier, self.regions, ""
        noted, notes = (which[(barrier.turn + 1) & 1] for which in (self._noted, self._notes))
        if self._given_back:
            if barrier.completed < barrier.turn:
                barrier.await_all(barrier.turn)
            self._note(barrier.turn + 1)
        turn = barrier.arrive(call, region)
        barrier.await_all(turn)
        agreed = barrier.agreed()
        if not agreed:
            differ = barrier.difference(self._all)
        agreed = agreed and region != NOWHERE
        regions.settle(agreed)
        regions.idle.used(regions.in_use)
        for rank in self._all:
            if noted[rank] == turn:
                self._read(notes[rank])
        self._empty()
        self._taken = barrier.before = 0
        if differ:
            raise ValueError(differ)
        return agreed

    def _empty(self) -> None:
        """Give memory of which too much lies idle back to the system: the first rank does."""
        for segment, start, size in self.regions.emptied():
            if self.rank == 0:
                # Advice only: where a kernel refuses it, the memory is used again as it is.
                with contextlib.suppress(OSError):
                    segment.madvise(mmap.MADV_REMOVE, start, size)

    def _note(self, turn: int) -> None:
        """Leave word of what this rank has given back."""
        note, given_back, count = self._notes[turn & 1][self.rank], self._given_back, 0
        while given_back and count < MAX_RETURNED:
            count += 1
            note[count] = given_back.popleft()
        note[0] = count
        self._noted[turn & 1][self.rank] = turn

    def _read(self, note: memoryview) -> None:
        """Count what a rank has given back."""
        for place in range(1, 1 + note[0]):
            self.regions.drop(note[place])

    def all_gather(self, a: np.ndarray, call: Call = _BARRIER) -> list[np.ndarray] | None:
        """The small arrays `a` of all ranks, each flat; to be read before the next meeting.

        Blocks of other ranks may be longer or shorter; what lies behind their end is undefined.
        None where some ranks came with a region instead; errors are those of `synchronize`.
        """
        slots = self._post(a, True)
        return _contents(slots, a.dtype) if self.synchronize(call) else None

    def broadcast(self, a: np.ndarray, root: int, call: Call = _BARRIER) -> np.ndarray:
        """`a` of the rank `root`, flat, for which alone the others wait; as `all_gather` has it.

        A ValueError is raised by a rank whose call differs from that of the root, and at the next
        `synchronize` by all.
        """
        slots = self._post(a, self.rank == root)
        self.barrier.await_rank(root, self.barrier.arrive(call))
        self.barrier.compare((self.rank, root), call)
        return _contents(slots[root:root + 1], a.dtype)[0]

    def gather(self, a: np.ndarray, root: int,
               call: Call = _BARRIER) -> list[np.ndarray] | None:
        """What `all_gather` gives, on the rank `root`, which alone waits; None elsewhere.

        A ValueError is raised by the root when calls differ, and at the next `synchronize` by all.
        """
        slots = self._post(a, True)
        turn = self.barrier.arrive(call)
        if self.rank != root:
            self.barrier.note(call)
            return None
        self.barrier.await_all(turn)
        self.barrier.compare(self._all, call)
        return _contents(slots, a.dtype)

    def _post(self, a: np.ndarray, writes: bool) -> list[np.ndarray]:
        """The ranks' mail for the next meeting, in which this rank, if it `writes`, puts `a`."""
        turn = self.barrier.turn + 1
        slots = self._messages[turn % SLOTS]
        if writes:
            self.barrier.await_slot(turn)
            if a.size:
                slots[self.rank][:a.nbytes].view(a.dtype).reshape(a.shape)[...] = a
        return slots

    def take(self, length: int) -> tuple[int, Place]:
        """A region of at least `length` bytes, the same on every rank; all must ask for it.

        Returns
        -------
        region : int
            Its number, for `give_back`.
        place : tuple
            The memory that it lies in, and how many bytes from its beginning.
        """
        if self._taken == MAX_TAKEN:
            self.synchronize()
        self._taken += 1
        self.barrier.note(length)
        region = self.regions.take(length)
        if region is None:
            self.regions.add(self._open(max(SEGMENT, size_class(length)), self._gather_numbers))
            region = self.regions.take(length)
        return region, self.regions.place(region)

    def try_take(self, length: int) -> tuple[int, Place | None]:
        """`take` for as long as until the next `synchronize`, which then decides; maybe `NOWHERE`.

        Ranks need not do it alike.
        """
        region = self.regions.take(length, trial=True)
        return (NOWHERE, None) if region is None else (region, self.regions.place(region))

    def _open(self, size: int, tell_all: Callable[[list[int]], list]) -> mmap.mmap:
        """New memory, which the first rank makes; on every rank the same OSError if one fails.

        `tell_all` gives the numbers of all ranks to all.  A rank that fails says so then, as the
        others would wait for it.
        """
        descriptor, file, error = -1, 0, 0
        if self.rank == 0:
            try:
                descriptor = _create(size)
                file = os.fstat(descriptor).st_ino
            except OSError as failure:
                error = failure.errno
        maker, number, file, failed = tell_all([os.getpid(), descriptor, file, error])[0]
        if not failed:
            try:
                memory = _map(f"/proc/{maker}/fd/{number}", size, file)
            except OSError as failure:
                error = failure.errno
        errors = [numbers[0] for numbers in tell_all([error])]
        if descriptor >= 0:
            os.close(descriptor)
        if any(errors):
            raise OSError(f"the ranks of this node cannot share memory ({os.strerror(max(errors))}"
                          "): set MM3D_TRANSPORT=mpi")
        return memory

    def _gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        """The numbers of all ranks."""
        return [part[:len(numbers)].tolist() for part in self.all_gather(np.array(numbers), _MORE)]


def _contents(slots: list[np.ndarray], dtype: np.dtype) -> list[np.ndarray]:
    """The slots as arrays of a type, which need not fill them."""
    whole = MESSAGE_BYTES // dtype.itemsize * dtype.itemsize
    return [slot[:whole].view(dtype) for slot in slots]


def _create(size: int) -> int:
    """A descriptor of nameless memory, filled with zeros."""
    descriptor = os.memfd_create("mm3d")
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _map(path: str, size: int, file: int) -> mmap.mmap:
    """The memory behind a descriptor of another process, whose inode is `file`."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        # In a container of its own a process of that number is another one.
        if os.fstat(descriptor).st_ino != file:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
