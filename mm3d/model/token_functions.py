"""Compute lookups in a table, sums by token, and softmax statistics, on one rank's arrays.

Tokens are integers in host memory, which every rank knows; so the order of all sums is planned on
the host, and is the same on a processor and on a device: nothing is added atomically.  Numbers of
16 bits are summed in float32.
"""

import math
from typing import Iterator

import numpy as np

from mm3d.arrays.backend import Array, accumulation_dtype, backend_of, namespace
from mm3d.arrays.elementwise import row_blocks
from mm3d.model.functional import prefer_backend_kernel, upcast


def look_up_rows(table: Array, ids: np.ndarray, first: int, out: Array) -> Array:
    """Copy rows of a table to the rows of `out`; rows that are not in this block become zero.

    The table, (rows, features), is the block that begins with the row numbered `first`; `ids` are
    global numbers of rows, one for each row of `out`, (ids, features).
    """
    library, held = backend_of(out), rows_held(ids, first, table.shape[0])
    if len(held) == len(ids):
        library.take_rows(table, ids - first, out)
        return out
    out[...] = 0
    if len(held):
        found = library.empty((len(held), out.shape[1]), out.dtype)
        library.put_rows(out, held, library.take_rows(table, ids[held] - first, found))
    return out


def rows_held(ids: np.ndarray, first: int, count: int) -> np.ndarray:
    """Return the places in `ids` of the `count` numbers from `first` on."""
    return np.flatnonzero((ids >= first) & (ids < first + count))


def add_rows_by_id(rows: Array, ids: np.ndarray, first: int, out: Array) -> Array:
    """Add to each row of a table all `rows` with its number: the backward of `look_up_rows`.

    Rows of one number are summed in pairs, pairs of pairs and so on, in their order.  Parameters
    are as there; `out`, the block of the table, begins with the row `first`.
    """
    library, xp = backend_of(rows), namespace(rows)
    held = rows_held(ids, first, out.shape[0])
    if not len(held):
        return out
    places = held[np.argsort(ids[held], kind="stable")]
    numbers = ids[places] - first
    for pairs, places, numbers in _pairings(numbers, places):
        left, right, single = pairs
        total = library.empty((len(left) + len(single), rows.shape[1]), accumulation_dtype(out))
        summed, rest = total[:len(left), :], total[len(left):, :]
        _take(library, rows, left, summed)
        summed += _take(library, rows, right, library.empty(summed.shape, summed.dtype))
        if len(single):
            _take(library, rows, single, rest)
        rows = total
    total = library.take_rows(out, numbers, library.empty((len(numbers), rows.shape[1]),
                                                          out.dtype))
    total += xp.astype(_take(library, rows, places, library.empty(
        total.shape, accumulation_dtype(out))), out.dtype, copy=False)
    library.put_rows(out, numbers, total)
    return out


def _take(library, rows: Array, places: np.ndarray, out: Array) -> Array:
    """Copy the rows at `places` to `out`, in the type of `out`."""
    if rows.dtype == out.dtype:
        return library.take_rows(rows, places, out)
    found = library.take_rows(rows, places, library.empty(out.shape, rows.dtype))
    out[...] = library.xp.astype(found, out.dtype)
    return out


def _pairings(numbers: np.ndarray,
              places: np.ndarray) -> Iterator[tuple[tuple[np.ndarray, ...], np.ndarray,
                                                    np.ndarray]]:
    """Plan the sums of rows of equal number: in each round neighbours are added, two by two.

    `numbers` is in ascending order, and `places` says where each row is.  Yields for each round
    the places of the left and the right rows of all pairs and of rows without a partner; and the
    places and numbers after the round, in which the sums of the pairs come first.
    """
    while len(numbers) and (numbers[1:] == numbers[:-1]).any():
        begins = np.flatnonzero(np.concatenate(([True], numbers[1:] != numbers[:-1])))
        lengths = np.diff(np.append(begins, len(numbers)))
        within = np.arange(len(numbers)) - np.repeat(begins, lengths)
        even = within % 2 == 0
        paired = even & (within + 1 < np.repeat(lengths, lengths))
        left = np.flatnonzero(paired)
        single = np.flatnonzero(even & ~paired)
        after = np.empty(len(numbers), np.int64)
        after[left] = np.arange(len(left))
        after[single] = len(left) + np.arange(len(single))
        pairs = places[left], places[left + 1], places[single]
        places, numbers = after[even], numbers[even]
        yield pairs, places, numbers


@prefer_backend_kernel
def softmax_statistics(logits: Array, sums: bool) -> Array:
    """Compute each row's maximum, its sum of exponentials, and with `sums` its sum of logits.

    The logits are (rows, columns), a block of the columns; exp(x - m) takes the place of x, for
    `softmax_gradient`, so that no exponential is computed twice.  Label smoothing needs the sum of
    logits.

    The result, (rows, 4) in float32 at least, has the maximum m, the sum of exp(x - m), 0, and the
    sum of x or 0.  A block without columns has the maximum -inf.
    """
    library, xp = backend_of(logits), namespace(logits)
    out = library.empty((logits.shape[0], 4), accumulation_dtype(logits))
    out[...] = 0
    if not logits.shape[1]:
        out[:, 0] = -math.inf
        return out
    for x, s in row_blocks(library, logits, out):
        u = upcast(x)
        top = xp.max(u, axis=-1, keepdims=True)
        if sums:
            s[:, 3:4] = xp.sum(u, axis=-1, keepdims=True)
        u = xp.exp(u - top)
        s[:, 0:1] = top
        s[:, 1:2] = xp.sum(u, axis=-1, keepdims=True)
        x[...] = xp.astype(u, x.dtype, copy=False)
    return out


def merge_statistics(parts: Array) -> Array:
    """Merge the statistics of blocks of columns, (blocks, rows, 4), in the order of the blocks.

    The result, (rows, 4), has the largest maximum m; the sum of exp(x - m); and the sums of the
    last two numbers.
    """
    xp, library = namespace(parts), backend_of(parts)
    out = library.empty(parts.shape[1:], parts.dtype)
    out[...] = 0
    out[:, 0] = xp.max(parts[:, :, 0], axis=0)
    for n in range(parts.shape[0]):
        part = parts[n, :, :]
        out[:, 1] += part[:, 1] * xp.exp(part[:, 0] - out[:, 0])
        out[:, 2:] += part[:, 2:]
    return out


@prefer_backend_kernel
def softmax_gradient(exponentials: Array, scale: Array, shift: Array | None, out: Array) -> Array:
    """Compute scale * exponentials - shift, with one number of each for a row.

    The exponentials, (rows, columns), are from `softmax_statistics`; `scale` and `shift`, which
    may be None, are (rows, 1), in float32 at least; `out` receives the result, and may be the
    exponentials.
    """
    library, xp = backend_of(exponentials), namespace(exponentials)
    shifts = () if shift is None else (shift,)
    for u, a, y, *less in row_blocks(library, exponentials, scale, out, *shifts):
        u = xp.astype(u, a.dtype, copy=False) * a
        for b in less:
            u -= b
        y[...] = xp.astype(u, y.dtype, copy=False)
    return out
