"""Compute a layer of experts: route tokens, send them, multiply, and combine the results.

Tokens are routed alike on every mesh: the router works in float32 at least, equal logits go to the
lowest expert, and which tokens an expert drops follows from their order in the whole batch.  A
dropped (token, choice) pair adds nothing to the token.
"""

import math
from dataclasses import dataclass
from typing import Any, Sequence

import numpy as np

from mm3d.arrays.backend import Array, namespace
from mm3d.arrays.elementwise import as_rows
from mm3d.arrays.blocks import block_lengths
from mm3d.grid.layout import Layout
from mm3d.model.architecture import PLAIN, Architecture
from mm3d.model.builder import Builder
from mm3d.model.chains import Recomputed
from mm3d.model.experts.grouped_product import (GroupedProduct, activation_backward,
                                                activation_forward, add_biases, sum_biases)
from mm3d.model.experts.token_order import (AssumedOrder, TokenOrder, capacity_of, counts, kept,
                                            positions)
from mm3d.model.experts.gates import ChosenExperts, balance_loss, choose, gates_backward, z_loss
from mm3d.model.experts.dispatch import Dispatch, RowRoutes
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.experts.router import Router, SharedExpert
from mm3d.model.experts.totals import RoutingTotals, Routings
from mm3d.model.layers import Layer
from mm3d.model.parameters import Parameter
from mm3d.model.sizes import ModelSizes
from mm3d.model.vectors import Vector
from mm3d.schemes.passes import Pass

ROUTER_BIAS = "router.bias"


@dataclass(frozen=True)
class Routing:
    """Hold what a router has decided in one pass, and the gradient of its losses."""

    choice: ChosenExperts    # experts and gates of this rank's tokens
    plan: RowRoutes    # the ways of their rows
    # Gradient of the logits from the balance loss and the z-loss; None without them.
    dlogits: Array | None

    @property
    def arrays(self) -> list[Array]:
        """Return the arrays that are stored."""
        choice = self.choice
        held = (choice.gates, choice.probabilities, choice.slope, self.dlogits)
        return [a for a in held if a is not None]


