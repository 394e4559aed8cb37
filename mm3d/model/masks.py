"""Draw the masks of dropout, which are the same on every grid.

Whether an element of an activation is kept depends on the seed, the step of training, the name of
the layer and the element's global position (sequence of the batch, position, feature) alone.  So
every scheme, grid, micro-batch, stage and replica sees a part of one global mask, and backward and
recomputation draw again what forward has drawn: no mask is stored.
"""

import hashlib

import numpy as np

from mm3d.arrays.plain_numbers import is_number

BITS = 16             # a probability is rounded to a multiple of 2^-16
BLOCK_FEATURES = 64   # features of a block of one stream
_WORDS = BLOCK_FEATURES * BITS // 64
_COUNTS = _WORDS // 4    # Philox makes four words of 64 bits for each count


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
