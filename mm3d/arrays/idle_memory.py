"""Keep memory that is not in use, to use it again, up to a bound.

A first touch of new memory costs several times a reuse, so memory that is given back is kept.
Two rules bound the amount.  Sizes are rounded up to classes, eight between a power of two and the
next, so that arrays of nearly the same size use the same memory.  And when more memory is idle
than `IdleMemory.bound` allows, the pieces that have been idle longest go back to the system.
"""

from typing import Any

GRANULARITY_BYTES = 4096
CLASS_BITS = 3               # after the leading one of a size in units: 8 classes per power of two
MIN_BOUND_BYTES = 1 << 24    # that may always be idle
WINDOW_PIECES = 4096         # pieces given back in a window; its most bytes in use are kept


def size_class(length: int, granularity: int = GRANULARITY_BYTES) -> int:
    """Return the bytes to allocate for `length` bytes.

    Up to 16 units of `granularity` bytes it is the next multiple of a unit, at least one; beyond,
    less than an eighth larger than that.
    """
    units = int(-(-length // granularity)) or 1
    step = 1 << max(0, units.bit_length() - 1 - CLASS_BITS)
    return -(-units // step) * step * granularity


class IdleMemory:
    """Hold pieces of memory that are not in use, by their size.

    Its state depends on the order of the calls alone: where ranks make the same calls, they keep
    and release the same pieces.

    Attributes
    ----------
    bytes : int
        The size of all pieces together.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, list[tuple[int, Any]]] = {}    # each with the number of its `put`
        self.bytes = self._count = self._most = self._before = 0
        self._window = WINDOW_PIECES    # the number of the `put` at which the next window begins

    def put(self, size: int, piece: Any) -> None:
        """Keep a piece that is no longer in use."""
        self._count += 1
        self._pieces.setdefault(size, []).append((self._count, piece))
        self.bytes += size

    def get(self, size: int) -> tuple[int, Any] | None:
        """Take the piece of that size that was put last, with its number; None without one."""
        try:
            found = self._pieces[size].pop()
        except (KeyError, IndexError):
            return None
        self.bytes -= size
        return found

    def undo_get(self, size: int, found: tuple[int, Any]) -> None:
        """Undo the last `get` of that size, which returned `found`."""
        self._pieces[size].append(found)
        self.bytes += size

    def note_in_use(self, in_use: int) -> None:
        """Record the bytes that are in use now, from which the bound follows."""
        if in_use > self._most:
            self._most = in_use
        if self._count >= self._window:
            self._window = self._count + WINDOW_PIECES
            self._before, self._most = self._most, in_use

    @property
    def bound(self) -> int:
        """Bytes that may be idle: twice the most recently in use, or `MIN_BOUND_BYTES`.

        The most is taken over the last one to two windows of `WINDOW_PIECES` pieces given back.
        Twice, because a step uses memory of different sizes at different times, and would lose
        some of it each time.
        """
        return max(MIN_BOUND_BYTES, 2 * self._most, 2 * self._before)

    def take_surplus(self) -> list[Any]:
        """Remove and return the pieces over the bound: those that have been idle longest."""
        found: list[Any] = []
        if self.bytes <= MIN_BOUND_BYTES:
            return found
        while self.bytes > self.bound:
            size = min((size for size, pieces in self._pieces.items() if pieces),
                       key=lambda size: self._pieces[size][0][0])
            found.append(self._pieces[size].pop(0)[1])
            self.bytes -= size
        return found

    def clear(self) -> None:
        """Remove all pieces."""
        self._pieces.clear()
        self.bytes = 0
