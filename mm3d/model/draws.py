"""Draw a model's initial values, other random numbers, and masks, the same on every grid.

Whether dropout keeps an element of an activation depends on the seed, the step of training, the
name of the layer and the element's global position (sequence of the batch, position, feature)
alone.  So every scheme, grid, micro-batch, stage and replica sees a part of one global mask, and
backward and recomputation draw again what forward has drawn: no mask is stored.
"""

import hashlib
import math
import sys
from typing import Callable, Iterator

import numpy as np

from mm3d.arrays.backend import host_dtype
from mm3d.arrays.plain_numbers import is_number, plain_number
from mm3d.model.parameters import Parameter

# Mean and 1 / standard deviation of a parameter by its name and shape; infinity for no deviation.
InitialValues = Callable[[str, tuple[int, ...]], tuple[float, float]]

# The most rows of a block, and its number of elements.  With smaller blocks, starting the random
# streams would take longer than drawing; with larger ones, a rank would draw more numbers outside
# its part.
BLOCK_ROWS, BLOCK_ELEMENTS = 32, 1024

# Of masks.
BITS = 16             # a probability is rounded to a multiple of 2^-16
BLOCK_FEATURES = 64   # features of a block of one stream
_WORDS = BLOCK_FEATURES * BITS // 64
_COUNTS = _WORDS // 4    # Philox makes four words of 64 bits for each count


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
    bits = keyed_philox(f"{seed}/{name}")
    generator, state = np.random.Generator(bits), bits.state    # at the start of a stream
    counter = state["state"]["counter"]
    for start, stop, part, within in _split_rows(rows, height):
        for left in range(columns.start // width * width, columns.stop, width):
            right = min(left + width, length)
            counter[2:] = start // height, left // width
            bits.state = state
            block = generator.standard_normal((min(stop, total) - start, right - left))
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


def keyed_philox(key: str) -> np.random.Philox:
    """Return the generator of Salmon, Moraes, Dror and Shaw, SC 2011, with a text as its key.

    To set its state takes 3 us, to make a new one 20 us.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    return np.random.Philox(key=np.frombuffer(digest, np.uint64), counter=0)


class MaskKey:
    """Hold the key of the masks that the layers of a model draw.

    `seed` is that of the model; `place` has the step of training, and the number of the
    activations' first sequence in the global batch.  None, at first and in validation, drops
    nothing.
    """

    def __init__(self, seed: int) -> None:
        self.seed: int = seed
        self.place: tuple[int, int] | None = None


def dropped_of_65536(probability: float) -> int:
    """Return how many of 65536 elements are dropped on average.

    Raises ValueError when it is no probability, or too near 1 to be told from it in 16 bits.
    """
    if not (is_number(probability) and 0 <= probability < 1 - 2.0 ** -BITS):
        raise ValueError(f"dropout={probability!r}: a probability of at least 0 and below "
                         f"1 - 2^-{BITS} would do")
    return round(probability * 2 ** BITS)


def draw_kept(seed: int, step: int, name: str, seq: int, place: tuple[slice, slice, slice],
              dropped: int) -> np.ndarray:
    """Draw which elements of a part of a global activation (batch, seq, features) are kept.

    Features are divided into blocks of `BLOCK_FEATURES`.  Each block has a random stream of its
    own: Philox with seed, step of training and name of the layer as the key, and the numbers of
    the block and of the token as the start of the counter.  A rank draws the tokens and the blocks
    of its part alone, a number of 16 bits for each element.

    `seq` is the global number of positions; `place` has the sequences of the global batch, the
    positions and the features of the part, with start and stop; of 65536 elements `dropped` are
    dropped on average.  The result, in the shape of the part, is True where an element is kept.
    """
    sequences, positions, features = place
    kept = np.empty(tuple(s.stop - s.start for s in place), bool)
    if not kept.size:
        return kept
    if kept.shape[1] == seq:    # the tokens of all sequences follow each other
        runs = [(sequences.start * seq, kept.reshape(-1, kept.shape[2]))]
    else:
        runs = [(number * seq + positions.start, part)
                for number, part in zip(range(sequences.start, sequences.stop), kept)]
    bits = keyed_philox(f"{seed}/{step}/{name}/dropout")
    state = bits.state
    counter = state["state"]["counter"]
    for first, part in runs:
        for block in range(features.start // BLOCK_FEATURES, -(-features.stop // BLOCK_FEATURES)):
            counter[0], counter[2] = first * _COUNTS, block
            bits.state = state
            left = block * BLOCK_FEATURES
            start, stop = max(left, features.start), min(left + BLOCK_FEATURES, features.stop)
            drawn = bits.random_raw(len(part) * _WORDS).view(np.uint16).reshape(len(part), -1)
            np.greater_equal(drawn[:, start - left:stop - left], dropped,
                             out=part[:, start - features.start:stop - features.start])
    return kept
