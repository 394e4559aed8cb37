"""Memory that the ranks of one node share, and how they meet there.

The memory never has a name, so nothing is left behind however a program ends: a rank opens it
through the descriptor of the rank that made it.

Ranks meet by counting.  Each has a counter in shared memory; to meet it adds one, wakes whoever
sleeps on it, and waits until the others' are as high.  What a rank wrote before it arrived, the
others see afterwards: processors of this kind keep the order of stores (others do not, there
`available` says no).  A rank that waits gives its core away, and soon sleeps until it is woken.

Where only one rank has something to say, or to hear, the others come to the meeting and go on:
whoever hears waits for those who speak.  So a rank can be some meetings ahead, and writes into a
slot of its mail again only when all have come to a meeting after that of the last writing.

Regions of memory are handed out without a word between the ranks, because all of them make the
same calls in the same order and know the same: what a rank is done with it notes for the next
meeting where all wait for all, and there all read all notes.  A note is written over two meetings
later only, when everybody has been at the meeting in between and so has read it.
"""

import collections
import ctypes
import errno
import mmap
import os
import platform
import sys
import threading
from typing import Callable

import numpy as np
from mpi4py import MPI

PAGE = 4096
SEGMENT = 1 << 30   # bytes mapped at a time; what is never used takes no memory
NOTES = 63          # regions that a rank can give back at one meeting; more wait for the next
TAKES = 32          # regions taken without a meeting before there is one
MAIL = 1 << 16      # bytes that a rank can hand to all others at a meeting
SLOTS = 4           # of mail; a rank can be so many meetings, less one, ahead of the others
YIELDS = 2          # looks at a counter, the core given away in between, before sleeping
NAP = 10_000_000    # nanoseconds; longer waits let MPI make progress in between

_FUTEX = 202        # number of the system call on x86-64
_SLEEP, _WAKE = 0, 1


def available() -> bool:
    """Whether this system can share memory so."""
    return (sys.platform == "linux" and platform.machine() == "x86_64"
            and hasattr(os, "memfd_create"))


_system_call = ctypes.CDLL(None).syscall
_system_call.restype = ctypes.c_long
_system_call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32,
                         ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
_nap = (ctypes.c_long * 2)(0, NAP)


