"""Memory that is lent: who lends it learns when the array and all views of it are gone."""

import ctypes
import math
import weakref
from typing import Any, Callable

import numpy as np


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

    Attributes
    ----------
    in_use, peak : int
        Bytes lent at this moment, and the most ever lent at one time since `reset_peak`.
    idle : int
        Bytes held to be lent again.
    """

    granule = 4096

    def __init__(self) -> None:
        self._free: dict[int, list[ctypes.Array]] = {}
        self._loans: dict[int, Loan] = {}    # a weak reference that is gone itself tells nobody
        self.in_use = self.peak = self.idle = 0

    @property
    def reserved(self) -> int:
        """Bytes held altogether."""
        return self.in_use + self.idle

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An uninitialised C-ordered array of `shape` and `dtype`."""
        size = -(-math.prod(shape) * dtype.itemsize // self.granule) * self.granule or self.granule
        free = self._free.get(size)
        if free:
            storage = free.pop()
            self.idle -= size
        else:
            storage = self._storage(size)
        array = np.ndarray(shape, dtype, storage)
        self.lend(array, size, self._give_back, storage)
        return array

    def _storage(self, size: int) -> ctypes.Array:
        """New memory of `size` bytes.

        It is no NumPy array, since the base of a view would then be that, and not the array that
        was lent.
        """
        return (ctypes.c_char * size).from_buffer(np.empty(size, np.uint8))

    def _give_back(self, storage: ctypes.Array) -> None:
        self._free.setdefault(len(storage), []).append(storage)
        self.idle += len(storage)

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
        self._free.clear()
        self.idle = 0
