"""Specs of the layers of a Transformer: what each has, multiplies, moves and keeps.

Words are those of all ranks together; M is the number of positions in all sequences.
"""

import math
from dataclasses import dataclass

from mm3d.model.layers import Attention, Gelu, LayerNorm, Linear
from mm3d.model.specs import Builder, LayerSpec, Saved
from mm3d.schemes.closed_form import Move, ProductShape
from mm3d.schemes.parallelism import Parallelism

Moves = tuple[list[Move], list[Move]]


@dataclass(frozen=True)
class LinearSpec(LayerSpec):
    """y = x W + b, from one space into the other.

    Attributes
    ----------
    way : {"up", "down"}
        From the outer space into the inner one, or back.
    shape : tuple of int
        Global shape of W: (in, out), or (in, 3, out) for queries, keys and values.
    unit : int
        Features inside that stay together, those of a head.
    adds : bool
        Whether the bias is added here; otherwise a `GeluSpec` that follows does it on the way.
    """

    way: str
    shape: tuple[int, ...]
    unit: int = 1
    adds: bool = True

    @property
    def units(self) -> tuple[int, int]:
        """Features that stay together in x and in y."""
        return (1, self.unit) if self.way == "up" else (self.unit, 1)

    def parameters(self) -> dict[str, tuple[int, ...]]:
        return {"weight": self.shape, "bias": self.shape[1:]}

    def products(self, batch: int, seq: int) -> list[ProductShape]:
        middle = math.prod(self.shape[1:-1])    # whole on every rank
        x, y = self.units
        return [ProductShape(self.way, batch * seq, self.shape[0], math.prod(self.shape[1:]),
                             (x, y * middle))]

    def moves(self, on: Parallelism, again: bool = False) -> Moves:
        product, = self.products(on.batch, on.seq)
        forward, backward = on.product_moves(product, again)
        if self.adds:
            _, target = on.spaces(self.way)
            forward, backward = ([*forward, *target.fetch(product.K)],
                                 [*backward, *target.collect(product.K)])
        return forward, backward

    def input_words(self, on: Parallelism) -> int:
        return on.spaces(self.way)[0].words(on.tokens, self.shape[0])

    def saved(self, on: Parallelism, again: bool = False) -> Saved:
        """x, and what the product keeps beside it."""
        product, = self.products(on.batch, on.seq)
        return Saved(self.input_words(on), rest=on.kept_words(product, again))

    def passing(self, on: Parallelism, again: bool = False) -> float:
        """dx, dy, dW, and what the product gathers."""
        product, = self.products(on.batch, on.seq)
        _, M, N, K, *_ = product
        source, target = on.spaces(self.way)
        return ((source.words(M, N) + target.words(M, K) + N * K) / on.ranks
                + on.transient_words(product, again))

    def make(self, builder: Builder, name: str) -> Linear:
        spaces = builder.outer, builder.inner
        source, target = spaces if self.way == "up" else spaces[::-1]
        return Linear(builder.scheme, name, source, target, self.shape, builder.dtype, self.units,
                      builder.master, self.adds)


@dataclass(frozen=True)
class LayerNormSpec(LayerSpec):
    """The normalized rows of an outer activation, times a weight, plus a bias.

    Attributes
    ----------
    hidden : int
        Features of a row.
    """

    hidden: int

    def parameters(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.hidden,), "bias": (self.hidden,)}

    def moves(self, on: Parallelism, again: bool = False) -> Moves:
        """Mean and variance one after the other, their gradients together, and both vectors."""
        h, outer = self.hidden, on.outer
        sums = [*outer.row_sums(on.tokens, 1)]
        return ([*sums, *sums, *outer.fetch(h), *outer.fetch(h)],
                [*outer.collect(h), *outer.collect(h), *outer.row_sums(on.tokens, 2)])

    def input_words(self, on: Parallelism) -> int:
        return on.outer.words(on.tokens, self.hidden)

    def saved(self, on: Parallelism, again: bool = False) -> Saved:
        """The normalized rows, a number for each, and the features of the weight."""
        numbers = on.tokens * on.ranks // on.outer.row_parts
        return Saved(activations=self.input_words(on),
                     rest=numbers + on.outer.fetched_words(self.hidden))

    def passing(self, on: Parallelism, again: bool = False) -> float:
        """dx and dy."""
        return 2 * self.input_words(on) / on.ranks

    def make(self, builder: Builder, name: str) -> LayerNorm:
        return LayerNorm(name, builder.outer, self.hidden, builder.dtype, builder.master)


@dataclass(frozen=True)
class GeluSpec(LayerSpec):
    """GELU of an inner activation x + b, b being the bias of the linear layer before.

    Attributes
    ----------
    features : int
        Of x.
    linear : str
        Name in the block of the layer before, which holds the bias and does not add it.
    """

    features: int
    linear: str
    part = "gelu"

    def moves(self, on: Parallelism, again: bool = False) -> Moves:
        return [*on.inner.fetch(self.features)], [*on.inner.collect(self.features)]

    def input_words(self, on: Parallelism) -> int:
        return on.inner.words(on.tokens, self.features)

    def saved(self, on: Parallelism, again: bool = False) -> Saved:
        """x, and the features of b."""
        return Saved(self.input_words(on), rest=on.inner.fetched_words(self.features))

    def passing(self, on: Parallelism, again: bool = False) -> float:
        """dx and dy."""
        return 2 * self.input_words(on) / on.ranks

    def make(self, builder: Builder, name: str) -> Gelu:
        return Gelu(builder.find(self.linear), builder.inner, self.features)


@dataclass(frozen=True)
class AttentionSpec(LayerSpec):
    """Multi-head attention of inner queries, keys and values.

    Attributes
    ----------
    hidden : int
        Features of all heads together.
    heads : int
        Their number.
    causal : bool
        Whether it looks backward only, which saves nothing: the scores behind the mask are
        computed and thrown away.
    """

    hidden: int
    heads: int
    causal: bool = False
    part = "attention"

    def flops(self, batch: int, seq: int) -> int:
        """Scores and their sums; the scores that backward computes again are not counted."""
        return 4 * batch * seq * seq * self.hidden

    def moves(self, on: Parallelism, again: bool = False) -> Moves:
        """Keys and values along a divided sequence, again in backward, and their gradients."""
        words = 2 * on.tokens * self.hidden
        gathers = [*on.inner.along_sequence("all_gather", words)]
        return gathers, [*gathers, *on.inner.along_sequence("reduce_scatter", words)]

    def input_words(self, on: Parallelism) -> int:
        return on.inner.words(on.tokens, 3 * self.hidden)

    def saved(self, on: Parallelism, again: bool = False) -> Saved:
        """Q, K and V, and a number for each row of each head."""
        return Saved(self.input_words(on), rest=on.inner.words(on.tokens, self.heads))

    def passing(self, on: Parallelism, again: bool = False) -> float:
        """The gradients of Q, K, V and y; along a divided sequence K and V, their gradients, and
        the buffer that they are sent from."""
        parts = on.inner.sequence_parts
        features = 4 + (6 * parts if parts > 1 else 0)
        return on.inner.words(on.tokens, features * self.hidden) / on.ranks

    def make(self, builder: Builder, name: str) -> Attention:
        return Attention(builder.inner, self.hidden, self.hidden // self.heads, self.causal)
