"""Synchronize the ranks of one node, and check that all of them make the same call.

Each rank has a counter in shared memory.  To arrive at a barrier it adds one and wakes the ranks
that sleep on the counter; to complete the barrier it waits until the other counters are as high.
Stores before the arrival are visible to the others afterwards: x86-64 keeps the order of stores
(on other processors `mm3d.transport.choice` takes MPI).

To wake a rank takes longer than most waits, and then the others wait for it, asleep in their turn.
So where the ranks of the node have a core each, a rank that waits looks at the counter for about
three times as long as waking takes.  It does not yield its core meanwhile: recent Linux takes the
rest of its time from a task that yields, which then runs late if another program needs the core.
Where ranks share cores it yields, and soon sleeps.

In a broadcast only the root is waited for, and in a reduction only the root waits: a rank can be
some barriers ahead.  It reuses a slot only after all ranks have arrived at a later barrier than
that of the last write.  At each barrier it also writes a description of its call, which those who
wait compare with their own; the rest is compared at the next barrier where all wait.
"""

import ctypes
import functools
import os
import struct
import threading
from typing import Iterable, Sequence

import numpy as np
from mpi4py import MPI

from mm3d import launcher

MAX_DIMS = 8                 # of an array that are compared
CALL_WORDS = 5 + MAX_DIMS    # of an encoded call
NO_SIZES = (0,) * MAX_DIMS

KINDS = ("a barrier", "all-gather", "reduce-scatter", "all-reduce", "broadcast", "reduce",
         "more memory", "all-to-all")
(BARRIER, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, REDUCE, MORE_MEMORY,
 ALL_TO_ALL) = range(len(KINDS))

KNOWN_CALLS = 1024           # which are remembered: a step repeats those of the step before

_packing = struct.Struct(f"={CALL_WORDS}q")

SLOTS = 4                   # of messages and calls: a rank is at most SLOTS - 1 barriers ahead
OWN_CORE_LOOKS = 4000       # at a counter, before a rank yields its core: a fifth of a millisecond
YIELDS = 2                  # before a rank sleeps, with a look after each
SLEEP_NS = 10_000_000       # of one sleep; longer waits let MPI make progress in between
IN_MESSAGES = -2            # instead of a region: the arrays are in messages
NO_ROOM = -1                # instead of a region: there was no room for one

_FUTEX = 202    # number of the system call on x86-64
_SLEEP, _WAKE = 0, 1

_system_call = ctypes.CDLL(None).syscall
_system_call.restype = ctypes.c_long
_system_call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32,
                         ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
_sleep_time = (ctypes.c_long * 2)(0, SLEEP_NS)
_words = struct.Struct(f"={8 * CALL_WORDS}s2q")    # call, hash of those before, region
HEAD_BYTES = 64    # of a rank's counter, and what is beside it
BARRIER_BYTES = HEAD_BYTES + SLOTS * _words.size    # that a rank needs for barriers


class PackedCall(tuple[int, ...]):
    """Describe a collective call in `CALL_WORDS` numbers, `packed` as they are in memory."""

    packed: bytes


@functools.lru_cache(KNOWN_CALLS)
def encode_call(kind: int, dtype: np.dtype | None = None, shape: tuple[int, ...] = (),
                dim: int = 0, counts: tuple[int, ...] = ()) -> PackedCall:
    """Encode a collective call.

    `dtype` and `shape` are those of the whole array, if there is one; in an all-to-all its length
    along `dim` counts as 0.  `dim` is the dimension that is divided into blocks of the lengths
    `counts`, or the root of a broadcast or reduce.
    """
    call = PackedCall((kind, ord(dtype.char) if dtype else 0, dim, hash(counts), len(shape),
                       *shape[:MAX_DIMS], *NO_SIZES[len(shape):]))
    call.packed = _packing.pack(*call)
    return call