class ExpertLinear:
    """Compute y_e = x_e W_e for the rows of each expert e; hold the bias b_e, if it has one.

    `build` makes W of all experts, and b, whose global shape is that of W without `in`; `name`,
    `way` and `has_bias` are as of `mm3d.model.layers.Linear`.  The global `shape` of W is
    (experts, in, out), or (experts, in, 2, out) for two products; this rank has `own` of the
    experts.
    """

    def __init__(self, build: Builder, name: str, way: str, shape: tuple[int, ...],
                 own: int, has_bias: bool) -> None:
        source, target = build.spaces(way)
        divided = build.expert_ranks.create_parameter    # by replicas, perhaps
        layout = build.scheme.product(source, target, shape[1:], (1, 1)).weight
        self.product = GroupedProduct(source, target, way, layout, shape[1:])
        self.vector, self.bias = Vector(target, (own, *shape[2:])), None
        self.weight = build.create_parameter(f"{name}.weight", self.product.stack, shape,
                                             kind=divided)
        self.parameters = [self.weight]
        if has_bias:
            self.bias = build.create_parameter(f"{name}.bias", self.vector.layout,
                                               (shape[0], *shape[2:]), kind=divided)
            self.parameters.append(self.bias)
        self.product.use_weight(self.weight)

    def gather_bias(self) -> Array | None:
        """Gather this rank's features of the biases, (experts of this rank, features)."""
        if self.bias is None:
            return None
        b = self.vector.gather_features(self.bias.value)
        return namespace(b).reshape(b, (b.shape[0], math.prod(b.shape[1:])))

    def accumulate_bias(self, sums: list[tuple[int, Array]], features: int) -> None:
        """Add the gradient of the biases, from sums over the rows of some experts."""
        if self.bias is None:
            return
        own, *middle, _ = self.vector.shape
        db = self.vector.space.grid.backend.empty((own, features), self.bias.grad.dtype)
        db[...] = 0
        for expert, total in sums:
            db[expert, :] += total
        self.bias.accumulate(self.vector.reduce_gradient(namespace(db).reshape(
            db, (own, *middle, features // math.prod(middle)))))


class ExpertsLayer:
    """Compute y = sum over the chosen experts e of g_e (GELU(x W_e + b_e) V_e + c_e).

    An architecture may have no biases, or SwiGLU instead of GELU; a shared expert is added to it.
    `build` makes the parameters, and its `routings` record each routing.  An expert has `hidden`
    features at both ends, and `wide` between its products, globally; the model has `layer_count`
    layers, see `mm3d.model.experts.gates.shares`.
    """

    def __init__(self, build: Builder, name: str, experts: ExpertOptions, hidden: int, wide: int,
                 layer_count: int, architecture: Architecture = PLAIN) -> None:
        build.named(self, name, name)
        self.experts, self.space, E = experts, build.outer, experts.count
        self.routings, self.layer_count = build.routings, layer_count
        self.order = _order_tokens(build, experts)
        self.dispatch = Dispatch(build.outer, build.inner, self.order, E, hidden,
                                 build.expert_ranks.axis)
        self.router = Router(build, f"{name}.router", (E, hidden))
        self.bias = _create_bias(build, name, E) if experts.gate == "sigmoid-bias" else None
        self.gates, has_bias = architecture.gates, architecture.biases == "all"
        gates = [self.gates] if self.gates > 1 else []
        self.up = ExpertLinear(build, f"{name}.up", "up", (E, hidden, *gates, wide),
                               self.dispatch.own, has_bias)
        self.down = ExpertLinear(build, f"{name}.down", "down", (E, wide, hidden),
                                 self.dispatch.own, has_bias)
        self.capacity = capacity_of(experts, self.order.tokens)
        self.parameters = [self.router.weight, *([self.bias] if self.bias else []),
                           *self.up.parameters, *self.down.parameters]
        self.shared = None
        if experts.design.shared is not None:
            self.shared = SharedExpert(build, f"{name}.shared", experts.design, hidden,
                                       architecture)
            self.parameters += self.shared.parameters

    def forward(self, x: Array, within: Pass | None = None) -> tuple[Array, Any]:
        """Compute this rank's block of y; save the routing, and inputs and outputs of experts.

        Collectives of experts do not overlap with products: `within` is not used.
        """
        library, xp = self.space.grid.backend, namespace(x)
        tokens = as_rows(x)
        routing, weight = self._route(tokens)
        plan = routing.plan
        A = self.dispatch.send(tokens, plan)
        U = self.up.product.forward(A, self.up.weight.value, plan.rows)
        b = self.up.gather_bias()
        G = activation_forward(U, b, plan.rows.inner_segments, self.gates, library.empty(
            (U.shape[0], U.shape[1] // self.gates), U.dtype))
        R = self.down.product.forward(G, self.down.weight.value, plan.rows)
        c = self.down.gather_bias()
        if c is not None:
            add_biases(R, c, plan.rows.outer_segments)
        y, R = self.dispatch.combine(R, routing.choice.gates, plan)
        y, of_shared = xp.reshape(y, x.shape), None
        if self.shared is not None:
            more, of_shared = self.shared.forward(x)
            y += more
        return y, (routing, x, weight, A, U, b, G, R, of_shared)

    def _route(self, tokens: Array) -> tuple[Routing, Array]:
        """Choose the experts of this rank's tokens; also return the gathered weight."""
        routing = self.routings.next_replayed()
        if routing is not None:
            return routing, self.router.vector.gather_features(self.router.weight.value)
        logits, weight = self.router.forward(tokens)
        bias = None if self.bias is None else namespace(logits).astype(
            self.bias.value, logits.dtype, copy=False)
        choice = choose(logits, self.experts, bias, self.order.assumed)
        order = self.experts.dropping_order
        runs = [choice.chosen[run] for run in self.order.runs]
        own = np.array([counts(run, self.experts.count) for run in runs], np.int64)
        every = self.order.gather(own.reshape(-1, self.experts.top, self.experts.count),
                                  self.capacity, order)
        places = [positions(run, before, every.totals, order)
                  for run, before in zip(runs, every.before)]
        taken = kept(np.concatenate([*places, choice.chosen[:0]]), self.capacity)
        plan = self.dispatch.plan(choice.chosen, taken, every.kept)
        routing, losses = self._losses(logits, choice, plan, every.totals)
        dropped = every.totals.sum(0) - every.kept.reshape(-1, self.experts.count).sum(0)
        self.routings.add(routing, RoutingTotals(self.name, every.totals, dropped, *losses))
        return routing, weight

    def _losses(self, logits: Array, choice: ChosenExperts, plan: RowRoutes,
                totals: np.ndarray) -> tuple[Routing, list[float]]:
        """Compute the balance loss and the z-loss of this rank's tokens, and their gradient."""
        library, losses, dlogits = self.space.grid.backend, [], None
        terms = [self.experts.balance and balance_loss(choice, totals, self.order.tokens,
                                                       self.layer_count),
                 self.experts.z and z_loss(logits, self.experts.z, self.order.tokens)]
        for term in terms:
            if not term:
                losses.append(0.0)
            else:
                known = library.has_contents
                losses.append(float(library.to_host(term[0])[0]) if known else math.nan)
                dlogits = term[1] if dlogits is None else dlogits + term[1]
        return Routing(choice, plan, dlogits), losses

    def backward(self, dy: Array, saved: Any, within: Pass | None = None) -> Array:
        """Compute dx; add to the gradients of router and experts."""
        routing, x, weight, A, U, b, G, R, of_shared = saved
        library, xp, plan = self.space.grid.backend, namespace(dy), routing.plan
        dR, dgates = self.dispatch.combine_backward(as_rows(dy), R, plan)
        exact = self.down.weight.has_master
        self.down.accumulate_bias(sum_biases(dR, self.down.bias, plan.rows.outer_segments, exact),
                                  dR.shape[1])
        dG, dV = self.down.product.backward(dR, G, self.down.weight.value, plan.rows)
        self.down.weight.accumulate(dV)
        dU = library.empty(U.shape, U.dtype)
        self.up.accumulate_bias(activation_backward(
            dG, U, b, plan.rows.inner_segments, self.gates, exact, dU), U.shape[1])
        dA, dW = self.up.product.backward(dU, A, self.up.weight.value, plan.rows)
        self.up.weight.accumulate(dW)
        dx = self.dispatch.send_backward(dA, plan)
        dx += self._route_backward(routing, dgates, as_rows(x), weight)
        dx = xp.reshape(xp.astype(dx, dy.dtype, copy=False), dy.shape)
        if self.shared is not None:
            dx += self.shared.backward(dy, x, of_shared)
        return dx

    def _route_backward(self, routing: Routing, dgates: Array, tokens: Array,
                        weight: Array) -> Array:
        """Compute the gradient of the router's input from the gradients of gates and losses."""
        dlogits = gates_backward(routing.choice, self.router.sum_features(dgates))
        if routing.dlogits is not None:
            dlogits = dlogits + self.routings.scale * routing.dlogits
        return self.router.backward(dlogits, tokens, weight)

    def recompute_saved(self, x: Array, within: Pass | None = None) -> Any:
        """Recompute the data that `forward` saves."""
        return self.forward(x, within)[1]


def _order_tokens(build: Builder, experts: ExpertOptions) -> TokenOrder:
    """Return the order of the tokens, with assumed experts where nothing is computed."""
    ranks, outer, spaces = build.expert_ranks, build.outer, None
    if ranks.batch is not None:
        shares = block_lengths(ranks.batch, math.prod(axis.size for axis in ranks.replicas))
        found = {share: build.scheme.spaces(share, outer.seq)[0] for share in {*shares}}
        spaces = [found[share] for share in shares]
    if outer.grid.backend.has_contents:
        return TokenOrder(outer, ranks.replicas, spaces)
    return AssumedOrder(outer, ranks.replicas, spaces, experts)


def _create_bias(build: Builder, name: str, count: int) -> Parameter:
    """Create the bias of the gate "sigmoid-bias".

    Every rank changes it in the same way, by the counts of all tokens, so nothing is sent.
    """
    bias = build.create_parameter(f"{name}.{ROUTER_BIAS}", Layout(""), (count,), kind=Parameter)
    bias.first_copy = not any(axis.rank for axis in build.expert_ranks.replicas)
    build.routings.biases[build.full_name(name)] = bias
    return bias


class RecomputedExperts(Recomputed):
    """Apply layers; save their input and the routings of layers with experts.

    Routers are not computed again: another choice would send other rows than the gradients belong
    to, and other ranks would wait for them.
    """

    def __init__(self, routings: Routings, *layers: Layer) -> None:
        super().__init__(*layers)
        self._routings = routings

    def forward(self, x: Array, within: Pass | None = None) -> tuple[Array, Any]:
        """Compute the last layer's output; return it with x and the routings."""
        with self._routings.recording() as recorded:
            y, x = super().forward(x, within)
        return y, (x, recorded)

    def recompute(self, saved: Any, within: Pass | None = None) -> Any:
        """Recompute the data that the layers save, from x and the routings."""
        x, recorded = saved
        with self._routings.replaying(recorded):
            return super().recompute(x, within)


class Experts(ExpertOptions):
    """Hold the options of a model's mixture-of-experts layers, and make the layers.

    Attributes as in `mm3d.model.experts.options.ExpertOptions`.
    """

    def make_layer(self, build: Builder, name: str, sizes: ModelSizes) -> ExpertsLayer:
        """Make a layer of experts in place of a multi-layer perceptron."""
        return ExpertsLayer(build, name, self, sizes.hidden, self.design.width or sizes.inner,
                            sizes.layers, sizes.architecture)

    def recompute(self, build: Builder, layers: Sequence[Layer]) -> RecomputedExperts:
        """Wrap layers so that backward recomputes them with the routings of forward."""
        return RecomputedExperts(build.routings, *layers)
