"""Draw the initial values of a model, and other random numbers, the same on every grid."""

import math
import sys
from typing import Callable, Iterator

import numpy as np

from mm3d.arrays.backend import host_dtype
from mm3d.arrays.plain_numbers import plain_number
from mm3d.model.masks import keyed_philox
from mm3d.model.parameters import Parameter

# Mean and 1 / standard deviation of a parameter by its name and shape; infinity for no deviation.
InitialValues = Callable[[str, tuple[int, ...]], tuple[float, float]]

# The most rows of a block, and its number of elements.  With smaller blocks, starting the random
# streams would take longer than drawing; with larger ones, a rank would draw more numbers outside
# its part.
BLOCK_ROWS, BLOCK_ELEMENTS = 32, 1024


def varied_values(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return mean and 1 / deviation for a model whose results depend on every parameter.

    Weights have the variance 1 / fan-in, biases and the norms' weights the deviation 0.1.
    """
    weight = name.endswith(".weight")
    if weight and len(shape) > 1:
        # A router's weight, (experts, hidden), is stored by experts, like their own weights; those
        # of a shared expert, but its gate's, are those of linear layers.
        linear = name.endswith(("shared.up.weight", "shared.down.weight"))
        return 0, math.sqrt(shape[1] if ".experts." in name and not linear else shape[0])
    if name.endswith("router.bias"):
        return 0, math.inf    # no gradient changes it
    return float(weight), 10


def gpt2_values(layers: int) -> InitialValues:
    """Return the initial values of GPT-2 (Radford et al. 2019) with `layers` layers.

    Weights and token embeddings have the deviation 0.02, position embeddings 0.01.  In each layer
    the weights of the products that end in the residual stream are divided by sqrt(2 layers).
    Norms begin with the weight 1, biases with 0.
    """
    into_stream = ("attention.proj.weight", "mlp.down.weight", "experts.down.weight",
                   "experts.shared.down.weight")

    def values(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        if len(shape) == 1 or name.endswith(".bias"):
            return float(name.endswith(".weight")), math.inf
        if name.endswith(into_stream):
            return 0, 50 * math.sqrt(2 * layers)
        return 0, 100 if name == "positions.weight" else 50
    return values


def draw_parameter(p: Parameter, seed: int, values: InitialValues) -> None:
    """Draw this rank's block of the initial values of a parameter."""
    mean, divisor = map(plain_number, values(p.name, p.shape))
    place = p.layout.slices(p.grid, p.shape)
    if math.isinf(divisor):
        p.master[...] = mean
    else:
        p.master[...] = p.grid.backend.from_host(
            tuple(p.master.shape), host_dtype(p.master),
            lambda: draw_normal(seed, p.name, p.shape, place) / divisor)
        if mean:
            p.master += mean
    p.refresh()


def draw_normal(seed: int, name: str, shape: tuple[int, ...],
                place: tuple[slice, ...]) -> np.ndarray:
    """Draw a part of a global array of independent N(0, 1) numbers, in float64.

    All dimensions but the last are taken as rows.  The array is divided into blocks of
    `BLOCK_ROWS` rows and some columns, each with a random stream of its own: Philox with seed and
    name as the key and the block's row and column as the start of the counter.  A rank draws only
    the blocks that overlap its part, and all grids see the same array.

    `seed` is that of the model, and another `name` gives other numbers; `shape` is global, of at
    least one dimension; `place` has one slice with start and stop for each, whose lengths are the
    shape of the result.
    """
    lengths = [s.stop - s.start for s in place]
    if math.prod(lengths) > sys.maxsize // 8:    # NumPy says ValueError
        raise MemoryError(f"an array of {lengths} numbers is larger than any memory")
    out = np.empty(lengths)
    if not out.size:
        return out
    leading = np.ix_(*(np.arange(s.start, s.stop) for s in (slice(0, 1), *place[:-1])))
    rows = np.ravel_multi_index(leading, (1, *shape[:-1])).ravel()
    flat, columns = out.reshape(len(rows), -1), place[-1]
    total, length = int(np.prod(shape[:-1])), shape[-1]
    height = min(BLOCK_ROWS, total)
    width = BLOCK_ELEMENTS // height
    streams = _Streams(seed, name)
    for start, stop, part, within in _split_rows(rows, height):
        for left in range(columns.start // width * width, columns.stop, width):
            right = min(left + width, length)
            block = streams.draw_block(start // height, left // width, min(stop, total) - start,
                                       right - left)
            first, last = max(left, columns.start), min(right, columns.stop)
            flat[part, first - columns.start:last - columns.start] = \
                block[within, first - left:last - left]
    return out


def _split_rows(rows: np.ndarray,
                height: int) -> Iterator[tuple[int, int, slice, slice | np.ndarray]]:
    """Split `rows`, numbers of rows in ascending order, by blocks of `height` rows.

    Yields for each block its first row and the row after its last, the part of `rows` inside the
    block, and the places of these rows within the block.
    """
    for number in np.unique(rows // height).tolist():
        start, stop = number * height, (number + 1) * height
        first, last = np.searchsorted(rows, (start, stop)).tolist()
        within = rows[first:last] - start
        if within[-1] - within[0] + 1 == len(within):    # a slice is copied faster
            within = slice(within[0], within[-1] + 1)
        yield start, stop, slice(first, last), within


class _Streams:
    """Hold the random streams of the blocks of one array."""

    def __init__(self, seed: int, name: str) -> None:
        self._bits = keyed_philox(f"{seed}/{name}")
        self._generator = np.random.Generator(self._bits)
        self._state = self._bits.state    # at the start of a stream
        self._counter = self._state["state"]["counter"]

    def draw_block(self, block_row: int, block_column: int, rows: int,
                   columns: int) -> np.ndarray:
        """Draw the rows x columns numbers of the block in this block row and column."""
        self._counter[2:] = block_row, block_column
        self._bits.state = self._state
        return self._generator.standard_normal((rows, columns))