class SharedMemory:
    """Memory of the ranks of one node, handed out to all of them in regions.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks; all of them make it, and make the same calls in the same order.

    Raises
    ------
    OSError
        On every rank alike when one cannot make the memory, or open that of another: here, and
        in `take` when more is needed.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        # Of each rank: the counter, the number, from 1, of the rank on which it sleeps, the last
        # two meetings that it left notes for; these notes; slots of mail.
        notes = 64 + 2 * 4 * (1 + NOTES)
        self._stride = -(-(notes + SLOTS * MAIL) // PAGE) * PAGE
        # With it the first segment, so that who may not share so much learns it here.
        length = self.size * self._stride
        segment = self._open(length + SEGMENT, comm.allgather)
        board = np.frombuffer(segment, np.uint8, length)
        self._counters, self._asleep, *self._noted = (
            board.view(np.int64)[word::self._stride // 8].data for word in range(4))
        # Stores may wait while later loads go ahead; taking a lock makes the processor finish
        # them, so that others see what was written before they are looked at.
        self._fence = threading.Lock()
        rows = board.reshape(self.size, self._stride)
        self._notes = [[row[64:notes].view(np.int32).reshape(2, -1)[turn].data for row in rows]
                       for turn in (0, 1)]
        self._mail = [[row[notes + slot * MAIL:notes + (slot + 1) * MAIL] for row in rows]
                      for slot in range(SLOTS)]
        self._addresses = [row.ctypes.data for row in rows]
        self._all = range(self.size)
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._turn = 0                                  # the last meeting that this rank came to
        self._met = 0                                   # one that it knows all have come to
        self._given_back: collections.deque[int] = collections.deque()
        self.give_back = self._given_back.append        # say at the next meeting what is not used
        self._sizes: list[int] = []                     # of the regions
        self._places: list[tuple[mmap.mmap, int]] = []  # the segment of each and where it begins
        self._users: list[int] = []                     # ranks that still use each
        self._free: dict[int, list[int]] = {}           # regions that nobody uses, by size
        self._segment = segment                         # where new ones are made
        self._used = length                             # bytes of the last segment
        self._taken = 0                                 # regions since the last meeting

    def meet(self) -> None:
        """Wait for all ranks; what each wrote before, the others see afterwards."""
        noted, notes = self._noted[(self._turn + 1) & 1], self._notes[(self._turn + 1) & 1]
        if self._given_back:
            if self._met < self._turn:
                self._await_all(self._turn)
            self._note(self._turn + 1)
        turn = self._arrive()
        self._await_all(turn)
        for rank in self._all:
            if noted[rank] == turn:
                self._read(notes[rank])
        self._taken = 0

    def _arrive(self) -> int:
        """Come to the next meeting, and say so; its number."""
        turn = self._turn = self._turn + 1
        self._counters[self.rank] = turn
        with self._fence:
            pass
        if self.rank + 1 in self._asleep:
            _system_call(_FUTEX, self._addresses[self.rank], _WAKE, 0x7fffffff, None, None, 0)
        return turn

    def _await_all(self, turn: int) -> None:
        """Wait until all have come to the meeting `turn`."""
        counters = self._counters
        for rank in self._others:
            if counters[rank] < turn:
                self._wait(rank, turn)
        self._met = turn

    def _wait(self, rank: int, turn: int) -> None:
        """Until another rank has come to the meeting `turn`."""
        for _ in range(YIELDS):
            os.sched_yield()
            if self._counters[rank] >= turn:
                return
        self._asleep[self.rank] = rank + 1
        with self._fence:
            pass
        while (seen := self._counters[rank]) < turn:
            # The kernel compares what it finds there with the low half of what was seen.
            if _system_call(_FUTEX, self._addresses[rank], _SLEEP, seen & 0xffffffff, _nap,
                            None, 0):
                self.comm.Iprobe()
        self._asleep[self.rank] = 0

    def _note(self, turn: int) -> None:
        """Leave word of what this rank has given back."""
        note, given_back, count = self._notes[turn & 1][self.rank], self._given_back, 0
        while given_back and count < NOTES:
            count += 1
            note[count] = given_back.popleft()
        note[0] = count
        self._noted[turn & 1][self.rank] = turn

    def _read(self, note: memoryview) -> None:
        """Count what a rank has given back; what all have is free."""
        for place in range(1, 1 + note[0]):
            region = note[place]
            self._users[region] -= 1
            if not self._users[region]:
                self._free[self._sizes[region]].append(region)

    def exchange(self, a: np.ndarray) -> list[np.ndarray]:
        """The small arrays `a` of all ranks, each flat; to be read before the next meeting.

        Blocks of other ranks may be longer or shorter; what lies behind their end is undefined.
        """
        slots = self._post(a, True)
        self.meet()
        return _contents(slots, a.dtype)

    def tell(self, a: np.ndarray, root: int) -> np.ndarray:
        """`a` of the rank `root`, flat, for which alone the others wait; as `exchange` has it."""
        slots = self._post(a, self.rank == root)
        turn = self._arrive()
        if self._counters[root] < turn:
            self._wait(root, turn)
        return _contents(slots[root:root + 1], a.dtype)[0]

    def collect(self, a: np.ndarray, root: int) -> list[np.ndarray] | None:
        """What `exchange` gives, on the rank `root`, which alone waits; None elsewhere."""
        slots = self._post(a, True)
        turn = self._arrive()
        if self.rank != root:
            return None
        self._await_all(turn)
        return _contents(slots, a.dtype)

    def _post(self, a: np.ndarray, writes: bool) -> list[np.ndarray]:
        """The ranks' mail for the next meeting, in which this rank, if it `writes`, puts `a`."""
        turn = self._turn + 1
        slots = self._mail[turn % SLOTS]
        if writes:
            if self._met < turn - SLOTS + 1:
                self._await_all(turn - SLOTS + 1)
            if a.size:
                slots[self.rank][:a.nbytes].view(a.dtype).reshape(a.shape)[...] = a
        return slots

    def take(self, length: int) -> tuple[int, tuple[mmap.mmap, int]]:
        """A region of at least `length` bytes, the same on every rank; all must ask for it.

        Returns
        -------
        region : int
            Its number, for `give_back`.
        place : tuple
            The memory that it lies in, and how many bytes from its beginning.
        """
        size = -(-length // PAGE) * PAGE or PAGE
        if self._taken == TAKES:
            self.meet()
        self._taken += 1
        free = self._free.get(size)
        region = free.pop() if free else self._new(size)
        self._users[region] = self.size
        return region, self._places[region]

    def _new(self, size: int) -> int:
        """One more region."""
        if self._used + size > len(self._segment):
            self._segment, self._used = self._open(max(SEGMENT, size), self._by_mail), 0
        self._free.setdefault(size, [])
        self._places.append((self._segment, self._used))
        self._sizes.append(size)
        self._users.append(0)
        self._used += size
        return len(self._sizes) - 1

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

    def _by_mail(self, numbers: list[int]) -> list[list[int]]:
        """The numbers of all ranks."""
        return [part[:len(numbers)].tolist() for part in self.exchange(np.array(numbers))]


def _contents(slots: list[np.ndarray], dtype: np.dtype) -> list[np.ndarray]:
    """The slots as arrays of a type, which need not fill them."""
    whole = MAIL // dtype.itemsize * dtype.itemsize
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
