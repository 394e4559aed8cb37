"""Define the layers of a Transformer, once for every scheme.

``forward(x) -> (y, saved)`` and ``backward(dy, saved) -> dx``, which adds to the parameters'
gradients.  No layer keeps anything between the two, so many micro-batches can be in flight.  An
`Overlap`, if one is passed, schedules communication during products.  The `Space` of an activation
says how it is divided; the scheme computes the products.  Arrays returned by forward and backward
are new and may be overwritten by the caller; their arguments are not changed.
"""

from typing import Any, Protocol, Sequence

from mm3d.arrays.backend import Array, namespace
from mm3d.grid.activations import Space
from mm3d.model import functional
from mm3d.model.parameters import Parameter
from mm3d.model.vectors import (Vector, add_backward, add_forward, gelu_backward, gelu_forward,
                                scale_backward, scale_forward)
from mm3d.schemes.overlap import Overlap
from mm3d.schemes.scheme import Product, Scheme


class Layer(Protocol):
    """Describe a part of a chain.

    `overlap` is passed on to the linear layers of one pass; without it each of their collectives
    is blocking.
    """

    @property
    def parameters(self) -> list[Parameter]: ...

    def forward(self, x: Array, overlap: Overlap | None = None) -> tuple[Array, Any]: ...

    def backward(self, dy: Array, saved: Any, overlap: Overlap | None = None) -> Array: ...


class Linear:
    """Compute y = x W + b, from one space into the other.

    Parameters
    ----------
    scheme : Scheme
        Whose product it is.
    name : str
        Of the layer.
    source, target : Space
        Of x and of y.
    shape : tuple of int
        Global shape of W: (in, out), or (in, 3, out) for queries, keys and values.
    dtype : dtype
        Of the parameters.
    units : tuple of int
        Features that stay together (a head's) in x and in y.
    master : dtype, optional
        Of their masters and gradients, if not `dtype`.
    adds : bool
        Whether the bias is added here; otherwise a `Gelu` that follows does it on the way.
    """

    def __init__(self, scheme: Scheme, name: str, source: Space, target: Space,
                 shape: tuple[int, ...], dtype: Any, units: tuple[int, int] = (1, 1),
                 master: Any = None, adds: bool = True) -> None:
        self.product: Product = scheme.product(source, target, shape, units)
        self.product.accumulate_float32, self.adds = master is not None, adds
        self.vector = Vector(target, shape[1:], units[1])
        grid = scheme.grid
        self.weight = Parameter(f"{name}.weight", grid, self.product.weight, shape, dtype,
                                self.product.gathered_along, master)
        self.bias = Parameter(f"{name}.bias", grid, self.vector.layout, shape[1:], dtype,
                              master=master)
        self.parameters = [self.weight, self.bias]

    def forward(self, x: Array, overlap: Overlap | None = None) -> tuple[Array, Any]:
        """Compute y = x W + b; return it with the data that the product keeps."""
        if overlap is None:
            y, saved = self.product.forward(x, self.weight.value)
        else:
            y, saved = overlap.forward(self, x)
        if self.adds:
            y = add_forward(y, self.bias.value, self.vector, out=y)
        return y, saved

    def backward(self, dy: Array, saved: Any, overlap: Overlap | None = None) -> Array:
        """Compute dx = dy W^T; add dW and db to the gradients."""
        if self.adds:
            self.bias.accumulate(add_backward(dy, self.vector, self.bias.has_master))
        if overlap is not None:
            return overlap.backward(self, dy, saved)
        dx, dW = self.product.backward(dy, self.weight.value, saved)
        self.weight.accumulate(dW)
        return dx

    def again(self, x: Array, overlap: Overlap | None = None) -> Any:
        """Recompute the data that `forward` keeps, without y."""
        return self.product.again(x, self.weight.value)


class LayerNorm:
    """Compute y = gamma * (x - mean) / sqrt(variance + eps) + beta over the features.

    Rows whose features are divided sum their statistics over the ranks that share them.
    """

    eps = 1e-5

    def __init__(self, name: str, space: Space, hidden: int, dtype: Any,
                 master: Any = None) -> None:
        self.space, self.hidden, self.empty = space, hidden, space.allocator(hidden)
        self.vector = Vector(space, (hidden,))
        self.weight, self.bias = (
            Parameter(f"{name}.{part}", space.grid, self.vector.layout, (hidden,), dtype,
                      master=master)
            for part in ("weight", "bias"))
        self.parameters = [self.weight, self.bias]

    def forward(self, x: Array, overlap: Overlap | None = None) -> tuple[Array, Any]:
        """Compute the normalized rows times gamma, plus beta."""
        own = self.space.grid.backend.empty(x.shape, x.dtype)    # never gathered
        xhat, rstd = functional.normalize_forward(
            x, self.hidden, self.eps, self.space.sum_features, own)
        y = self.empty(x.dtype)
        y, gamma_l = scale_forward(xhat, self.weight.value, self.vector, out=y)
        y = add_forward(y, self.bias.value, self.vector, out=y)
        return y, (xhat, rstd, gamma_l)

    def backward(self, dy: Array, saved: Any, overlap: Overlap | None = None) -> Array:
        """Compute dx; add the gradients of gamma and beta."""
        xhat, rstd, gamma_l = saved
        self.bias.accumulate(add_backward(dy, self.vector, self.bias.has_master))
        dxhat = self.empty(dy.dtype)
        dxhat, dgamma = scale_backward(dy, xhat, gamma_l, self.vector, dxhat,
                                       self.weight.has_master)
        self.weight.accumulate(dgamma)
        return functional.normalize_backward(dxhat, xhat, rstd, self.hidden,
                                             self.space.sum_features, out=dxhat)


