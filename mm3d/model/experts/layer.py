"""Compute a layer of experts: route tokens, send them, multiply, and combine the results.

Tokens are routed alike on every mesh: the router works in float32 at least, equal logits go to the
lowest expert, and which tokens an expert drops follows from their order in the whole batch.  A
dropped (token, choice) pair adds nothing to the token.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Sequence

import numpy as np

from mm3d.arrays.backend import Array, as_rows, namespace
from mm3d.arrays.grouped_products import Segment
from mm3d.grid.activations import Space
from mm3d.model.experts.balance import balance_loss, z_loss
from mm3d.model.experts.capacity import capacity_of, counts, kept, positions
from mm3d.model.experts.dispatch import Dispatch, Plan
from mm3d.model.experts.gates import Choice, choose, gates_backward
from mm3d.model.experts.grouped_product import GroupedProduct
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.experts.router import Router
from mm3d.model.experts.shared import Routings
from mm3d.model.experts.token_order import TokenOrder
from mm3d.model.experts.totals import RoutingTotals
from mm3d.model.functional import add_rows, bias_gelu_backward, bias_gelu_forward, sum_rows
from mm3d.model.parameters import Parameter
from mm3d.model.vectors import Vector
from mm3d.schemes.overlap import Overlap


@dataclass(frozen=True)
class Routing:
    """Hold what a router has decided in one pass, and the gradient of its losses.

    Attributes
    ----------
    choice : Choice
        Experts and gates of this rank's tokens.
    plan : Plan
        The ways of their rows.
    dlogits : Array or None
        Gradient of the balance loss and the z-loss by the logits; None without them.
    """

    choice: Choice
    plan: Plan
    dlogits: Array | None

    @property
    def arrays(self) -> list[Array]:
        """Return the arrays that are stored."""
        choice = self.choice
        held = (choice.gates, choice.probabilities, choice.slope, self.dlogits)
        return [a for a in held if a is not None]


class ExpertLinear:
    """Compute y_e = x_e W_e for the rows of each expert e; hold the bias b_e, which others add.

    Parameters
    ----------
    product : GroupedProduct
        The products of this rank's experts.
    vector : Vector
        Storage of their biases, along the features of y.
    weight, bias : Parameter
        W and b of all experts, of global shape (experts, in, out) and (experts, out).
    """

    def __init__(self, product: GroupedProduct, vector: Vector, weight: Parameter,
                 bias: Parameter) -> None:
        self.product, self.vector, self.weight, self.bias = product, vector, weight, bias
        self.parameters = [weight, bias]
        product.accumulate_float32 = weight.has_master

    def gather_bias(self) -> Array:
        """Gather this rank's features of the biases, (experts of this rank, features)."""
        return self.vector.gather_features(self.bias.value)

    def accumulate_bias(self, sums: list[tuple[int, Array]], like: Array) -> None:
        """Add the gradient of the biases, from sums over the rows of some experts."""
        db = self.vector.space.grid.backend.empty(like.shape, self.bias.grad.dtype)
        db[...] = 0
        for expert, total in sums:
            db[expert, :] += total
        self.bias.accumulate(self.vector.reduce_gradient(db))


