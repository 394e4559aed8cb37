"""Define the data types of closed forms: product shapes, collectives, and local products.

A scheme states how many words one product moves and which matrices it multiplies
(`mm3d.schemes.scheme.Scheme`), so that costs and plans need no rank and no array.
"""

import math
from typing import Iterator, NamedTuple

# The collectives that replace others where the first rank of a direction holds whole blocks.
ON_FACES = {"all_gather": "broadcast", "reduce_scatter": "reduce"}


class Move(NamedTuple):
    """Describe a collective: its direction, its kind, and the words that all ranks move together.

    Words are counted as by `mm3d.grid.axis.Traffic`.  Each rank calls the collective `calls`
    times in the step or product.
    """

    axis: str
    collective: str
    words: int
    calls: int = 1


class ProductShape(NamedTuple):
    """Describe the global shape of the product C = A B of a linear layer."""

    way: str    # {"up", "down"}: from the outer space of activations into the inner one, or back
    M: int    # A is M x N, B is N x K and C is M x K
    N: int
    K: int
    # Numbers of columns of A and of C that stay together, such as an attention head's.
    units: tuple[int, int] = (1, 1)

    @property
    def extents(self) -> tuple[int, int, int]:
        """Return M, N and K."""
        return self.M, self.N, self.K

    def largest_blocks(self, rows: int, inner: int, columns: int) -> tuple[int, int, int]:
        """Return the largest blocks of M, N and K, divided into the given numbers of parts."""
        return (largest_block(self.M, rows), largest_block(self.N, inner, self.units[0]),
                largest_block(self.K, columns, self.units[1]))


class LocalProduct(NamedTuple):
    """Describe `count` equal matrix products of one rank, (rows x inner) (inner x columns)."""

    rows: int
    inner: int
    columns: int
    count: int = 1


def largest_block(extent: int, parts: int, unit: int = 1) -> int:
    """Return the length of the first block of `extent` elements divided into `parts` blocks.

    Units stay together, as in `mm3d.arrays.blocks.block_lengths`.
    """
    return -(-(extent // unit) // parts) * unit


def factorizations(ranks: int, count: int) -> Iterator[tuple[int, ...]]:
    """Iterate over all tuples of `count` sizes whose product is `ranks`, in ascending order."""
    if count < 2:
        if count or ranks == 1:
            yield (ranks,) * count
        return
    divisors = [d for d in range(1, math.isqrt(ranks) + 1) if ranks % d == 0]
    for first in sorted({*divisors, *(ranks // d for d in divisors)}):
        for others in factorizations(ranks // first, count - 1):
            yield first, *others
