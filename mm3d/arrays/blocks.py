"""Divide lengths into blocks: over ranks, and into pieces that stay in cache."""

import itertools
import math
from types import ModuleType
from typing import Any, Iterator


Array = Any


def blocks(extent: int, parts: int, unit: int = 1) -> list[int]:
    """Lengths of the `parts` contiguous blocks of `extent` elements.

    Whole units of `unit` elements are dealt, the first blocks getting one more where they do
    not come out even; `extent` must be a multiple of `unit`.
    """
    units, rest = divmod(extent, unit)
    if rest:
        raise ValueError(f"a length of {extent} cannot be dealt in units of {unit}: "
                         f"{unit * max(1, units)} or {unit * (units + 1)} would do")
    share, more = divmod(units, parts)
    return [(share + (part < more)) * unit for part in range(parts)]


GELU_SCALE = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715


def row_blocks(library: Any, *arrays: Array,
               block: int | None = None) -> Iterator[tuple[Array, ...]]:
    """Matching views of a few rows of each array, the last dimension being a row.

    Parameters
    ----------
    library : Backend
        Whose arrays they are.
    *arrays : Array
        All with the same leading dimensions.
    block : int, optional
        About how many elements a view of the first has; the library's `block` if not given.
    """
    first, xp = arrays[0], library.xp
    if len(first.shape) > 2 and not all(library.is_contiguous(a) for a in arrays):
        for index in range(first.shape[0]):
            yield from row_blocks(library, *(a[index, ...] for a in arrays), block=block)
        return
    rows = math.prod(first.shape[:-1])
    flat = [a if len(a.shape) == 2 else xp.reshape(a, (rows, a.shape[-1])) for a in arrays]
    step = max(1, (block or library.block) // max(1, first.shape[-1]))
    for start in range(0, rows, step):
        yield tuple(a[start:min(start + step, rows), :] for a in flat)


def head_blocks(library: Any, q: Array, k: Array) -> Iterator[tuple[int, slice]]:
    """A sequence and some of its heads, whose scores are about 8 blocks in size."""
    batch, queries, heads, _ = q.shape
    step = max(1, 8 * library.block // max(1, queries * k.shape[1]))
    for b in range(batch):
        for start in range(0, heads, step):
            yield b, slice(start, min(start + step, heads))


def by_head(xp: ModuleType | Any, a: Array) -> Array:
    """(positions, heads, d) as (heads, positions, d)."""
    return xp.permute_dims(a, (1, 0, 2))


def resized(shape: tuple[int, ...], dim: int, length: int) -> tuple[int, ...]:
    """`shape` with dimension `dim` made `length` long."""
    dim %= len(shape)
    return tuple(shape[:dim]) + (length,) + tuple(shape[dim + 1:])


def block_indices(ndim: int, dim: int, counts: list[int]) -> Iterator[tuple]:
    """For each block along `dim`, what to index an array of `ndim` dimensions with."""
    stops = list(itertools.accumulate(counts))
    for count, stop in zip(counts, stops):
        yield (slice(None),) * (dim % ndim) + (slice(stop - count, stop), Ellipsis)


def _offsets(lengths: list[int]) -> list[int]:
    """Where each block starts when they lie one after another."""
    return [0, *itertools.accumulate(lengths[:-1])]
