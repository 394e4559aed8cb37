"""Draw random numbers that are the same on every grid."""

import hashlib
from typing import Iterator

import numpy as np

# The array is cut into blocks of so many rows at most and so many elements.  Smaller ones would
# spend more time on starting streams than on drawing; of larger ones a rank would draw more
# that lies outside its part.
ROWS, ELEMENTS = 32, 1024


def normal(seed: int, name: str, shape: tuple[int, ...], place: tuple[slice, ...]) -> np.ndarray:
    """Draw a part of a global array of independent N(0, 1) numbers, in float64.

    The array, its last dimension being a row, is cut into blocks of `ROWS` rows and some columns.
    Each has a random stream of its own: Philox (Salmon, Moraes, Dror and Shaw, SC 2011), keyed by
    seed and name, counted from the block's two numbers.  A rank draws the blocks that its part
    touches and no others, and all grids see the same array.

    Parameters
    ----------
    seed, name : int, str
        What the array depends on.
    shape : tuple of int
        Of the global array, one dimension or more.
    place : tuple of slice
        The part wanted.

    Returns
    -------
    ndarray
        Of the part's shape.
    """
    out = np.empty([s.stop - s.start for s in place])
    if not out.size:
        return out
    leading = np.ix_(*(np.arange(s.start, s.stop) for s in (slice(0, 1), *place[:-1])))
    rows = np.ravel_multi_index(leading, (1, *shape[:-1])).ravel()
    flat, columns = out.reshape(len(rows), -1), place[-1]
    total, length = int(np.prod(shape[:-1])), shape[-1]
    deep = min(ROWS, total)
    wide = ELEMENTS // deep
    streams = _Streams(seed, name)
    for start, stop, part, within in _cut(rows, deep):
        for left in range(columns.start // wide * wide, columns.stop, wide):
            right = min(left + wide, length)
            block = streams.normal(start // deep, left // wide, min(stop, total) - start,
                                   right - left)
            first, last = max(left, columns.start), min(right, columns.stop)
            flat[part, first - columns.start:last - columns.start] = \
                block[within, first - left:last - left]
    return out


def _cut(rows: np.ndarray, deep: int) -> Iterator[tuple[int, int, slice, slice | np.ndarray]]:
    """The blocks of `deep` rows that some of `rows`, in rising order, are in.

    Where each begins and ends, which of `rows` it has, and which of its own rows these are.
    """
    for number in np.unique(rows // deep).tolist():
        start, stop = number * deep, (number + 1) * deep
        first, last = np.searchsorted(rows, (start, stop)).tolist()
        within = rows[first:last] - start
        if within[-1] - within[0] + 1 == len(within):    # a slice is copied faster
            within = slice(within[0], within[-1] + 1)
        yield start, stop, slice(first, last), within


class _Streams:
    """The random streams of the blocks of one array."""

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
        self._bits = np.random.Philox(key=np.frombuffer(digest, np.uint64), counter=0)
        self._generator = np.random.Generator(self._bits)
        self._state = self._bits.state    # of a stream's beginning; to set it costs 3 us,
        self._counter = self._state["state"]["counter"]    # a new Philox 20

    def normal(self, down: int, across: int, rows: int, columns: int) -> np.ndarray:
        """The numbers of the block `down` and `across`, rows x columns of them."""
        self._counter[2:] = down, across
        self._bits.state = self._state
        return self._generator.standard_normal((rows, columns))
