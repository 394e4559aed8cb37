"""Define the layers of a Transformer but attention, once for every scheme.

``forward(x) -> (y, saved)``; ``backward(dy, saved) -> dx`` adds to the gradients of the
parameters.  Layers keep no state between the two, so many micro-batches can be in flight.  An
optional `Pass` joins the calls of several layers, or schedules communication during products.  A
`Space` says how an activation is divided; the scheme's product multiplies by the weight.  Arrays
that forward and backward return are new, and the caller may overwrite them; their arguments are
not changed.

A pass may put the gradients of weights off, for schedules that compute them later: backward then
appends x and dy, which the caller must not change before, to `Pass.later`, and the layer's
``backward_weights(operands)`` is the second half.  Gradients of vectors (biases, norms) are added
by the first half: it has dy at hand, and need not keep more for them.

Arrays are this rank's blocks.  Activations have the shape (batch, positions, ..., features), the
global one divided as the space says, and the dtype of the model.
"""

import math
from typing import Any, Callable, Protocol

from mm3d.arrays.backend import Array, accumulation_dtype, backend_of, namespace, reshape
from mm3d.arrays.elementwise import row_blocks
from mm3d.grid.activations import Space
from mm3d.model import functional
from mm3d.model.architecture import Architecture
from mm3d.model.builder import Builder
from mm3d.model.functional import prefer_backend_kernel, sum_row, upcast
from mm3d.model.parameters import Parameter
from mm3d.model.vectors import Vector
from mm3d.schemes.passes import ALONE, Pass


class Layer(Protocol):
    """Describe the interface of a layer.

    `within` is the `Pass` that the call is part of; without it each layer calls for itself.
    """

    @property
    def parameters(self) -> list[Parameter]: ...

    def forward(self, x: Array, within: Pass | None = None) -> tuple[Array, Any]: ...

    def backward(self, dy: Array, saved: Any, within: Pass | None = None) -> Array: ...


class Linear:
    """Compute y = x W + b, from one space into the other.

    `build` makes W and b; `name` is that of the layer in its block, such as "mlp.up".  The `way`
    "up" leads from the outer space into the inner one, "down" back.  The global `shape` of W is
    (in, out), or (in, n, out) for n products with the same x, such as queries, keys and values.
    So many neighbouring features as `unit` stay together in the inner space, such as a head's.
    Without `adds_bias` a `Gelu` that follows adds b; without `has_bias` there is none.
    """

    def __init__(self, build: Builder, name: str, way: str, shape: tuple[int, ...], unit: int = 1,
                 adds_bias: bool = True, has_bias: bool = True) -> None:
        build.named(self, name, name)
        source, target = build.spaces(way)
        units = (1, unit) if way == "up" else (unit, 1)
        self.product = build.scheme.product(source, target, shape, units)
        self.vector, self.bias = Vector(target, shape[1:], units[1]), None
        self.adds_bias = adds_bias and has_bias
        self.weight = build.create_parameter(f"{name}.weight", self.product.weight, shape,
                                             self.product.gathered_along)
        if has_bias:
            self.bias = build.create_parameter(f"{name}.bias", self.vector.layout, shape[1:])
        self.product.use_weight(self.weight)
        self.parameters = [self.weight, self.bias] if has_bias else [self.weight]
        self.vectors = [(self.bias, self.vector)] if has_bias else []

    def forward(self, x: Array, within: Pass | None = None) -> tuple[Array, Any]:
        """Compute y = x W + b; return it with the data that the product saves."""
        shared = within or ALONE
        y, saved = shared.forward(self, x)
        if self.adds_bias:
            rows, b_l = _rows(y), shared.vector_of(self.bias, self.vector)
            functional.add_rows(rows, reshape(b_l, (b_l.size,)), out=rows)
        return y, saved

    def backward(self, dy: Array, saved: Any, within: Pass | None = None) -> Array:
        """Compute dx = dy W^T; add dW and db to the gradients."""
        shared = within or ALONE
        if self.adds_bias:
            shared.accumulate_terms(self.bias, self.vector, reshape(
                functional.sum_rows(_rows(dy), self.bias.has_master), dy.shape[2:]))
        return shared.backward(self, dy, saved)

    def backward_weights(self, operands: Any, within: Pass) -> None:
        """Compute dW = x^T dy; add it to the gradient."""
        within.backward_weights(self, operands)

    def recompute_saved(self, x: Array, within: Pass | None = None) -> Any:
        """Recompute the data that `forward` saves, without y."""
        return self.product.recompute_saved(x)


def _rows(a: Array) -> Array:
    """View `a` as (batch, positions, features), with its feature dimensions joined."""
    return reshape(a, (*a.shape[:2], math.prod(a.shape[2:])))


