"""Define the specs of a Transformer's layers: parameters, products, collectives and saved words.

Words are summed over all ranks, where nothing else is said.
"""

import math
from dataclasses import dataclass

from mm3d.model.layers import Attention, Gelu, LayerNorm, Linear
from mm3d.model.specs import Builder, LayerSpec
from mm3d.model.vectors import Vector
from mm3d.schemes.closed_form import Move, ProductShape
from mm3d.schemes.parallelism import Parallelism

Moves = tuple[list[Move], list[Move]]    # of forward and of backward


@dataclass(frozen=True)
class LinearSpec(LayerSpec):
    """Describe y = x W + b, from one space into the other.

    Attributes
    ----------
    way : {"up", "down"}
        "up" from the outer space into the inner one, "down" back.
    shape : tuple of int
        Global shape of W: (in, out), or (in, 3, out) for queries, keys and values.
    unit : int
        Number of neighbouring features in the inner space that stay together: those of a head.
    adds_bias : bool
        Whether the layer adds its bias; otherwise the `GeluSpec` that follows adds it.
    """

    way: str
    shape: tuple[int, ...]
    unit: int = 1
    adds_bias: bool = True

    @property
    def units(self) -> tuple[int, int]:
        """Return the numbers of features of x and of y that stay together."""
        return (1, self.unit) if self.way == "up" else (self.unit, 1)

    def parameters(self) -> dict[str, tuple[int, ...]]:
        return {"weight": self.shape, "bias": self.shape[1:]}

    def product_shape(self, batch: int, seq: int) -> ProductShape:
        """Return the global shape of the product x W."""
        middle = math.prod(self.shape[1:-1])    # never divided
        x, y = self.units
        return ProductShape(self.way, batch * seq, self.shape[0], math.prod(self.shape[1:]),
                            (x, y * middle))

    def products(self, batch: int, seq: int) -> list[ProductShape]:
        return [self.product_shape(batch, seq)]

    def moves(self, parallelism: Parallelism, recomputed: bool = False) -> Moves:
        """List the collectives of the product, and of the bias if the layer adds it."""
        product = self.product_shape(parallelism.batch, parallelism.seq)
        forward, backward = parallelism.product_moves(product, recomputed)
        if self.adds_bias:
            _, target = parallelism.spaces(self.way)
            forward, backward = ([*forward, *target.vector_gather_moves(product.K)],
                                 [*backward, *target.vector_reduce_moves(product.K)])
        return forward, backward

    def weights_flops(self, batch: int, seq: int) -> int:
        return self.flops(batch, seq)

    def make_layer(self, builder: Builder, name: str) -> Linear:
        up, scheme = self.way == "up", builder.scheme
        source, target = (builder.outer, builder.inner) if up else (builder.inner, builder.outer)
        product = scheme.product(source, target, self.shape, self.units)
        vector = Vector(target, self.shape[1:], self.units[1])
        weight = builder.create_parameter(f"{name}.weight", product.weight, self.shape,
                                          product.gathered_along)
        bias = builder.create_parameter(f"{name}.bias", vector.layout, self.shape[1:])
        return Linear(product, vector, weight, bias, self.adds_bias)


@dataclass(frozen=True)
class LayerNormSpec(LayerSpec):
    """Describe the layer norm of an outer activation, with weight and bias.

    Attributes
    ----------
    hidden : int
        Global number of features.
    """

    hidden: int

    def parameters(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.hidden,), "bias": (self.hidden,)}

    def moves(self, parallelism: Parallelism, recomputed: bool = False) -> Moves:
        """List the sums of rows, and the gathers and reductions of both vectors.

        Forward sums for the mean and then for the variance, backward for both gradients at once.
        """
        hidden, outer = self.hidden, parallelism.outer
        sums = [*outer.row_sum_moves(parallelism.tokens, 1)]
        gathers = [*outer.vector_gather_moves(hidden)]
        reductions = [*outer.vector_reduce_moves(hidden)]
        return ([*sums, *sums, *gathers, *gathers],
                [*reductions, *reductions, *outer.row_sum_moves(parallelism.tokens, 2)])

    def make_layer(self, builder: Builder, name: str) -> LayerNorm:
        vector = Vector(builder.outer, (self.hidden,))
        weight, bias = (builder.create_parameter(f"{name}.{part}", vector.layout, (self.hidden,))
                        for part in ("weight", "bias"))
        return LayerNorm(vector, weight, bias)


@dataclass(frozen=True)
class GeluSpec(LayerSpec):
    """Describe GELU(x + b) of an inner activation x, with the bias b of the linear layer before.

    Attributes
    ----------
    features : int
        Global number of features.
    linear : str
        Name, in the block, of the linear layer before, which holds the bias and does not add it.
    """

    features: int
    linear: str
    part = "gelu"

    def moves(self, parallelism: Parallelism, recomputed: bool = False) -> Moves:
        """List the gather of the bias and the reduction of its gradient."""
        inner = parallelism.inner
        return ([*inner.vector_gather_moves(self.features)],
                [*inner.vector_reduce_moves(self.features)])

    def make_layer(self, builder: Builder, name: str) -> Gelu:
        return Gelu(builder.find_layer(self.linear), builder.inner, self.features)


@dataclass(frozen=True)
class AttentionSpec(LayerSpec):
    """Describe multi-head attention of inner queries, keys and values.

    Attributes
    ----------
    hidden : int
        Global number of features of all heads together.
    heads : int
        Global number of heads.
    causal : bool
        Whether a position attends only to itself and those before it.  This saves no operations:
        masked scores are computed and discarded.
    """

    hidden: int
    heads: int
    causal: bool = False
    part = "attention"

    def flops(self, batch: int, seq: int) -> int:
        """Count the products Q K^T and P V; scores recomputed in backward are not included."""
        return 4 * batch * seq * seq * self.hidden

    def moves(self, parallelism: Parallelism, recomputed: bool = False) -> Moves:
        """List the collectives along a divided sequence.

        Keys and values are gathered in forward and again in backward, where their gradients are
        reduce-scattered.
        """
        inner, words = parallelism.inner, 2 * parallelism.tokens * self.hidden
        gathers = [*inner.sequence_moves("all_gather", words)]
        return gathers, [*gathers, *inner.sequence_moves("reduce_scatter", words)]

    def make_layer(self, builder: Builder, name: str) -> Attention:
        return Attention(builder.inner, self.hidden, self.hidden // self.heads, self.causal)
