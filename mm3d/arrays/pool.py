"""Lend memory to arrays, and take it back when an array and all of its views are gone.

A first touch of new memory costs several times a reuse, so memory that is given back is kept.
Two rules bound the amount.  Sizes are rounded up to classes, eight between a power of two and the
next, so that arrays of nearly the same size use the same memory.  And when more memory is idle
than `IdleMemory.bound` allows, the pieces that have been idle longest go back to the system.
"""

import collections
import contextlib
import ctypes
import functools
import math
import mmap
import weakref
from typing import Any, Callable

import numpy as np

LARGEST_BYTES = 1 << 60     # of an array; more has no address
MIN_MAPPED_BYTES = 1 << 17    # of memory that is mapped, so that it goes back to the system
MIN_HUGE_BYTES = 1 << 22      # of memory for which large pages are advised, as NumPy does
GRANULARITY_BYTES = 4096
CLASS_BITS = 3               # after the leading one of a size in units: 8 classes per power of two
MIN_BOUND_BYTES = 1 << 24    # that may always be idle
WINDOW_PIECES = 4096         # pieces given back in a window; its most bytes in use are kept
KNOWN_LENGTHS = 4096         # whose classes are remembered


@functools.lru_cache(KNOWN_LENGTHS)
def size_class(length: int, granularity: int = GRANULARITY_BYTES) -> int:
    """Return the bytes to allocate for `length` bytes.

    Up to 16 units of `granularity` bytes it is the next multiple of a unit, at least one; beyond,
    less than an eighth larger than that.
    """
    units = int(-(-length // granularity)) or 1
    step = 1 << max(0, units.bit_length() - 1 - CLASS_BITS)
    return -(-units // step) * step * granularity


class IdleMemory:
    """Hold pieces of memory that are not in use, by their size; all together have `bytes`.

    Its state depends on the order of the calls alone: where ranks make the same calls, they keep
    and release the same pieces.  `bound` bytes may be idle: twice the most that were in use in the
    last one to two windows of `WINDOW_PIECES` pieces given back, or `MIN_BOUND_BYTES`.  Twice, as
    a step uses memory of different sizes at different times, and would lose some of it each time.
    """

    def __init__(self) -> None:
        # Of each size, those put last stand last, each with the number of its `put`.
        self._pieces: dict[int, list[tuple[int, Any]]] = collections.defaultdict(list)
        self.bytes = self._count = self._most = self._before = 0
        self.bound = MIN_BOUND_BYTES
        self._window = WINDOW_PIECES    # the number of the `put` at which the next window begins

    def put(self, size: int, piece: Any) -> None:
        """Keep a piece that is no longer in use."""
        self._count += 1
        self._pieces[size].append((self._count, piece))
        self.bytes += size

    def get(self, size: int) -> tuple[int, Any] | None:
        """Take the piece of that size that was put last, with its number; None without one."""
        pieces = self._pieces[size]
        if not pieces:
            return None
        self.bytes -= size
        return pieces.pop()

    def undo_get(self, size: int, found: tuple[int, Any]) -> None:
        """Undo the last `get` of that size, which returned `found`."""
        self._pieces[size].append(found)
        self.bytes += size

    def note_in_use(self, in_use: int) -> None:
        """Record the bytes that are in use now, from which the bound follows."""
        if in_use <= self._most and self._count < self._window:
            return
        self._most = max(self._most, in_use)
        if self._count >= self._window:
            self._window = self._count + WINDOW_PIECES
            self._before, self._most = self._most, in_use
        self.bound = max(MIN_BOUND_BYTES, 2 * self._most, 2 * self._before)

    def take_surplus(self) -> list[Any]:
        """Remove and return the pieces over the bound: those that have been idle longest."""
        found: list[Any] = []
        while self.bytes > self.bound:
            size = min((size for size, pieces in self._pieces.items() if pieces),
                       key=lambda size: self._pieces[size][0][0])
            found.append(self._pieces[size].pop(0)[1])
            self.bytes -= size
        return found

    def clear(self) -> None:
        """Return all pieces to the system."""
        for pieces in self._pieces.values():    # `put` may come at any moment, see `Pool`
            pieces.clear()
        self.bytes = 0


class Lease(weakref.ref):
    """Hold the memory of an array until the array and every view of it are gone.

    The pool finds it by `key`, the array's identity; `size` bytes count as in use meanwhile.  When
    it ends, `give_back`, unset for memory of the pool itself, is called with `item`, the memory or
    its number.
    """

    __slots__ = ("key", "size", "give_back", "item")


class Pool(IdleMemory):
    """Lend host memory to arrays, and reuse it as soon as no array refers to it.

    A training step allocates the same sizes again and again.  Every view of an array from `take`
    keeps that array alive; when the last of them is gone its memory becomes idle.  `in_use` bytes
    are lent now, and `peak` is the most since `reset_peak`.
    """

    granularity = GRANULARITY_BYTES

    def __init__(self) -> None:
        super().__init__()
        self._leases: dict[int, Lease] = {}    # kept here: a weak reference must outlive its array
        self.in_use = self.peak = self._spare = 0

    @property
    def reserved(self) -> int:
        """Bytes in use, idle, and lost by rounding sizes up."""
        return self.bytes + self.in_use + self._spare

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Allocate an uninitialised C-ordered array of `shape` and `dtype`.

        Raises MemoryError when there is no memory for it, or none could be addressed.
        """
        # A step takes hundreds of small arrays: a method called here, or in `_keep`, is felt.
        length, unit = math.prod(shape) * dtype.itemsize, self.granularity
        if length > LARGEST_BYTES:
            raise MemoryError(f"an array of {length} bytes is larger than any memory")
        wanted, size = -(-length // unit) * unit or unit, size_class(length, unit)
        pieces = self._pieces[size]
        if pieces:
            storage = pieces.pop()[1]
            self.bytes -= size
        else:
            storage = self._allocate(size)
        array = np.ndarray(shape, dtype, storage)
        lease = Lease(array, self._keep)
        lease.key, lease.size, lease.item = id(array), wanted, (size, storage)
        self._leases[lease.key] = lease
        self._spare += size - wanted
        self.in_use += wanted
        if self.in_use > self.peak:
            self.peak = self.in_use
        if self.in_use > self._most or self._count >= self._window:
            self.note_in_use(self.in_use)
        if self.bytes > self.bound:
            self.take_surplus()
        return array

    def _keep(self, lease: Lease) -> None:
        """Keep the memory of an array that is gone with all of its views.

        That can be at any moment, also during `take`: so it adds no size to the idle memory.
        """
        del self._leases[lease.key]
        size, storage = lease.item
        self._spare -= size - lease.size
        self.in_use -= lease.size
        self._count += 1
        self._pieces[size].append((self._count, storage))
        self.bytes += size

    def _allocate(self, size: int) -> ctypes.Array:
        """Allocate `size` bytes.

        They are no NumPy array, because that would become the base of every view, in place of the
        array that has the lease.
        """
        if size < MIN_MAPPED_BYTES:
            return (ctypes.c_char * size).from_buffer(np.empty(size, np.uint8))
        try:
            memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no memory for an array of {size} bytes: {error}") from error
        if size >= MIN_HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            # Advice only: a kernel without large pages refuses it, and the memory is as good.
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        return (ctypes.c_char * size).from_buffer(memory)

    def lend(self, array: np.ndarray, size: int, give_back: Callable[[Any], None], item: Any,
             kind: type[Lease] = Lease) -> Lease:
        """Begin a lease: call ``give_back(item)`` when `array` and its views are gone.

        Until then `size` bytes count as in use.
        """
        lease = kind(array, self._end_lease)
        lease.key, lease.size, lease.give_back, lease.item = id(array), size, give_back, item
        self._leases[lease.key] = lease
        self.in_use += size
        if self.in_use > self.peak:
            self.peak = self.in_use
        return lease

    def _end_lease(self, lease: Lease) -> None:
        """Give back the memory of an array that is gone with all of its views."""
        del self._leases[lease.key]
        self.in_use -= lease.size
        lease.give_back(lease.item)

    def lease_of(self, a: np.ndarray) -> Lease | None:
        """Return the lease of `a`, or of the array that it is a view of; None without one."""
        return self._leases.get(id(a.base if type(a.base) is np.ndarray else a))

    def reset_peak(self) -> None:
        """Set `peak` to the bytes in use now."""
        self.peak = self.in_use


class DryPool(Pool):
    """Count memory as a `Pool` does, without allocating it.

    The unit of memory is `granularity` bytes; `on_take` is called after each `take`.  Of the bytes
    in use, `saved` are of arrays that `count_saved` was given.
    """

    _byte = ctypes.c_char()

    def __init__(self, granularity: int, on_take: Callable[[], None]) -> None:
        super().__init__()
        self.granularity, self._on_take, self.saved = granularity, on_take, 0
        self._saved: dict[int, int] = {}    # bytes that are counted, by the key of a lease

    def count_saved(self, array: np.ndarray) -> None:
        """Count the memory of an array of this pool, or of a view of one, until it is gone."""
        lease = self.lease_of(array)
        if lease and lease.key not in self._saved:
            self._saved[lease.key] = lease.size
            self.saved += lease.size

    def leave_out(self) -> None:
        """Count no array that is in use now, whatever `count_saved` is given."""
        self._saved = dict.fromkeys(self._leases, 0)

    def _keep(self, lease: Lease) -> None:
        super()._keep(lease)
        self.saved -= self._saved.pop(lease.key, 0)

    def _allocate(self, size: int) -> ctypes.Array:
        """Return `size` bytes that must not be accessed, at the address of a single byte."""
        return (ctypes.c_char * size).from_address(ctypes.addressof(self._byte))

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        array = super().take(shape, dtype)
        self._on_take()
        return array
