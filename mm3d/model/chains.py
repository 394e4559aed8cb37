"""Apply layers one after another: chains, residual blocks, and layers that are recomputed.

All policies of `mm3d.model.recomputation` are built with one wrapper, `Recomputed`, around layers
that save only their input.  It is the same for every scheme and has no state.
"""

import math
from typing import Any, Iterator, Sequence

from mm3d.arrays.backend import Array, backend_of, host_dtype
from mm3d.model.layers import Layer, Linear
from mm3d.model.parameters import Parameter
from mm3d.model.vectors import Vector
from mm3d.schemes.passes import Pass


class Chain:
    """Apply layers one after another."""

    def __init__(self, *layers: Layer) -> None:
        self.layers = layers
        self.parameters = [p for layer in layers for p in layer.parameters]

    def forward(self, x: Array, within: Pass | None = None) -> tuple[Array, Any]:
        """Compute the last layer's output; return it with the data that each layer saves."""
        return _apply_layers(self.layers, x, within)

    def backward(self, dy: Array, saved: Any, within: Pass | None = None) -> Array:
        """Compute the gradient through all layers, from the last to the first."""
        for layer, kept in zip(reversed(self.layers), reversed(saved)):
            dy = layer.backward(dy, kept, within)
        return dy

    def recompute_saved(self, x: Array, within: Pass | None = None) -> Any:
        """Recompute the data that `forward` saves, without y and the last layer's product."""
        x, saved = _apply_layers(self.layers[:-1], x, within)
        return [*saved, self.layers[-1].recompute_saved(x, within)]


def _apply_layers(layers: Sequence[Layer], x: Array,
                  within: Pass | None) -> tuple[Array, list]:
    """Apply `layers` to x; return the output and the data that each of them saves."""
    saved = []
    for layer in layers:
        x, kept = layer.forward(x, within)
        saved.append(kept)
    return x, saved


class Residual(Chain):
    """Compute x + f(x), or x + dropout(f(x)), where f is the chain of the given layers."""

    def __init__(self, *layers: Layer, dropout: Any = None) -> None:
        super().__init__(*layers)
        self.dropout = dropout    # a `mm3d.model.dropout.Dropout`, or None

    def forward(self, x: Array, within: Pass | None = None) -> tuple[Array, Any]:
        """Compute x + f(x)."""
        y, saved = super().forward(x, within)
        if self.dropout is not None:
            y = self.dropout.apply(y, y)
        return backend_of(y).add_to(y, x), saved

    def backward(self, dy: Array, saved: Any, within: Pass | None = None) -> Array:
        """Compute dy plus the gradient through f."""
        dx = super().backward(dy if self.dropout is None else self.dropout.backward(dy, None),
                              saved, within)
        return backend_of(dx).add_to(dx, dy)


class Recomputed(Chain):
    """Apply layers one after another, and save only the input from forward to backward.

    Backward first recomputes the data that the layers would have saved, by the same operations in
    the same order, so results are the same to the bit.  The last layer is a linear one; its output
    is not needed, so its product is not recomputed.
    """

    def forward(self, x: Array, within: Pass | None = None) -> tuple[Array, Any]:
        """Compute the last layer's output; return it with x."""
        y = x
        for layer in self.layers:
            y = layer.forward(y, within)[0]
        return y, x

    def backward(self, dy: Array, saved: Any, within: Pass | None = None) -> Array:
        """Recompute the saved data; compute the gradient from the last layer to the first."""
        return super().backward(dy, self.recompute(saved, within), within)

    def recompute(self, x: Array, within: Pass | None = None) -> Any:
        """Recompute the data that the layers save."""
        return super().recompute_saved(x, within)

    def recompute_saved(self, x: Array, within: Pass | None = None) -> Any:
        """Return x, which is all that `forward` saves."""
        return x


def weighted_products(layer: Layer, backward: bool = False,
                      recomputed: bool = False) -> list[tuple[Linear, bool]]:
    """List the products with weights of a forward or a `backward` pass, in order.

    By this list `mm3d.schemes.overlap` gathers weights ahead.  Each is the layer that holds the
    weight, and whether the product is a backward one.  A `recomputed` forward computes saved data
    alone, so it leaves out a last linear layer.
    """
    if isinstance(layer, Linear):
        return [] if recomputed else [(layer, backward)]
    layers = getattr(layer, "layers", ())
    if not layers or recomputed and isinstance(layer, Recomputed):
        return []
    if not backward:
        return [use for one in layers
                for use in weighted_products(one, recomputed=recomputed and one is layers[-1])]
    first = ([] if not isinstance(layer, Recomputed) else
             weighted_products(Chain(*layers), recomputed=True))
    return first + [use for one in reversed(layers) for use in weighted_products(one, True)]


def vectors_of(layer: Layer) -> list[tuple[Parameter, Vector]]:
    """List the vectors that a forward pass gathers, in order, each with its storage."""
    return getattr(layer, "vectors", None) or [
        use for one in getattr(layer, "layers", ()) for use in vectors_of(one)]


def saved_arrays(saved: Any) -> Iterator[Array]:
    """Iterate over all arrays in saved data, each as often as it is there."""
    if isinstance(saved, (tuple, list)):
        for item in saved:
            yield from saved_arrays(item)
    elif hasattr(saved, "array"):
        yield saved.array
    elif hasattr(saved, "arrays"):
        yield from saved.arrays
    # Beside arrays are the place of masks, and the layers of `mm3d.schemes.passes.LaterWeights`.
    elif not (saved is None or isinstance(saved, int) or hasattr(saved, "parameters")):
        yield saved


def saved_bytes(saved: Any) -> int:
    """Count the bytes of the arrays in saved data, each array once."""
    arrays = {id(a): a for a in saved_arrays(saved)}
    return sum(math.prod(a.shape) * host_dtype(a).itemsize for a in arrays.values())
