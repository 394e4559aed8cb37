"""Define the specs of what stands around the layers of a GPT: embedding, head and cross entropy.

Words are summed over all ranks, where nothing else is said.  Tokens and targets, which every rank
has on the host, are not counted.
"""

from dataclasses import dataclass
from typing import Iterator

from mm3d.grid.layout import Layout, divided_directions
from mm3d.model.cross_entropy import CrossEntropy
from mm3d.model.embedding import Embedding
from mm3d.model.heads import Head, TiedHead, TiedWeight
from mm3d.model.layer_specs import Moves
from mm3d.model.specs import Builder, LayerSpec
from mm3d.schemes.closed_form import Move, ProductShape
from mm3d.schemes.parallelism import Parallelism, collective_along


@dataclass(frozen=True)
class EmbeddingSpec(LayerSpec):
    """Describe x = E[token] + P[position].

    Attributes
    ----------
    vocab, seq, hidden : int
        Global sizes of the tables, vocab x hidden and seq x hidden.
    """

    vocab: int
    seq: int
    hidden: int

    def parameters(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.vocab, self.hidden), "positions": (self.seq, self.hidden)}

    def moves(self, parallelism: Parallelism, recomputed: bool = False) -> Moves:
        """List the gathers of both tables and the sums of x; backward has them reversed.

        A sum is a reduce-scatter where the direction divides rows of x; there backward gathers
        dx.  Elsewhere it is an all-reduce, and dx is whole already.
        """
        grid, outer = parallelism.grid, parallelism.outer
        vocabulary, _ = parallelism.scheme.down_weight.split(",")
        whole, forward, backward = outer.words(parallelism.tokens, self.hidden), [], []
        scattered = [c for c in vocabulary if c in outer.rows]
        for n, c in enumerate(scattered):
            words = (grid[c] - 1) * whole * grid.ranks_along(scattered[n + 1:])
            forward.append(Move(c, collective_along(c, "reduce_scatter", outer.rows), words))
            backward.append(Move(c, collective_along(c, "all_gather", outer.rows), words))
        forward += [Move(c, "all_reduce", 2 * (grid[c] - 1) * whole // grid[c])
                    for c in vocabulary if c not in outer.rows]
        for rows in (self.vocab, self.seq):
            forward += self._table_moves(parallelism, "all_gather", rows)
            backward += self._table_moves(parallelism, "reduce_scatter", rows)
            backward += self._copy_moves(parallelism, rows)
        return forward, backward

    def _table_moves(self, parallelism: Parallelism, collective: str,
                     rows: int) -> Iterator[Move]:
        """List a collective of a table along the directions of features that x does not have."""
        grid = parallelism.grid
        layout = parallelism.scheme.down_weight
        vocabulary, features = map(divided_directions, layout.split(","))
        for k in range(len(parallelism.outer.features), len(features)):
            c, held = features[k], grid.ranks_along(vocabulary + features[:k + 1])
            words = (grid[c] - 1) * rows * self.hidden * grid.ranks // held
            yield Move(c, collective_along(c, collective, layout), words)

    def _copy_moves(self, parallelism: Parallelism, rows: int) -> Iterator[Move]:
        """List the sums of a table's gradient over ranks that have copies of it and other rows."""
        grid, outer = parallelism.grid, parallelism.outer
        vocabulary, features = map(divided_directions, parallelism.scheme.down_weight.split(","))
        for c in divided_directions(outer.rows):
            if c not in vocabulary + features:
                held = grid.ranks_along(vocabulary + outer.features) * grid[c]
                yield Move(c, "all_reduce",
                           2 * (grid[c] - 1) * rows * self.hidden * grid.ranks // held)

    def make_layer(self, builder: Builder, name: str) -> Embedding:
        layout = Layout(builder.scheme.down_weight)
        product = builder.scheme.product(builder.inner, builder.outer, (self.vocab, self.hidden),
                                         (1, 1))
        weight = builder.create_parameter(f"{name}.weight", layout, (self.vocab, self.hidden),
                                          product.gathered_along)
        positions = builder.create_parameter("positions.weight", layout, (self.seq, self.hidden))
        return Embedding(builder.outer, layout, weight, positions)


@dataclass(frozen=True)
class HeadSpec(LayerSpec):
    """Describe logits = x W, or x E^T with the embedding's table.

    Attributes
    ----------
    hidden, vocab : int
        Global sizes of W, hidden x vocab.
    tied : bool
        Whether E is used.
    copied : bool
        Whether E is a copy of its own, since the embedding is on another stage.
    """

    hidden: int
    vocab: int
    tied: bool = False
    copied: bool = False

    def parameters(self) -> dict[str, tuple[int, ...]]:
        if self.tied:
            return {"weight": (self.vocab, self.hidden)} if self.copied else {}
        return {"weight": (self.hidden, self.vocab)}

    def products(self, batch: int, seq: int) -> list[ProductShape]:
        return [ProductShape("up", batch * seq, self.hidden, self.vocab)]

    def moves(self, parallelism: Parallelism, recomputed: bool = False) -> Moves:
        """List the collectives of the product."""
        if self.tied:
            return parallelism.transposed_moves(
                ProductShape("down", parallelism.tokens, self.vocab, self.hidden))
        return parallelism.product_moves(*self.products(parallelism.batch, parallelism.seq),
                                         recomputed)

    def make_layer(self, builder: Builder, name: str) -> Head | TiedHead:
        scheme, outer, inner = builder.scheme, builder.outer, builder.inner
        shape = (self.vocab, self.hidden) if self.tied else (self.hidden, self.vocab)
        if not self.tied:
            product = scheme.product(outer, inner, shape, (1, 1))
            return Head(product, builder.create_parameter(
                f"{name}.weight", product.weight, shape, product.gathered_along))
        product = scheme.product(inner, outer, shape, (1, 1))
        try:
            weight = TiedWeight(builder.find_layer("embedding").weight)
        except KeyError:    # it is on another stage
            weight = builder.create_parameter("embedding.weight", product.weight, shape,
                                              product.gathered_along)
            weight.first_copy = False
        return TiedHead(product, weight)


@dataclass(frozen=True)
class CrossEntropySpec(LayerSpec):
    """Describe the cross entropy of logits.

    Attributes
    ----------
    vocab : int
        Global number of logits of a row.
    ignored, smoothing, z_loss
        As for `mm3d.model.cross_entropy.CrossEntropy`.
    """

    vocab: int
    ignored: int = -1
    smoothing: float = 0.0
    z_loss: float = 0.0

    def moves(self, parallelism: Parallelism, recomputed: bool = False) -> Moves:
        """List the gathers of three numbers a row, or four with label smoothing."""
        grid, inner = parallelism.grid, parallelism.inner
        numbers = 4 if self.smoothing else 3
        rows = parallelism.tokens * grid.ranks // inner.row_parts    # of all ranks together
        return [Move(c, "all_gather", (grid[c] - 1) * numbers * rows)
                for c in inner.features], []

    def make_layer(self, builder: Builder, name: str) -> CrossEntropy:
        return CrossEntropy(builder.inner, self.vocab, self.ignored, self.smoothing, self.z_loss)
