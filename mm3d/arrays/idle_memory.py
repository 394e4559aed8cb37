"""Memory that nobody uses: kept to be used again, up to a bound.

A first touch of fresh memory costs several times a reuse of it, so what is given back is kept.
Two rules bound how much that is.  Sizes are rounded up to classes, eight between a power of two
and the next, so that arrays of nearly the same size use the same memory.  And what has lain idle
longest goes back to the system when more lies idle than `Idle.bound` allows.
"""

from typing import Any

GRANULARITY = 4096
BITS = 3           # of a size, in units, after its leading one
FLOOR = 1 << 24    # bytes that may always lie idle
WINDOW = 4096      # pieces given back, over which the most bytes in use are remembered


def size_class(length: int, granularity: int = GRANULARITY) -> int:
    """The size of memory that is taken for `length` bytes.

    Up to 16 units it is the next multiple of a granularity, at least one; beyond, less than an
    eighth larger than that.
    """
    units = int(-(-length // granularity)) or 1
    step = 1 << max(0, units.bit_length() - 1 - BITS)
    return -(-units // step) * step * granularity


class Idle:
    """Pieces of memory that nobody uses, by their size.

    What it does follows from the order of the calls alone: where ranks make the same calls, the
    same pieces go.

    Attributes
    ----------
    bytes : int
        Of all pieces.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, list[tuple[int, Any]]] = {}    # the number of the giving back
        self.bytes = self._count = self._most = self._before = 0
        self._window = WINDOW    # the number at which the next begins

    def put(self, size: int, piece: Any) -> None:
        """Keep a piece that nobody uses any longer."""
        self._count += 1
        self._pieces.setdefault(size, []).append((self._count, piece))
        self.bytes += size

    def get(self, size: int) -> tuple[int, Any] | None:
        """The number and the piece of that size that was given back last; None without one."""
        try:
            found = self._pieces[size].pop()
        except (KeyError, IndexError):
            return None
        self.bytes -= size
        return found

    def restore(self, size: int, found: tuple[int, Any]) -> None:
        """Undo the `get` of that size which came last."""
        self._pieces[size].append(found)
        self.bytes += size

    def used(self, in_use: int) -> None:
        """Take note of how many bytes are in use."""
        if in_use > self._most:
            self._most = in_use
        if self._count >= self._window:
            self._window = self._count + WINDOW
            self._before, self._most = self._most, in_use

    @property
    def bound(self) -> int:
        """Bytes that may lie idle: twice what was in use at one time of late, or `FLOOR`.

        Of late is: since between one and two times `WINDOW` pieces were given back.  Once is too
        little: a step uses memory of each size at another time, and would lose some each time.
        """
        return max(FLOOR, 2 * self._most, 2 * self._before)

    def surplus(self) -> list[Any]:
        """What is over the bound, no longer kept: the pieces that have lain idle longest."""
        found: list[Any] = []
        if self.bytes <= FLOOR:
            return found
        while self.bytes > self.bound:
            size = min((size for size, pieces in self._pieces.items() if pieces),
                       key=lambda size: self._pieces[size][0][0])
            found.append(self._pieces[size].pop(0)[1])
            self.bytes -= size
        return found

    def clear(self) -> None:
        """Keep nothing."""
        self._pieces.clear()
        self.bytes = 0
