"""Gate a perceptron by SiLU; and list the layers of a perceptron with any function."""

from typing import Any

from mm3d.arrays.backend import Array, backend_of, namespace
from mm3d.arrays.elementwise import row_blocks
from mm3d.grid.activations import Space
from mm3d.model.builder import Builder
from mm3d.model.functional import prefer_backend_kernel, upcast
from mm3d.model.layers import Gelu, Layer, Linear
from mm3d.model.parameters import Parameter
from mm3d.schemes.passes import Pass


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
