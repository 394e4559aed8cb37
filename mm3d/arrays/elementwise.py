"""Give the model's functions and their faster kernels what both use: views, and GELU's constants.

Elementwise work goes through its arrays in views that stay in cache.
"""

import itertools
import math
from types import ModuleType
from typing import Any, Iterator

import numpy as np

from mm3d.arrays.backend import Array, reshape

# GELU in its tanh form is x/2 (1 + tanh(GELU_SCALE (x + GELU_CUBIC x^3))).
GELU_SCALE = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715


def as_rows(a: Array) -> Array:
    """View an array as a matrix, with rows along its last dimension; any length may be 0."""
    return reshape(a, (math.prod(a.shape[:-1]), a.shape[-1]))


def row_blocks(library: Any, *arrays: Array,
               block: int | None = None) -> Iterator[tuple[Array, ...]]:
    """Iterate over matching views of a few rows of each array; the last dimension is a row.

    All arrays are of the backend `library`, with the same leading dimensions.  A view of the first
    one has about `block` elements, by default the library's `block`.
    """
    first = arrays[0]
    if len(first.shape) > 2 and not all(map(library.is_contiguous, arrays)):
        for index in library.alike(first.shape[0]):
            yield from row_blocks(library, *(a[index, ...] for a in arrays), block=block)
        return
    flat = arrays if len(first.shape) == 2 else tuple(map(as_rows, arrays))
    rows = flat[0].shape[0]
    step = max(1, (block or library.block) // max(1, first.shape[-1]))
    for some in _spans(library, rows, step):
        yield flat if some.stop - some.start == rows else tuple([a[some, :] for a in flat])


def pieces(library: Any, *arrays: Array, block: int | None = None) -> Iterator[tuple[Array, ...]]:
    """Iterate over matching views of about `block` elements of arrays of the same shape.

    Contiguous arrays are passed as one-dimensional views, whatever their shape; views of others
    drop the leading dimensions along which they have one index.  Parameters as in `row_blocks`.
    """
    xp, block = library.xp, block or library.block
    if all(library.is_contiguous(a) for a in arrays):
        arrays = tuple(xp.reshape(a, (-1,)) for a in arrays)
    first = arrays[0]
    row = math.prod(first.shape[1:])
    if row > block:
        for index in library.alike(first.shape[0]):
            yield from pieces(library, *(a[index, ...] for a in arrays), block=block)
        return
    for some in _spans(library, first.shape[0], block // max(1, row)):
        yield tuple(a[some, ...] for a in arrays)


def head_blocks(library: Any, q: Array, k: Array,
                rows: int | None = None) -> Iterator[tuple[int, slice]]:
    """Iterate over sequences and groups of heads whose scores have about 8 blocks of elements.

    Yields the index of a sequence and a slice of its heads.  `q` and `k` are (batch, positions,
    heads, d); scores of `rows` queries, by default all, are computed at once.
    """
    batch, queries, heads, _ = q.shape
    step = max(1, 8 * library.block // max(1, (rows or queries) * k.shape[1]))
    for b in library.alike(batch):
        for some in _spans(library, heads, step):
            yield b, some


def _spans(library: Any, length: int, step: int) -> Iterator[slice]:
    """Divide a length into slices of `step`, and one of what is left; call `between_blocks`."""
    whole, left = divmod(length, step)
    for place in itertools.chain(library.alike(whole), [whole] * (left > 0)):
        yield slice(place * step, min((place + 1) * step, length))
        if library.between_blocks is not None:
            library.between_blocks()


def by_head(xp: ModuleType | Any, a: Array) -> Array:
    """Transpose (positions, heads, d) to (heads, positions, d)."""
    return a.transpose(1, 0, 2) if type(a) is np.ndarray else xp.permute_dims(a, (1, 0, 2))
