"""Define the layers of a Transformer, once for every scheme.

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

from typing import Any, Callable, Protocol

from mm3d.arrays.backend import Array, accumulation_dtype, backend_of, namespace
from mm3d.arrays.elementwise import row_blocks
from mm3d.grid.activations import Space
from mm3d.model import functional
from mm3d.model.architecture import Architecture
from mm3d.model.builder import Builder
from mm3d.model.functional import prefer_backend_kernel, sum_row, upcast
from mm3d.model.parameters import Parameter
from mm3d.model.vectors import (Vector, add_backward, add_forward, add_gelu_backward,
                                add_gelu_forward, scale_backward, scale_forward)
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

    Parameters
    ----------
    build : Builder
        Makes W and b.
    name : str
        Name of the layer in its block, such as "mlp.up".
    way : {"up", "down"}
        "up" from the outer space into the inner one, "down" back.
    shape : tuple of int
        Global shape of W: (in, out), or (in, n, out) for n products with the same x, such as
        queries, keys and values.
    unit : int
        Number of neighbouring features in the inner space that stay together, such as a head's.
    adds_bias : bool
        Whether the layer adds b; otherwise a `Gelu` that follows adds it.
    has_bias : bool
        Whether there is b at all.
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
            y = add_forward(y, shared.vector_of(self.bias), self.vector, out=y)
        return y, saved

    def backward(self, dy: Array, saved: Any, within: Pass | None = None) -> Array:
        """Compute dx = dy W^T; add dW and db to the gradients."""
        shared = within or ALONE
        if self.adds_bias:
            shared.accumulate_terms(self.bias, self.vector,
                                    add_backward(dy, self.bias.has_master))
        return shared.backward(self, dy, saved)

    def backward_weights(self, operands: Any, within: Pass) -> None:
        """Compute dW = x^T dy; add it to the gradient."""
        within.backward_weights(self, operands)

    def recompute_saved(self, x: Array, within: Pass | None = None) -> Any:
        """Recompute the data that `forward` saves, without y."""
        return self.product.recompute_saved(x)


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
        gamma, *beta = ((within or ALONE).vector_of(one) for one in self.parameters)
        y, gamma_l = scale_forward(xhat, gamma, self.vector, y, *beta)
        return y, (xhat, rstd, gamma_l)

    def backward(self, dy: Array, saved: Any, within: Pass | None = None) -> Array:
        """Compute dx; add the gradients of gamma and beta."""
        xhat, rstd, gamma_l = saved
        dxhat, dgamma, *dbeta = scale_backward(dy, xhat, gamma_l, self.empty(dy.dtype),
                                               self.weight.has_master, self.bias is not None)
        for term in dbeta:
            (within or ALONE).accumulate_terms(self.bias, self.vector, term)
        (within or ALONE).accumulate_terms(self.weight, self.vector, dgamma)
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
        y, b_l = add_gelu_forward(x, (within or ALONE).vector_of(self.bias), self.vector,
                                  out=self.empty(x.dtype))
        return y, (x, b_l)

    def backward(self, dy: Array, saved: Any, within: Pass | None = None) -> Array:
        """Compute dx = dy GELU'(x + b); add db to the gradient of the bias."""
        x, b_l = saved
        if b_l is None:
            return functional.gelu_backward(dy, x, out=self.empty(dy.dtype))
        dx, db = add_gelu_backward(dy, x, b_l, self.empty(dy.dtype), self.bias.has_master)
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