class LayerNorm:
    """Compute y = gamma * (x - mean) / sqrt(variance + eps) + beta over the features.

    Ranks that share rows sum the rows' statistics; x and y are in the outer space.
    """

    normalize = functional.normalize_forward, functional.normalize_backward
    parts: tuple[str, ...] = ("weight", "bias")    # gamma and beta

    def __init__(self, build: Builder, name: str, hidden: int, eps: float) -> None:
        build.named(self, name, name)
        self.space, self.hidden, self.eps = build.outer, hidden, eps
        self.vector, self.empty = Vector(self.space, (hidden,)), self.space.allocator(hidden)
        self.parameters = [build.create_parameter(f"{name}.{part}", self.vector.layout, (hidden,))
                           for part in self.parts]
        self.weight, self.bias = (*self.parameters, None)[:2]    # `RMSNorm` has no bias
        self.vectors = [(one, self.vector) for one in self.parameters]

    def forward(self, x: Array, within: Pass | None = None) -> tuple[Array, Any]:
        """Compute the normalized rows times gamma, plus beta."""
        xhat = self.space.grid.backend.empty(x.shape, x.dtype)    # never gathered, unlike y
        xhat, rstd = self.normalize[0](x, self.hidden, self.eps, self.space.sum_features, xhat)
        y = self.empty(x.dtype)
        gamma_l, *beta_l = ((within or ALONE).vector_of(one, self.vector)
                            for one in self.parameters)
        scale = functional.scale_add_rows if beta_l else functional.scale_rows
        return scale(xhat, gamma_l, *beta_l, out=y), (xhat, rstd, gamma_l)

    def backward(self, dy: Array, saved: Any, within: Pass | None = None) -> Array:
        """Compute dx; add the gradients of gamma and beta."""
        (xhat, rstd, gamma_l), dxhat, shared = saved, self.empty(dy.dtype), within or ALONE
        sums = functional.sum_products if self.bias is None else functional.sum_rows_and_products
        found = sums(dy, xhat, self.weight.has_master)
        functional.scale_rows(dy, gamma_l, out=dxhat)
        *dbeta, dgamma = [found] if self.bias is None else found
        for term in dbeta:
            shared.accumulate_terms(self.bias, self.vector, term)
        shared.accumulate_terms(self.weight, self.vector, dgamma)
        return self.normalize[1](dxhat, xhat, rstd, self.hidden, self.space.sum_features,
                                 out=dxhat)


class Gelu:
    """Compute GELU(x + b), with the output x and the bias b, if there is one, of a linear layer.

    Adding the bias here saves a pass over the widest activation in forward and in backward.  The
    layer before holds b, and does not add it.
    """

    parameters: list[Parameter] = []    # the bias is the linear layer's

    def __init__(self, linear: Linear, space: Space, features: int) -> None:
        self.bias, self.vector = linear.bias, linear.vector
        self.empty = space.allocator(features)

    def forward(self, x: Array, within: Pass | None = None) -> tuple[Array, Any]:
        """Compute GELU(x + b); save x and the gathered b_l."""
        if self.bias is None:
            return functional.gelu_forward(x, out=self.empty(x.dtype)), (x, None)
        y, b_l = self.empty(x.dtype), (within or ALONE).vector_of(self.bias, self.vector)
        return functional.bias_gelu_forward(x, b_l, out=y), (x, b_l)

    def backward(self, dy: Array, saved: Any, within: Pass | None = None) -> Array:
        """Compute dx = dy GELU'(x + b); add db to the gradient of the bias."""
        x, b_l = saved
        if b_l is None:
            return functional.gelu_backward(dy, x, out=self.empty(dy.dtype))
        dx, db = functional.bias_gelu_backward(dy, x, b_l, self.empty(dy.dtype),
                                               self.bias.has_master)
        (within or ALONE).accumulate_terms(self.bias, self.vector, db)
        return dx


@prefer_backend_kernel
def rms_forward(x: Array, features: int, eps: float, total: Callable[[Array], Array],
                out: Array) -> tuple[Array, Array]:
    """Divide rows by sqrt(mean(x^2) + eps).

    Source: Zhang and Sennrich, arXiv 1910.07467.  Parameters and results as in
    `mm3d.model.functional.normalize_forward`, with the mean square for the variance.
    """
    library, xp = backend_of(x), namespace(x)
    squares = library.empty((*x.shape[:-1], 1), accumulation_dtype(x))
    for u, s in row_blocks(library, x, squares):
        u = upcast(u)
        s[...] = sum_row(xp, u * u)
    rstd = 1 / xp.sqrt(total(squares) / features + eps)
    for u, y, r in row_blocks(library, x, out, rstd):
        y[...] = xp.astype(upcast(u) * r, y.dtype, copy=False)
    return out, rstd


