"""Divide lengths into contiguous blocks, and find the blocks in arrays."""

import itertools
from typing import Iterator, Sequence


def block_lengths(extent: int, parts: int, unit: int = 1) -> Sequence[int]:
    """Return the lengths of `parts` contiguous blocks of `extent` elements.

    Blocks consist of whole units of `unit` elements.  If the units do not divide evenly, each of
    the first blocks has one unit more.  Raises ValueError when `extent` is no multiple of `unit`.
    """
    share, more = divmod(_whole_units(extent, unit), parts)
    if parts > 4096:    # a list of a million takes milliseconds
        return Lengths(extent, parts, unit)
    return [(share + 1) * unit] * more + [share * unit] * (parts - more)


def block_bounds(extent: int, parts: int, part: int, unit: int = 1) -> tuple[int, int]:
    """Return start and length of the block numbered `part`; of an array of numbers, arrays."""
    share, more = divmod(extent if unit == 1 else _whole_units(extent, unit), parts)
    longer = part < more
    longer_before = more + longer * (part - more)    # min(part, more), also of arrays
    return (share * part + longer_before) * unit, (share + longer) * unit


def block_starts(lengths: list[int]) -> list[int]:
    """Return the start of each of consecutive blocks."""
    return [0, *itertools.accumulate(lengths[:-1])]


def block_indices(ndim: int, dim: int, counts: list[int]) -> Iterator[tuple]:
    """Iterate over the blocks along `dim`: the index of each in an array of `ndim` dimensions."""
    stops = list(itertools.accumulate(counts))
    for count, stop in zip(counts, stops):
        yield (slice(None),) * (dim % ndim) + (slice(stop - count, stop), Ellipsis)


def resized_shape(shape: tuple[int, ...], dim: int, length: int) -> tuple[int, ...]:
    """Return `shape` with `length` in dimension `dim`."""
    dim %= len(shape)
    return tuple(shape[:dim]) + (length,) + tuple(shape[dim + 1:])


def total_length(lengths: Sequence[int]) -> int:
    """Return the sum of the lengths of blocks."""
    return lengths.total if isinstance(lengths, Lengths) else sum(lengths)


class Lengths(Sequence[int]):
    """Stand in for a long list of `block_lengths`, and compute each when it is asked for."""

    def __init__(self, extent: int, parts: int, unit: int) -> None:
        self.total, self._numbers, self._unit = extent, range(parts), unit

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, part: int | slice) -> int | list[int]:
        if isinstance(part, slice):
            return [self[one] for one in self._numbers[part]]
        return block_bounds(self.total, len(self), self._numbers[part], self._unit)[1]


def _whole_units(extent: int, unit: int) -> int:
    """Return how many units a length has; ValueError where it is no multiple of the unit."""
    units, rest = divmod(extent, unit)
    if rest:
        raise ValueError(f"a length of {extent} cannot be divided into units of {unit}: "
                         f"{unit * max(1, units)} or {unit * (units + 1)} would do")
    return units