class Gelu:
    """Compute GELU, in its tanh form, of x + b with the output x and the bias b of a linear layer.

    Adding the bias here saves a pass over the widest activation in each direction.

    Parameters
    ----------
    linear : Linear
        The layer before, which holds the bias and does not add it.
    space : Space
        Of x.
    features : int
        Of x.
    """

    parameters: list[Parameter] = []    # the bias is the linear layer's

    def __init__(self, linear: Linear, space: Space, features: int) -> None:
        self.bias, self.vector = linear.bias, linear.vector
        self.empty = space.allocator(features)

    def forward(self, x: Array, overlap: Overlap | None = None) -> tuple[Array, Any]:
        """Compute GELU of x + b; keep x and this rank's features of b."""
        y, b_l = gelu_forward(x, self.bias.value, self.vector, out=self.empty(x.dtype))
        return y, (x, b_l)

    def backward(self, dy: Array, saved: Any, overlap: Overlap | None = None) -> Array:
        """Compute dy times the slope of GELU at x + b; add db to the bias' gradient."""
        x, b_l = saved
        dx, db = gelu_backward(dy, x, b_l, self.vector, self.empty(dy.dtype),
                               self.bias.has_master)
        self.bias.accumulate(db)
        return dx


class Attention:
    """Compute multi-head attention from (batch, seq, 3, features) to (batch, seq, features).

    Heads are divided like the features.  Where the positions of a sequence are divided, each rank
    keeps its queries and gathers the keys and values along the sequence; their gradients are
    reduce-scattered.
    """

    parameters: list[Parameter] = []

    def __init__(self, space: Space, features: int, head: int, causal: bool) -> None:
        self.space, self.head, self.causal = space, head, causal
        self.empty = space.allocator(features, unit=head)
        self.empty_qkv = space.allocator(3, features, unit=head)
        axis = space.sequence
        self.split = None if axis is None else space.rows_split(axis.name)

    def _by_head(self, a: Array) -> Array:
        heads = a.shape[-1] // self.head
        return namespace(a).reshape(a, a.shape[:-1] + (heads, self.head))

    def _gathered(self, qkv: Array) -> tuple[Array, Array, Array]:
        by_head = self._by_head(qkv)
        kv = by_head[:, :, 1:, ...]
        if self.split is not None:
            kv = self.split.all_gather(kv)
        return by_head[:, :, 0, ...], kv[:, :, 0, ...], kv[:, :, 1, ...]

    def forward(self, x: Array, overlap: Overlap | None = None) -> tuple[Array, Any]:
        """Compute this rank's block of (batch, seq, features) from that of Q, K and V."""
        q, k, v = self._gathered(x)
        y = self.empty(x.dtype)
        _, lse = functional.attention_forward(q, k, v, self.space.first_position, self.causal,
                                              out=self._by_head(y))
        return y, (x, lse)

    def backward(self, dy: Array, saved: Any, overlap: Overlap | None = None) -> Array:
        """Compute the gradients of Q, K and V, in one array."""
        x, lse = saved
        q, k, v = self._gathered(x)
        dx = self.empty_qkv(x.dtype)
        by_head = self._by_head(dx)
        dkv = by_head[:, :, 1:, ...]
        if self.split is not None:
            dkv = self.split.term((k.shape[0], k.shape[1], 2, *k.shape[2:]), x.dtype)
        functional.attention_backward(
            self._by_head(dy), q, k, v, lse, self.space.first_position, self.causal,
            by_head[:, :, 0, ...], dkv[:, :, 0, ...], dkv[:, :, 1, ...])
        if self.split is not None:
            by_head[:, :, 1:, ...] = self.split.reduce_scatter(dkv)
        return dx


class Chain:
    """Apply layers one after another."""

    def __init__(self, *layers: Layer) -> None:
        self.layers = layers
        self.parameters = [p for layer in layers for p in layer.parameters]

    def forward(self, x: Array, overlap: Overlap | None = None) -> tuple[Array, Any]:
        """Compute the last layer's output; return it with the data that each layer keeps."""
        return _through(self.layers, x, overlap)

    def backward(self, dy: Array, saved: Any, overlap: Overlap | None = None) -> Array:
        """Compute the gradient through all layers, from the last to the first."""
        for layer, kept in zip(reversed(self.layers), reversed(saved)):
            dy = layer.backward(dy, kept, overlap)
        return dy

    def again(self, x: Array, overlap: Overlap | None = None) -> Any:
        """Recompute the data that `forward` keeps, without y and the last layer's product."""
        x, saved = _through(self.layers[:-1], x, overlap)
        return [*saved, self.layers[-1].again(x, overlap)]


def _through(layers: Sequence[Layer], x: Array,
             overlap: Overlap | None) -> tuple[Array, list]:
    """Apply `layers` to x; return the output and the data that each of them keeps."""
    saved = []
    for layer in layers:
        x, kept = layer.forward(x, overlap)
        saved.append(kept)
    return x, saved


class Residual(Chain):
    """Compute x + f(x), with f the chain of the given layers."""

    def forward(self, x: Array, overlap: Overlap | None = None) -> tuple[Array, Any]:
        """Compute x + f(x)."""
        y, saved = super().forward(x, overlap)
        y += x
        return y, saved

    def backward(self, dy: Array, saved: Any, overlap: Overlap | None = None) -> Array:
        """Compute dy plus the gradient through f."""
        dx = super().backward(dy, saved, overlap)
        dx += dy
        return dx
