"""How the ranks of one node meet, and find there whether all have come for the same.

Ranks meet by counting.  Each has a counter in shared memory; to meet it adds one, wakes whoever
sleeps on it, and waits until the others' are as high.  What a rank wrote before it arrived, the
others see afterwards: processors of this kind keep the order of stores (others do not, there
`mm3d.transport.segments.available` says no).  A rank that waits gives its core away, and soon
sleeps until it is woken; where no other rank needs the core it looks longer before it does, since
waking takes longer than most waits.

Where only one rank has something to say, or to hear, the others come to the meeting and go on:
whoever hears waits for those who speak.  So a rank can be some meetings ahead, and writes into a
slot again only when all have come to a meeting after that of the last writing.

At each meeting a rank also leaves word of what it calls; whoever waits for others compares theirs
with its own.  What nobody waited for is compared at the next meeting of all.
"""

import ctypes
import os
import struct
import threading
from typing import Iterable

import numpy as np
from mpi4py import MPI

from mm3d.transport import call_check
from mm3d.transport.call_check import Call

SLOTS = 4           # for what is left for a meeting: a rank is so many, less one, ahead at most
CROWDED = 2         # looks at a counter, the core given away in between, before sleeping
LOOKS = 50          # the same where no other rank needs the core
SLEEP_NS = 10_000_000    # nanoseconds; longer waits let MPI make progress in between
IN_MESSAGES = -2        # instead of a region: what is compared with is not in one
NOWHERE = -1        # the same: there was no room

_FUTEX = 202        # number of the system call on x86-64
_SLEEP, _WAKE = 0, 1

_system_call = ctypes.CDLL(None).syscall
_system_call.restype = ctypes.c_long
_system_call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32,
                         ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
_sleep_time = (ctypes.c_long * 2)(0, SLEEP_NS)
_words = struct.Struct(f"={call_check.WORDS + 2}q")    # a call, those before it, and a region
HEAD = 64                                         # bytes of a rank's counter, and what is beside
BYTES = HEAD + SLOTS * _words.size                # of what meetings need of each rank


class Barrier:
    """Meetings of the ranks of a line.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    rows : ndarray of uint8
        Shared memory, a row a rank, of which the first `BYTES` are used, all zero at first; of
        the first 64 only 16.
    looks : int
        How often a rank looks for another before it sleeps until it is woken.

    Attributes
    ----------
    turn : int
        The last meeting that this rank came to.
    completed : int
        One that it knows all have come to.
    """

    def __init__(self, comm: MPI.Intracomm, rows: np.ndarray, looks: int) -> None:
        self.comm, self.rank, self.size, self.looks = comm, comm.rank, comm.size, looks
        # The number, from 1, of the rank on which a rank sleeps is beside its counter.
        head = rows[:, :HEAD].view(np.int64)
        self._counters, self._asleep = head[:, 0].data, head[:, 1].data
        # Stores may wait while later loads go ahead; taking a lock makes the processor finish
        # them, so that others see what was written before they are looked at.
        self._fence = threading.Lock()
        said = rows[:, HEAD:BYTES].view(np.int64).reshape(self.size, SLOTS, -1)
        self._calls = [[row.data for row in slot] for slot in said.swapaxes(0, 1)]
        self._addresses = [row.ctypes.data for row in rows]
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self.turn = self.completed = 0
        self.before = 0    # the calls since the last meeting of all, in one number

    def arrive(self, call: Call, region: int = IN_MESSAGES) -> int:
        """Come to the next meeting, and say so, and what for; its number."""
        turn = self.turn + 1
        self.await_slot(turn)
        _words.pack_into(self._calls[turn % SLOTS][self.rank], 0, *call, self.before, region)
        self.turn = turn
        self._counters[self.rank] = turn
        with self._fence:
            pass
        if self.rank + 1 in self._asleep:
            _system_call(_FUTEX, self._addresses[self.rank], _WAKE, 0x7fffffff, None, None, 0)
        return turn

    def await_slot(self, turn: int) -> None:
        """Wait until nobody reads any longer what lies in the slot of the meeting `turn`."""
        if self.completed < turn - SLOTS + 1:
            self.await_all(turn - SLOTS + 1)

    def await_all(self, turn: int) -> None:
        """Wait until all have come to the meeting `turn`."""
        counters = self._counters
        for rank in self._others:
            if counters[rank] < turn:
                self._wait(rank, turn)
        self.completed = turn

    def await_rank(self, rank: int, turn: int) -> None:
        """Wait until one has."""
        if self._counters[rank] < turn:
            self._wait(rank, turn)

    def _wait(self, rank: int, turn: int) -> None:
        for _ in range(self.looks):
            os.sched_yield()
            if self._counters[rank] >= turn:
                return
        self._asleep[self.rank] = rank + 1
        with self._fence:
            pass
        while (seen := self._counters[rank]) < turn:
            # The kernel compares what it finds there with the low half of what was seen.
            if _system_call(_FUTEX, self._addresses[rank], _SLEEP, seen & 0xffffffff, _sleep_time,
                            None, 0):
                self.comm.Iprobe()
        self._asleep[self.rank] = 0

    def agreed(self) -> bool:
        """Whether all have come to this meeting for the same call and the same region."""
        found = self._calls[self.turn % SLOTS]
        return found.count(found[self.rank]) == self.size

    def difference(self, ranks: Iterable[int]) -> str:
        """How the calls of these ranks differ at this meeting, but for regions; empty if not.

        Raises
        ------
        ValueError
            When they differ in the calls before: their books do, then, and cannot be gone on with.
        """
        found = {rank: self._calls[self.turn % SLOTS][rank].tolist() for rank in ranks}
        if len({tuple(words[:call_check.WORDS + 1]) for words in found.values()}) == 1:
            return ""
        differ = call_check.difference(found.items())
        if len({words[call_check.WORDS] for words in found.values()}) > 1:
            raise ValueError(differ)
        return differ

    def compare(self, ranks: Iterable[int], call: Call) -> None:
        """Compare the calls of some ranks now, and those of all when they next meet.

        Raises
        ------
        ValueError
            When those of these ranks differ.
        """
        self.note(call)
        found = self._calls[self.turn % SLOTS]
        mine = found[self.rank]
        if any(found[rank] != mine for rank in ranks) and (differ := self.difference(ranks)):
            raise ValueError(differ)

    def note(self, what: int | Call) -> None:
        """Have the ranks compare, when they next meet, that all did this here."""
        self.before = hash((self.before, what))