class Barrier:
    """Count the arrivals of the ranks of a line at barriers, and compare their calls.

    `rows` is shared memory of uint8, a row for each rank, all zero at first; of it the first
    `BARRIER_BYTES` of a row are used, except for bytes 16 to 63.  This rank looks `looks` times at
    a counter before it yields its core, and then sleeps.  `turn` is the number of the last barrier
    that it arrived at, `completed` of one that all ranks are known to have arrived at.
    """

    def __init__(self, comm: MPI.Intracomm, rows: np.ndarray) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.looks = 0 if launcher.oversubscribed() else OWN_CORE_LOOKS
        # Beside a rank's counter is 1 + the rank that it sleeps for; 0 if it is awake.
        head = rows[:, :HEAD_BYTES].view(np.int64)
        self._counters, self._asleep = head[:, 0].data, head[:, 1].data
        # Loads may overtake earlier stores; taking a lock makes the processor complete
        # the stores first, so that other ranks see them before this rank reads their counters.
        self._fence = threading.Lock()
        calls = rows[:, HEAD_BYTES:BARRIER_BYTES].view(np.int64).reshape(self.size, SLOTS, -1)
        self._calls = [[row.data for row in slot] for slot in calls.swapaxes(0, 1)]
        self._addresses = [row.ctypes.data for row in rows]
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self.turn = self.completed = 0
        self.earlier_calls = 0    # hash of the calls since the last barrier where all ranks waited

    def arrive(self, call: PackedCall, region: int = IN_MESSAGES) -> int:
        """Arrive at the next barrier with a description of the call; return its number."""
        turn = self.turn + 1
        if self.completed < turn - SLOTS + 1:
            self.await_slot(turn)
        _words.pack_into(self._calls[turn % SLOTS][self.rank], 0, call.packed, self.earlier_calls,
                         region)
        self.turn = turn
        self._counters[self.rank] = turn
        with self._fence:
            pass
        if self.rank + 1 in self._asleep:
            _system_call(_FUTEX, self._addresses[self.rank], _WAKE, 0x7fffffff, None, None, 0)
        return turn

    def await_slot(self, turn: int) -> None:
        """Wait until no rank reads the slot of the barrier `turn` any longer."""
        self.await_all(turn - SLOTS + 1)

    def await_all(self, turn: int) -> None:
        """Wait until all ranks have arrived at the barrier `turn`."""
        if self.completed < turn:
            counters = self._counters
            for rank in self._others:
                if counters[rank] < turn:
                    self._wait(rank, turn)
            self.completed = turn

    def await_rank(self, rank: int, turn: int) -> None:
        """Wait until `rank` has arrived at the barrier `turn`."""
        if self._counters[rank] < turn:
            self._wait(rank, turn)

    def _wait(self, rank: int, turn: int) -> None:
        """Look, then sleep, until `rank` has arrived at the barrier `turn`."""
        counters = self._counters
        for _ in range(self.looks):
            if counters[rank] >= turn:
                return
        for _ in range(YIELDS):
            os.sched_yield()
            if counters[rank] >= turn:
                return
        self._asleep[self.rank] = rank + 1
        with self._fence:
            pass
        while (seen := counters[rank]) < turn:
            # The kernel compares the low half of the counter with that of the value seen.
            if _system_call(_FUTEX, self._addresses[rank], _SLEEP, seen & 0xffffffff, _sleep_time,
                            None, 0):
                self.comm.Iprobe()
        self._asleep[self.rank] = 0

    def is_agreed(self) -> bool:
        """Return whether all ranks are at this barrier with the same call and region."""
        found = self._calls[self.turn % SLOTS]
        return found.count(found[self.rank]) == self.size

    def describe_difference(self, ranks: Iterable[int]) -> str:
        """Describe how the calls of `ranks` at this barrier differ, but for regions; "" if equal.

        Raises ValueError when earlier calls differ, and so the ranks' lists of regions.
        """
        found = {rank: self._calls[self.turn % SLOTS][rank].tolist() for rank in ranks}
        if len({tuple(words[:CALL_WORDS + 1]) for words in found.values()}) == 1:
            return ""
        differ = format_call_difference(found.items())
        if len({words[CALL_WORDS] for words in found.values()}) > 1:
            raise ValueError(differ)
        return differ

    def compare_calls(self, ranks: Iterable[int], call: PackedCall) -> None:
        """Raise ValueError if the calls of some ranks differ; all compare theirs when all wait."""
        self.note_call(call)
        found = self._calls[self.turn % SLOTS]
        mine = found[self.rank]
        if (any(found[rank] != mine for rank in ranks)
                and (differ := self.describe_difference(ranks))):
            raise ValueError(differ)

    def note_call(self, call: int | PackedCall) -> None:
        """Add a call, or the length of an allocation, to the hash that all ranks compare next."""
        self.earlier_calls = hash((self.earlier_calls, call))


def format_call(words: Sequence[int]) -> str:
    """Format a call for an error message."""
    kind, letter, dim, _, ndim, *shape = words[:CALL_WORDS]
    if kind in (BARRIER, MORE_MEMORY):
        return KINDS[kind]
    where = {ALL_REDUCE: "", BROADCAST: f" from rank {dim}", REDUCE: f" to rank {dim}"}
    return (f"{KINDS[kind]} of {tuple(shape[:ndim])} in {_dtype_name(chr(letter))}"
            + where.get(kind, f" along dimension {dim}"))


def _dtype_name(letter: str) -> str:
    """Return a dtype's name, also of bfloat16, which NumPy does not find by its letter."""
    try:
        return np.dtype(letter).name
    except TypeError:
        return {"E": "bfloat16"}.get(letter, f"a dtype of letter {letter}")


def format_call_difference(found: Iterable[tuple[int, Sequence[int]]]) -> str:
    """Format an error message about ranks, each with its encoded call, whose calls differ."""
    ranks: dict[tuple, list[int]] = {}
    for rank, words in found:
        ranks.setdefault(tuple(words[:CALL_WORDS]), []).append(rank)
    if len(ranks) == 1:
        return ("before this call the ranks of this line made different ones: all ranks of an "
                "axis must make the same calls, also of Split.empty and Split.term")
    calls = {format_call(words) for words in ranks}
    listed = "; ".join(
        f"rank{'s' * (len(callers) > 1)} {', '.join(map(str, callers))}: {format_call(words)}"
        for words, callers in ranks.items())
    return (f"the ranks of this line make different calls ({listed}): give the same dtype and "
            f"{'counts' if len(calls) == 1 else 'blocks of one array'} on all of them")