@prefer_backend_kernel
def rms_backward(dy: Array, xhat: Array, rstd: Array, features: int,
                 total: Callable[[Array], Array], out: Array) -> Array:
    """Compute dx = rstd (dy - xhat mean(dy xhat)) in `out`, for `rms_forward`."""
    library, xp = backend_of(dy), namespace(dy)
    sums = library.empty(rstd.shape, rstd.dtype)
    for g, h, s in row_blocks(library, dy, xhat, sums):
        s[...] = sum_row(xp, upcast(g) * upcast(h))
    means = total(sums) / features
    for g, h, r, m, dx in row_blocks(library, dy, xhat, rstd, means, out):
        dx[...] = xp.astype((upcast(g) - upcast(h) * m) * r, dx.dtype, copy=False)
    return out


class RMSNorm(LayerNorm):
    """Compute y = gamma * x / sqrt(mean(x^2) + eps) over the features.

    Parameters are those of `LayerNorm`.  Ranks that share rows sum squares alone: half the words.
    """

    normalize = rms_forward, rms_backward
    parts = ("weight",)


def make_norm(build: Builder, name: str, hidden: int,
              architecture: Architecture) -> LayerNorm:
    """Make the norm of an architecture; parameters as in `LayerNorm`."""
    kind = RMSNorm if architecture.norm == "rms" else LayerNorm
    return kind(build, name, hidden, architecture.epsilon)


@prefer_backend_kernel
def swiglu_forward(x: Array, out: Array) -> Array:
    """Compute SiLU(g) u = g s u, where s = 1 / (1 + exp(-g)), for x = (g, u).

    x is (..., 2, features), and `out`, which receives the result, (..., features).  Source:
    Shazeer, arXiv 2002.05202.
    """
    library, xp = backend_of(x), namespace(x)
    for g, u, y in row_blocks(library, x[..., 0, :], x[..., 1, :], out):
        g, u = upcast(g), upcast(u)
        y[...] = xp.astype(g * sigmoid(xp, g) * u, y.dtype, copy=False)
    return out


@prefer_backend_kernel
def swiglu_backward(dy: Array, x: Array, out: Array) -> Array:
    """Compute dg = dy u s (1 + g (1 - s)) and du = dy g s in `out`, both as x has g and u."""
    library, xp = backend_of(x), namespace(x)
    for d, g, u, dg, du in row_blocks(library, dy, x[..., 0, :], x[..., 1, :], out[..., 0, :],
                                      out[..., 1, :]):
        d, g, u = upcast(d), upcast(g), upcast(u)
        s = sigmoid(xp, g)
        dg[...] = xp.astype(d * u * s * (1 + g * (1 - s)), dg.dtype, copy=False)
        du[...] = xp.astype(d * g * s, du.dtype, copy=False)
    return out


def sigmoid(xp: Any, a: Array) -> Array:
    """Compute 1 / (1 + exp(-a)); this form of it overflows nowhere."""
    return 0.5 + 0.5 * xp.tanh(0.5 * a)


class SwiGLU:
    """Compute SiLU(g) u from (g, u), (batch, seq, 2, features), in one space; save both."""

    parameters: list[Parameter] = []

    def __init__(self, space: Space, features: int) -> None:
        self.empty, self.empty_both = space.allocator(features), space.allocator(2, features)

    def forward(self, x: Array, within: Pass | None = None) -> tuple[Array, Any]:
        """Compute SiLU(g) u; save x."""
        return swiglu_forward(x, out=self.empty(x.dtype)), x

    def backward(self, dy: Array, saved: Any, within: Pass | None = None) -> Array:
        """Compute the gradients of g and u, (batch, seq, 2, features)."""
        return swiglu_backward(dy, saved, out=self.empty_both(dy.dtype))


def perceptron_layers(build: Builder, name: str, hidden: int, inner: int, gates: int,
                      has_bias: bool) -> list[Layer]:
    """Make two products and the function between them: GELU, or SiLU that gates a third.

    Names of parameters begin with `name`, such as "mlp".  There are `inner` features between the
    products, globally; `gates` are the products up, 2 where one gates the other.
    """
    if gates == 2:
        up = Linear(build, f"{name}.up", "up", (hidden, 2, inner), has_bias=has_bias)
        between = build.named(SwiGLU(build.inner, inner), f"{name}.swiglu", "swiglu")
    else:
        up = Linear(build, f"{name}.up", "up", (hidden, inner), adds_bias=False,
                    has_bias=has_bias)
        between = build.named(Gelu(up, build.inner, inner), f"{name}.gelu", "gelu")
    return [up, between, Linear(build, f"{name}.down", "down", (inner, hidden),
                                has_bias=has_bias)]
