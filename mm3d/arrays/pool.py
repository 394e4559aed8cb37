"""Memory that is lent: who lends it learns when the array and all views of it are gone."""

import collections
import contextlib
import ctypes
import math
import mmap
import weakref
from typing import Any, Callable

import numpy as np

from mm3d.arrays.idle_memory import GRANULARITY, Idle, size_class

MAPPED = 1 << 17    # bytes from which storage is mapped, so that it does go back to the system
HUGE = 1 << 22      # from which the system is asked for large pages, as NumPy does


class Loan(weakref.ref):
    """Until an array and every view of it are gone: what is then to be done.

    Attributes
    ----------
    key : int
        The array's identity, by which it is found.
    size : int
        Bytes that count as in use meanwhile.
    back : callable
        What takes `what` back.
    what : object
        What was lent: the memory, or its number.
    """

    __slots__ = ("key", "size", "back", "what")


class Pool:
    """Host memory that is handed out again as soon as no array refers to it.

    A first touch of fresh memory costs several times a reuse of it, and a training step asks
    for the same sizes again and again.  Every view of an array from `take` keeps that array
    alive; when the last of them goes the storage returns.

    After each `take` at most twice the bytes are idle that were in use at one time of late, or
    16 MiB if that is more (see `mm3d.arrays.idle_memory`); storage is less than an eighth larger
    than what is asked for, in whole units.

    Attributes
    ----------
    in_use, peak : int
        Bytes lent at this moment, and the most ever lent at one time since `reset_peak`.
    """

    granularity = GRANULARITY

    def __init__(self) -> None:
        self._idle = Idle()
        # Arrays end at any moment, also in the middle of `take`: what comes back waits here.
        self._returned: collections.deque[tuple[int, Any, int]] = collections.deque()
        self._loans: dict[int, Loan] = {}    # a weak reference that is gone itself tells nobody
        self.in_use = self.peak = self._spare = 0

    @property
    def idle(self) -> int:
        """Bytes held to be lent again."""
        self._collect()
        return self._idle.bytes

    @property
    def reserved(self) -> int:
        """Bytes held altogether."""
        return self.idle + self.in_use + self._spare

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An uninitialised C-ordered array of `shape` and `dtype`."""
        length = math.prod(shape) * dtype.itemsize
        wanted = -(-length // self.granularity) * self.granularity or self.granularity
        size = size_class(length, self.granularity)
        self._collect()
        found = self._idle.get(size)
        storage = self._storage(size) if found is None else found[1]
        array = np.ndarray(shape, dtype, storage)
        self._spare += size - wanted
        self.lend(array, wanted, self._returned.append, (size, storage, size - wanted))
        self._idle.used(self.in_use)
        if self._idle.bytes > self._idle.bound:
            self._idle.surplus()
        return array

    def _storage(self, size: int) -> ctypes.Array:
        """New memory of `size` bytes.

        It is no NumPy array, since the base of a view would then be that, and not the array that
        was lent.
        """
        if size < MAPPED:
            return (ctypes.c_char * size).from_buffer(np.empty(size, np.uint8))
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            # Advice only: a kernel without large pages refuses it, and the memory is as good.
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        return (ctypes.c_char * size).from_buffer(memory)

    def _collect(self) -> None:
        """Count what has come back as idle."""
        while self._returned:
            size, storage, spare = self._returned.popleft()
            self._idle.put(size, storage)
            self._spare -= spare

    def lend(self, array: np.ndarray, size: int, back: Callable[[Any], None], what: Any,
             kind: type[Loan] = Loan) -> Loan:
        """Count `size` bytes as in use until `array` and its views are gone; then back(what)."""
        loan = kind(array, self._ended)
        loan.key, loan.size, loan.back, loan.what = id(array), size, back, what
        self._loans[loan.key] = loan
        self.in_use += size
        if self.in_use > self.peak:
            self.peak = self.in_use
        return loan

    def _ended(self, loan: Loan) -> None:
        """An array and all of its views are gone."""
        del self._loans[loan.key]
        self.in_use -= loan.size
        loan.back(loan.what)

    def loan(self, a: np.ndarray) -> Loan | None:
        """That of `a`, or of the array that it is a view of; None if that was not lent here."""
        return self._loans.get(id(a.base)) or self._loans.get(id(a))

    def reset_peak(self) -> None:
        """Let `peak` start again from what is in use now."""
        self.peak = self.in_use

    def trim(self) -> None:
        """Give what is not lent back to the system."""
        self._collect()
        self._idle.clear()
