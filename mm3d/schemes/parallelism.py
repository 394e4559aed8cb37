"""Count the words that a scheme moves on a grid, for activations, vectors and products.

Words are those of all ranks together, as `mm3d.grid.axis.Traffic` counts them, which makes them
whole numbers on every grid, also where nothing divides; a rank's share is that sum over P, exactly
where everything does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Iterator

from mm3d.grid.shape import GridShape
from mm3d.schemes import lookup
from mm3d.schemes.closed_form import Move, ProductShape


@dataclass(frozen=True)
class SpaceForms:
    """Count words and collectives of activations in a `mm3d.grid.activations.Space`.

    Attributes
    ----------
    grid : GridShape
        The grid.
    rows, features, vector, gathered_along : str
        As in `mm3d.grid.activations.Space`.
    """

    grid: GridShape
    rows: str
    features: str
    vector: str
    gathered_along: str = ""

    @cached_property
    def row_parts(self) -> int:
        """Return the number of blocks that the rows are divided into."""
        return self.grid.ranks_along(self.rows.replace(",", ""))

    @cached_property
    def feature_parts(self) -> int:
        """Return the number of blocks that the features are divided into."""
        return self.grid.ranks_along(self.features)

    @cached_property
    def copies(self) -> int:
        """Return the number of ranks that hold the same block of an activation."""
        return self.grid.ranks // (self.row_parts * self.feature_parts)

    @cached_property
    def sequence_parts(self) -> int:
        """Return the number of blocks that the positions of a sequence are divided into."""
        return self.grid.ranks_along(self.rows.partition(",")[2])

    @cached_property
    def _vector(self) -> tuple[str, str]:
        """Return the directions that divide a vector, and the one of its diagonal."""
        divided, _, diagonal = self.vector.partition("@")
        return divided, diagonal

    def words(self, rows: int, features: int) -> int:
        """Count the words of an activation on all ranks together, copies included."""
        return self.copies * rows * features

    def fetched_words(self, n: int) -> int:
        """Count the words of a fetched vector of n words on all ranks together."""
        return n * self.grid.ranks // self.feature_parts

    def fetch(self, n: int) -> Iterator[Move]:
        """List the collectives of `mm3d.model.vectors.Vector.fetch` for a vector of n words."""
        divided, diagonal = self._vector
        if diagonal:
            d = self.grid[diagonal]
            words = (d - 1) * n * self.grid.ranks // (self.grid.ranks_along(divided) * d)
            yield Move(diagonal, "broadcast", words)
        yield from self._beyond_features("all_gather", n)

    def collect(self, n: int) -> Iterator[Move]:
        """List the collectives of `Vector.collect`, which sums the gradient of n words."""
        divided, diagonal = self._vector
        for c in self.rows.replace(",", ""):
            if c not in self.vector:
                words = (2 * (self.grid[c] - 1) * n * self.grid.ranks
                         // (self.feature_parts * self.grid[c]))
                yield Move(c, "all_reduce", words)
        yield from self._beyond_features("reduce_scatter", n)
        if diagonal:
            d = self.grid[diagonal]
            words = (d - 1) * n * self.grid.ranks // (self.grid.ranks_along(divided) * d)
            yield Move(diagonal, "reduce", words)

    def _beyond_features(self, collective: str, n: int) -> Iterator[Move]:
        """List a collective along each direction that divides a vector but not the features."""
        divided, _ = self._vector
        for k in range(len(self.features), len(divided)):
            words = ((self.grid[divided[k]] - 1) * n * self.grid.ranks
                     // self.grid.ranks_along(divided[:k + 1]))
            yield Move(divided[k], collective, words)

    def row_sums(self, rows: int, n: int) -> Iterator[Move]:
        """List the collectives that sum n numbers a row over the ranks that share the row."""
        for c in self.features:
            lines = self.grid.ranks // (self.row_parts * self.grid[c])
            yield Move(c, "all_reduce", 2 * (self.grid[c] - 1) * rows * n * lines)

    def along_sequence(self, collective: str, words: int) -> Iterator[Move]:
        """List a collective of an activation of `words` words along the sequence, if divided."""
        for c in self.rows.partition(",")[2]:
            yield Move(c, collective, (self.grid[c] - 1) * words * self.copies)


class Parallelism:
    """Describe a scheme on a grid without ranks, for given activations.

    Parameters
    ----------
    scheme : str
        Its name.
    grid : mapping of str to int
        Sizes of its directions.
    batch, seq : int
        Global number of sequences, and positions in each.
    **options
        Of the scheme's class, such as ``keep`` of `mm3d.schemes.cube.Cube`.

    Attributes
    ----------
    grid : GridShape
        Sizes of the directions.
    outer, inner : SpaceForms
        Where activations lie outside and inside a pair of linear layers.

    Raises
    ------
    ValueError
        When there is no scheme of that name.
    """

    def __init__(self, scheme: str, grid: Mapping[str, int], batch: int, seq: int,
                 **options: Any) -> None:
        self.scheme, self.grid = lookup(scheme), GridShape.from_sizes(grid)
        self.batch, self.seq, self.options = batch, seq, options
        self.outer, self.inner = (
            SpaceForms(self.grid, *letters)
            for letters in self.scheme.layouts(self.grid, batch, seq, **options))

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.grid.ranks

    @property
    def tokens(self) -> int:
        """Return the number of positions in all sequences together."""
        return self.batch * self.seq

    def spaces(self, way: str) -> tuple[SpaceForms, SpaceForms]:
        """Return the spaces of A and C of a product; `way` is "up" or "down"."""
        return (self.outer, self.inner) if way == "up" else (self.inner, self.outer)

    def product_moves(self, product: ProductShape,
                      again: bool = False) -> tuple[list[Move], list[Move]]:
        """List the collectives of one product, forward and backward.

        With `again` backward follows a forward that was computed again, which keeps nothing that
        it gathers.
        """
        return self.scheme.product_moves(self.grid, product, **self._options(again))

    def kept_words(self, product: ProductShape, again: bool = False) -> int:
        """Count the words that one product keeps for backward beside A, over all ranks."""
        return self.scheme.kept_words(self.grid, product, **self._options(again))

    def transient_words(self, product: ProductShape, again: bool = False) -> float:
        """Count the words that a rank needs at most in one backward, beside dC, dA and dB."""
        positions = bool(self.outer.rows.partition(",")[2])
        return self.scheme.transient_words(self.grid, product, positions=positions,
                                           **self._options(again))

    def _options(self, again: bool) -> Mapping[str, Any]:
        return self.scheme.options_again(self.options) if again else self.options
