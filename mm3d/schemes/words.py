"""Count the words that a scheme moves on a grid, in closed form, and the words that it stores.

Words are array elements, counted as by `mm3d.grid.axis.Traffic` and summed over all ranks, which
makes them whole numbers on every grid, also where nothing divides evenly.  Where everything does,
each of the P ranks has 1/P of the sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Iterator, Sequence

from mm3d.grid.layout import divided_directions
from mm3d.grid.shape import GridShape
from mm3d.schemes import find_scheme
from mm3d.schemes.closed_form import ON_FACES, Move, ProductShape


@dataclass(frozen=True)
class SpaceCosts:
    """Count words and collectives of the activations and vectors of a space, in closed form."""

    grid: GridShape = field(compare=False)    # the same in all spaces of one `Words`
    # Layout, as in `mm3d.grid.activations.Space`.
    rows: str
    features: str
    vector: str
    gathered_along: str = ""

    @cached_property
    def row_parts(self) -> int:
        """Return the number of blocks that the rows are divided into."""
        return self.grid.ranks_along(divided_directions(self.rows))

    @cached_property
    def copies(self) -> int:
        """Return the number of ranks that store the same block of an activation."""
        return self.grid.ranks // (self.row_parts * self.grid.ranks_along(self.features))

    @cached_property
    def _divided(self) -> str:
        """Return the directions that divide a vector."""
        return divided_directions(self.vector)

    @cached_property
    def further(self) -> str:
        """Return the directions that divide a vector, but not the features."""
        return self._divided[len(self.features):]

    def words(self, rows: int, features: int) -> int:
        """Count the words of an activation, copies included."""
        return self.copies * rows * features

    def vector_gather_moves(self, n: int) -> Iterator[Move]:
        """List the collectives of `mm3d.model.vectors.Vector.gather_features` for n elements."""
        yield from self._on_diagonal("broadcast", n)
        yield from self._beyond_features("all_gather", n)

    def vector_reduce_moves(self, n: int) -> Iterator[Move]:
        """List the collectives of `mm3d.model.vectors.Vector.reduce_gradient` for n elements."""
        for c in divided_directions(self.rows):
            if c not in self.vector:
                yield Move(c, "all_reduce", 2 * self._words_along(c, self._divided, n))
        yield from self._beyond_features("reduce_scatter", n)
        yield from self._on_diagonal("reduce", n)

    def _words_along(self, c: str, divided: str, n: int) -> int:
        """Count the words of a gather along c of n elements that other directions divide."""
        return (self.grid[c] - 1) * n * self.grid.ranks // self.grid.ranks_along(divided + c)

    def _on_diagonal(self, collective: str, n: int) -> Iterator[Move]:
        """List a collective from the diagonal or onto it, if there is one."""
        for c in self.vector.partition("@")[2]:
            yield Move(c, collective, self._words_along(c, self._divided, n))

    def _beyond_features(self, collective: str, n: int) -> Iterator[Move]:
        """List a collective along each direction that divides a vector but not the features.

        Where the first rank of a direction holds all, it broadcasts or receives all.
        """
        for c in self.further:
            on_face = f"{c}0" in self.vector
            yield Move(c, ON_FACES[collective] if on_face else collective,
                       self._words_along(c, self._divided.partition(c)[0], n))

    def row_sum_moves(self, rows: int, n: int) -> Iterator[Move]:
        """List the collectives that sum n numbers of each row over the ranks that share the row.
        """
        for c in self.features:
            lines = self.grid.ranks // (self.row_parts * self.grid[c])
            yield Move(c, "all_reduce", 2 * (self.grid[c] - 1) * rows * n * lines)

    def sequence_moves(self, collective: str, words: int) -> Iterator[Move]:
        """List a collective along a divided sequence, for an activation of `words` global words.
        """
        for c in self.rows.partition(",")[2]:
            yield Move(c, collective, (self.grid[c] - 1) * words * self.copies)


class Words:
    """Count the words that a scheme moves and stores on a grid, for given activations.

    `scheme` is its name, and `grid` has the sizes of its directions; the activations have `batch`
    sequences of `seq` positions, globally; options are those of the scheme.  `outer` and `inner`
    are the `SpaceCosts` of the spaces outside and inside a pair of linear layers.

    Raises ValueError when there is no scheme of that name, it cannot use the grid, or has no such
    option or value.
    """

    def __init__(self, scheme: str, grid: Mapping[str, int], batch: int, seq: int,
                 **options: Any) -> None:
        self.scheme = find_scheme(scheme)
        if getattr(grid, "directions", None) != self.scheme.directions:
            sizes = [grid[c] for c in self.scheme.directions if c in grid]    # in their order
            grid = sizes if len(sizes) == len(grid) else GridShape.from_sizes(grid)
        self.grid = self.scheme.grid_shape(grid)
        self.scheme.check_grid(self.grid)
        self.options = self.scheme.complete_options(options)
        self.batch, self.seq = batch, seq
        self.outer, self.inner = (
            SpaceCosts(self.grid, *letters)
            for letters in self.scheme.layouts(self.grid, batch, seq, **self.options))

    @property
    def tokens(self) -> int:
        """Return the number of positions in all sequences together."""
        return self.batch * self.seq

    def spaces(self, way: str) -> tuple[SpaceCosts, SpaceCosts]:
        """Return the spaces of A and C of a product; `way` is "up" or "down"."""
        return (self.outer, self.inner) if way == "up" else (self.inner, self.outer)

    def vector_moves(self, vectors: Sequence[tuple[SpaceCosts, int]]
                     ) -> tuple[list[Move], list[Move]]:
        """List the gathers of a block's vectors, and the sums of their gradients.

        Those of one space share all calls, those of both the calls along further directions that
        divide both (`mm3d.model.joined_vectors.join_vectors`).  Each is a space and a length.
        """
        lengths: dict[SpaceCosts, int] = {}
        for one, n in vectors:
            lengths[one] = lengths.get(one, 0) + n
        found: tuple[dict, dict] = {}, {}
        for one, n in lengths.items():
            for own, moves in zip(found, (one.vector_gather_moves(n), one.vector_reduce_moves(n))):
                for axis, collective, words, _ in moves:
                    place = one.further if axis in one.further else one, axis, collective
                    before = own[place].words if place in own else 0
                    own[place] = Move(axis, collective, before + words)
        return tuple([*own.values()] for own in found)

    def product_moves(self, product: ProductShape,
                      recomputed: bool = False) -> tuple[list[Move], list[Move]]:
        """List the collectives of one product, forward and backward.

        With `recomputed` backward follows `mm3d.schemes.product.Product.recompute_saved`.
        """
        return self.scheme.product_moves(self.grid, product, recomputed=recomputed,
                                         **self.options)