class ExpertsLayer:
    """Compute y = sum over the chosen experts e of g_e (GELU(x W_e + b_e) V_e + c_e).

    Parameters
    ----------
    experts : ExpertOptions
        The options.
    space : Space
        Space of x and y, the outer one.
    router : Router
        Computes the logits.
    up, down : ExpertLinear
        W and b, V and c.
    order : TokenOrder
        The order of the tokens of all ranks.
    dispatch : Dispatch
        Sends rows to experts.
    routings : Routings
        Takes what was decided, and has the scale of the router's losses.
    layer_count : int
        Number of layers of the model.
    bias : Parameter, optional
        What the gate "sigmoid-bias" adds to the scores that choose, (experts,).
    """

    def __init__(self, experts: ExpertOptions, space: Space, router: Router, up: ExpertLinear,
                 down: ExpertLinear, order: TokenOrder, dispatch: Dispatch, routings: Routings,
                 layer_count: int, bias: Parameter | None = None) -> None:
        self.experts, self.space, self.router = experts, space, router
        self.up, self.down, self.order, self.dispatch = up, down, order, dispatch
        self.routings, self.layer_count, self.bias = routings, layer_count, bias
        self.capacity = capacity_of(experts, order.tokens)
        self.parameters = [router.weight, *([bias] if bias else []), *up.parameters,
                           *down.parameters]
        self.name = ""

    def forward(self, x: Array, overlap: Overlap | None = None) -> tuple[Array, Any]:
        """Compute this rank's block of y; save the routing, and inputs and outputs of experts.

        Collectives of experts do not overlap with products: `overlap` is not used.
        """
        library, xp = self.space.grid.backend, namespace(x)
        tokens = as_rows(x)
        routing, weight = self._route(tokens)
        plan = routing.plan
        A = self.dispatch.send(tokens, plan)
        U = self.up.product.forward(A, self.up.weight.value, plan.rows)
        b = self.up.gather_bias()
        G = library.empty(U.shape, U.dtype)
        for one, rows in _each(plan.rows.inner_segments):
            bias_gelu_forward(U[rows, :], b[one.group, :], G[rows, :])
        R = self.down.product.forward(G, self.down.weight.value, plan.rows)
        c = self.down.gather_bias()
        for one, rows in _each(plan.rows.outer_segments):
            add_rows(R[rows, :], c[one.group, :], R[rows, :])
        y, R = self.dispatch.combine(R, routing.choice.gates, plan)
        return xp.reshape(y, x.shape), (routing, x, weight, A, U, b, G, R)

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
        runs = [replace(choice, chosen=choice.chosen[run]) for run in self.order.runs]
        own = np.array([counts(run) for run in runs], np.int64)
        every = self.order.gather(own.reshape(-1, self.experts.top, self.experts.count),
                                  self.capacity, order)
        places = [positions(run.chosen, before, every.totals, order)
                  for run, before in zip(runs, every.before)]
        taken = kept(np.concatenate([*places, choice.chosen[:0]]), self.capacity)
        plan = self.dispatch.plan(choice.chosen, taken, every.kept)
        routing, losses = self._losses(logits, choice, plan, every.totals)
        dropped = every.totals.sum(0) - every.kept.reshape(-1, self.experts.count).sum(0)
        self.routings.add(routing, RoutingTotals(self.name, every.totals, dropped, *losses))
        return routing, weight

    def _losses(self, logits: Array, choice: Choice, plan: Plan,
                totals: np.ndarray) -> tuple[Routing, list[float]]:
        """Compute the balance loss and the z-loss of this rank's tokens, and their gradient."""
        library, losses, dlogits = self.space.grid.backend, [], None
        terms = [self.experts.balance and balance_loss(choice, self.experts, totals,
                                                       self.order.tokens, self.layer_count),
                 self.experts.z and z_loss(logits, self.experts.z, self.order.tokens)]
        for term in terms:
            if not term:
                losses.append(0.0)
            else:
                known = library.has_contents
                losses.append(float(library.to_host(term[0])[0]) if known else math.nan)
                dlogits = term[1] if dlogits is None else dlogits + term[1]
        return Routing(choice, plan, dlogits), losses

    def backward(self, dy: Array, saved: Any, overlap: Overlap | None = None) -> Array:
        """Compute dx; add to the gradients of router and experts."""
        routing, x, weight, A, U, b, G, R = saved
        library, xp, plan = self.space.grid.backend, namespace(dy), routing.plan
        dR, dgates = self.dispatch.combine_backward(as_rows(dy), R, plan)
        exact = self.down.bias.has_master
        self.down.accumulate_bias(
            [(one.group, sum_rows(dR[rows, :], exact))
             for one, rows in _each(plan.rows.outer_segments)],
            library.empty((self.dispatch.own, dR.shape[1]), dR.dtype))
        dG, dV = self.down.product.backward(dR, G, self.down.weight.value, plan.rows)
        self.down.weight.accumulate(dV)
        dU, sums = library.empty(U.shape, U.dtype), []
        for one, rows in _each(plan.rows.inner_segments):
            _, total = bias_gelu_backward(dG[rows, :], U[rows, :], b[one.group, :], dU[rows, :],
                                          exact)
            sums.append((one.group, total))
        self.up.accumulate_bias(sums, b)
        dA, dW = self.up.product.backward(dU, A, self.up.weight.value, plan.rows)
        self.up.weight.accumulate(dW)
        dx = self.dispatch.send_backward(dA, plan)
        dx += self._route_backward(routing, dgates, as_rows(x), weight)
        return xp.reshape(xp.astype(dx, dy.dtype, copy=False), dy.shape)

    def _route_backward(self, routing: Routing, dgates: Array, tokens: Array,
                        weight: Array) -> Array:
        """Compute the gradient of the router's input, from that of the gates and its losses."""
        dlogits = gates_backward(routing.choice, self.router.sum_features(dgates))
        if routing.dlogits is not None:
            dlogits = dlogits + self.routings.scale * routing.dlogits
        return self.router.backward(dlogits, tokens, weight)

    def recompute_saved(self, x: Array, overlap: Overlap | None = None) -> Any:
        """Recompute the data that `forward` saves."""
        return self.forward(x, overlap)[1]


def _each(segments: Sequence[Segment]) -> list[tuple[Segment, slice]]:
    """Return segments with the slices of their rows."""
    return [(one, slice(one.start, one.stop)) for one in segments]
