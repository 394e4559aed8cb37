"""Define the spec of a layer of experts: parameters, products, collectives and saved words.

Where nothing is dropped, every token makes k rows, whatever the routing: operations, and the words
that products move inside a tensor group, are exact.  With a capacity they are what they are when
nothing is dropped, an upper bound.  Words between replicas follow from the routing alone
(`mm3d.model.experts.dispatch`) and are not included.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Iterator

from mm3d.arrays.blocks import block_lengths
from mm3d.grid.layout import Layout
from mm3d.model.chain_specs import RecomputedSpec, Repeated
from mm3d.model.experts.assumed import AssumedOrder
from mm3d.model.experts.dispatch import Dispatch
from mm3d.model.experts.grouped_product import GroupedProduct
from mm3d.model.experts.layer import ExpertLinear, ExpertsLayer
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.experts.recomputed import RecomputedExperts
from mm3d.model.experts.router import Router
from mm3d.model.experts.shared import ExpertRanks
from mm3d.model.experts.token_order import TokenOrder
from mm3d.model.layers import Layer
from mm3d.model.parameters import Parameter
from mm3d.model.recomputation import Policy
from mm3d.model.sizes import ModelSizes
from mm3d.model.specs import Builder, LayerPass, LayerSpec, Spec
from mm3d.model.transformer_spec import transformer_layer
from mm3d.model.vectors import Vector
from mm3d.schemes.closed_form import Move, ProductShape
from mm3d.schemes.parallelism import Parallelism, collective_along

ROUTER_BIAS = "router.bias"


@dataclass(frozen=True)
class ExpertsSpec(LayerSpec):
    """Describe a layer of experts in place of a multi-layer perceptron.

    Attributes
    ----------
    experts : ExpertOptions
        The options.
    hidden, wide : int
        Global numbers of features of an expert's input and output, and between its products.
    layer_count : int
        Number of layers of the model.
    replayed : bool
        Whether a forward is described that recomputes with the routing of an earlier one.
    """

    experts: ExpertOptions
    hidden: int
    wide: int
    layer_count: int
    replayed: bool = False

    def parameters(self) -> dict[str, tuple[int, ...]]:
        E, h, f = self.experts.count, self.hidden, self.wide
        bias = {ROUTER_BIAS: (E,)} if self.experts.gate == "sigmoid-bias" else {}
        return {"router.weight": (E, h), **bias, "up.weight": (E, h, f), "up.bias": (E, f),
                "down.weight": (E, f, h), "down.bias": (E, h)}

    def products(self, batch: int, seq: int) -> list[ProductShape]:
        """List the two products, of all experts together: k rows for each token."""
        rows = self.experts.top * batch * seq
        return [ProductShape("up", rows, self.hidden, self.wide),
                ProductShape("down", rows, self.wide, self.hidden)]

    def flops(self, batch: int, seq: int) -> int:
        """Count the operations of the products and of the router."""
        router = 0 if self.replayed else 2 * batch * seq * self.hidden * self.experts.count
        return super().flops(batch, seq) + router

    def moves(self, parallelism: Parallelism, recomputed: bool = False) -> Any:
        """List the collectives of products, vectors, and gates; and of the counts in forward."""
        tokens, experts = parallelism.tokens, self.experts
        outer, inner = parallelism.outer, parallelism.inner
        E, k, h, f = experts.count, experts.top, self.hidden, self.wide
        forward, backward = ([*outer.vector_gather_moves(E * h)] * 2
                             + [*inner.vector_gather_moves(E * f)],
                             [*outer.vector_reduce_moves(E * h)] * 2
                             + [*inner.vector_reduce_moves(E * f)])
        for product in self.products(parallelism.batch, parallelism.seq):
            ahead, back = _grouped_moves(parallelism, product, E)
            forward, backward = forward + ahead, backward + back
        if not self.replayed:
            forward += [*_row_sums(outer, tokens, E), *_count_moves(parallelism, k * E)]
        return forward, backward + [*_row_sums(outer, tokens, k)]

    def recomputed_passes(self) -> Iterator[LayerPass]:
        yield LayerPass(1, self)    # what a token's experts have made of it is saved

    def make_layer(self, builder: Builder, name: str) -> ExpertsLayer:
        outer, inner, E = builder.outer, builder.inner, self.experts.count
        ranks = builder.expert_ranks
        order = self._make_order(builder, ranks)
        dispatch = Dispatch(outer, inner, order, E, self.hidden, ranks.axis)
        vector = Vector(outer, (E, self.hidden))
        weight = builder.create_parameter(f"{name}.router.weight", vector.layout, vector.shape)
        router = Router(outer, vector, weight)
        bias = None
        if self.experts.gate == "sigmoid-bias":
            # Every rank changes it in the same way, by the counts of all, so none is sent any.
            bias = Parameter(f"{name}.{ROUTER_BIAS}", builder.scheme.grid, Layout(""), (E,),
                             builder.dtype, None, builder.master)
            bias.first_copy = not any(axis.rank for axis in builder.expert_ranks.replicas)
            builder.routings.biases[name] = bias
        up, down = (self._make_linear(builder, name, way, dispatch.own) for way in ("up", "down"))
        return ExpertsLayer(self.experts, outer, router, up, down, order, dispatch,
                            builder.routings, self.layer_count, bias)

    def _make_order(self, builder: Builder, ranks: ExpertRanks) -> TokenOrder:
        """Build the order of the tokens, with assumed experts where nothing is computed."""
        outer, spaces = builder.outer, None
        if ranks.batch is not None:
            shares = block_lengths(ranks.batch, math.prod(axis.size for axis in ranks.replicas))
            found = {share: builder.scheme.spaces(share, outer.seq)[0] for share in {*shares}}
            spaces = [found[share] for share in shares]
        if outer.grid.backend.has_contents:
            return TokenOrder(outer, ranks.replicas, spaces)
        return AssumedOrder(outer, ranks.replicas, spaces, self.experts)

    def _make_linear(self, builder: Builder, name: str, way: str, own: int) -> ExpertLinear:
        """Build the products of one way, for the `own` experts of a rank."""
        source, target = ((builder.outer, builder.inner) if way == "up" else
                          (builder.inner, builder.outer))
        shape = (self.hidden, self.wide) if way == "up" else (self.wide, self.hidden)
        layout = builder.scheme.product(source, target, shape, (1, 1)).weight
        product = GroupedProduct(source, target, way, layout, shape)
        E, vector = self.experts.count, Vector(target, (own, shape[1]))
        create = _create(builder)
        weight = create(f"{name}.{way}.weight", product.stack, (E, *shape))
        return ExpertLinear(product, vector, weight,
                            create(f"{name}.{way}.bias", vector.layout, (E, shape[1])))


def _create(builder: Builder) -> Any:
    """Return what creates parameters of experts from name, layout and global shape."""
    divided = builder.expert_ranks.create_parameter
    if divided is None:
        return builder.create_parameter

    def create(name: str, layout: Layout, shape: tuple[int, ...]) -> Parameter:
        return divided(name, builder.scheme.grid, layout, shape, builder.dtype, None,
                       builder.master)
    return create


def _row_sums(space: Any, tokens: int, n: int) -> list[Move]:
    """List the collectives that sum n numbers of each token over the ranks that share it."""
    found = []
    for move in space.row_sum_moves(tokens, n):
        half = move.words // 2
        found += [Move(move.axis, "reduce_scatter", half), Move(move.axis, "all_gather", half)]
    return found


def _count_moves(parallelism: Parallelism, n: int) -> list[Move]:
    """List the gathers of n integers of each rank's run of tokens inside a tensor group."""
    outer, grid = parallelism.outer, parallelism.grid
    sequences, positions = Layout(outer.rows).dims
    divided = grid.ranks_along(positions) > 1
    runs = parallelism.batch if divided else grid.ranks_along(sequences)
    found, words = [], n * runs * grid.ranks_along(positions)
    # The words of all ranks: each holds, before a gather, what the directions not yet gathered
    # leave of all runs.
    held = words * (grid.ranks // grid.ranks_along(sequences + positions))
    for c in [*reversed(positions), *reversed(sequences)]:
        found.append(Move(c, "all_gather", held * (grid[c] - 1)))
        held *= grid[c]
    return found


def _grouped_moves(parallelism: Parallelism, product: ProductShape,
                   experts: int) -> tuple[list[Move], list[Move]]:
    """List the collectives of `GroupedProduct`, forward and backward."""
    grid, (rows, N, K) = parallelism.grid, product.extents
    source, target = parallelism.spaces(product.way)
    letters = [Layout(space.rows).letters for space in (source, target)]

    def move(c: str, collective: str, spec: str, words: int) -> Move:
        return Move(c, collective_along(c, collective, spec), words)
    A, C = source.words(rows, N), target.words(rows, K)
    forward, backward = [], []
    for c in target.features:
        n = grid[c] - 1
        if c in letters[0] or c in source.features:
            forward.append(move(c, "all_gather", source.rows, n * A))
            backward += [move(c, "reduce_scatter", source.rows, n * A), forward[-1]]
        else:
            backward.append(Move(c, "all_reduce", 2 * n * A // grid[c]))
    for c in source.features:
        n = grid[c] - 1
        if c in letters[1]:
            forward.append(move(c, "reduce_scatter", target.rows, n * C))
            backward.append(move(c, "all_gather", target.rows, n * C))
        elif c not in target.features:
            forward.append(Move(c, "all_reduce", 2 * n * C // grid[c]))
    layout = parallelism.scheme.down_weight
    weight = Layout(layout).letters
    stored = experts * N * K * (grid.ranks // grid.ranks_along(weight))
    for c in [c for c in weight if c not in source.features + target.features]:
        words = (grid[c] - 1) * stored
        forward.append(move(c, "all_gather", layout, words))
        backward += [forward[-1], move(c, "reduce_scatter", layout, words)]
    gathered = grid.ranks_along(c for c in weight
                                if c not in source.features + target.features)
    for c in letters[0]:
        if c not in weight and c not in target.features:
            backward.append(Move(c, "all_reduce", 2 * (grid[c] - 1) * stored * gathered
                                 // grid[c]))
    return forward, backward


@dataclass(frozen=True)
class RecomputedExpertsSpec(RecomputedSpec):
    """Describe recomputed layers with experts: they save their input and the routings.

    Saved words leave out the routings, a few numbers a token.
    """

    def passes_repeated_in_backward(self) -> Iterator[LayerPass]:
        for one in super().passes_repeated_in_backward():
            replays = isinstance(one.layer, ExpertsSpec)
            yield one._replace(layer=replace(one.layer, replayed=True)) if replays else one

    def build_layers(self, builder: Builder) -> list[Layer]:
        layers = builder.build_layers(self.layers)
        return builder.register_layer(RecomputedExperts(builder.routings, *layers), self.name,
                                      "recomputed")


class Experts(ExpertOptions):
    """Hold the options of a model's mixture-of-experts layers, and describe the model with them.

    Attributes are those of `mm3d.model.experts.options.ExpertOptions`.
    """

    def layer_specs(self, sizes: ModelSizes, causal: bool, policy: Policy, part: range,
                    dropout: float) -> tuple[Spec, ...]:
        """Return the specs of the layers of a part of a model in which some have experts.

        With "selective" alone experts are not recomputed.
        """
        h = sizes.hidden
        experts = ExpertsSpec("experts", self, h, sizes.mlp_factor * h, sizes.layers)
        blocks = [Repeated(transformer_layer(sizes, causal, policy.selective, dropout,
                                             experts if self.in_layer(layer) else None), "layers")
                  for layer in part]
        if not policy.group_size:
            return tuple(blocks)
        size = policy.group_size
        return tuple(RecomputedExpertsSpec(tuple(blocks[start:start + size]), "layers")
                     for start in range(0, len(blocks), size))
