"""Apply layers one after another, as chains and residual blocks; find the arrays they save."""

import math
from typing import Any, Iterator, Sequence

from mm3d.arrays.backend import Array, host_dtype
from mm3d.model.layers import Layer
from mm3d.schemes.overlap import Overlap


class Chain:
    """Apply layers one after another."""

    def __init__(self, *layers: Layer) -> None:
        self.layers = layers
        self.parameters = [p for layer in layers for p in layer.parameters]

    def forward(self, x: Array, overlap: Overlap | None = None) -> tuple[Array, Any]:
        """Compute the last layer's output; return it with the data that each layer saves."""
        return _apply_layers(self.layers, x, overlap)

    def backward(self, dy: Array, saved: Any, overlap: Overlap | None = None) -> Array:
        """Compute the gradient through all layers, from the last to the first."""
        for layer, kept in zip(reversed(self.layers), reversed(saved)):
            dy = layer.backward(dy, kept, overlap)
        return dy

    def backward_input(self, dy: Array, saved: Any,
                       overlap: Overlap | None = None) -> tuple[Array, list]:
        """Compute the gradient through all layers, but not those of the weights.

        Returns
        -------
        dx, operands : Array, list
            The gradient of the input; and for each layer, from the last to the first, what its
            `backward_weights` needs, None for layers without weights.
        """
        operands = []
        for layer, kept in zip(reversed(self.layers), reversed(saved)):
            if hasattr(layer, "backward_input"):
                dy, needed = layer.backward_input(dy, kept, overlap)
            else:
                dy, needed = layer.backward(dy, kept, overlap), None
            operands.append(needed)
        return dy, operands

    def backward_weights(self, operands: Any, overlap: Overlap | None = None) -> None:
        """Add the gradients of all weights, from the last layer to the first."""
        for layer, needed in zip(reversed(self.layers), operands, strict=True):
            if needed is not None:
                layer.backward_weights(needed, overlap)

    def recompute_saved(self, x: Array, overlap: Overlap | None = None) -> Any:
        """Recompute the data that `forward` saves, without y and the last layer's product."""
        x, saved = _apply_layers(self.layers[:-1], x, overlap)
        return [*saved, self.layers[-1].recompute_saved(x, overlap)]


def _apply_layers(layers: Sequence[Layer], x: Array,
                  overlap: Overlap | None) -> tuple[Array, list]:
    """Apply `layers` to x; return the output and the data that each of them saves."""
    saved = []
    for layer in layers:
        x, kept = layer.forward(x, overlap)
        saved.append(kept)
    return x, saved


class Residual(Chain):
    """Compute x + f(x), where f is the chain of the given layers."""

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

    def backward_input(self, dy: Array, saved: Any,
                       overlap: Overlap | None = None) -> tuple[Array, list]:
        """Compute dy plus the gradient through f, but not those of the weights."""
        dx, operands = super().backward_input(dy, saved, overlap)
        dx += dy
        return dx, operands


def saved_arrays(saved: Any) -> Iterator[Array]:
    """Iterate over all arrays in saved data, each as often as it is there."""
    if isinstance(saved, (tuple, list)):
        for item in saved:
            yield from saved_arrays(item)
    elif hasattr(saved, "array"):
        yield saved.array
    elif hasattr(saved, "arrays"):
        yield from saved.arrays
    elif saved is not None and not isinstance(saved, int):    # the place of masks
        yield saved


def saved_bytes(saved: Any) -> int:
    """Count the bytes of the arrays in saved data, each array once."""
    arrays = {id(a): a for a in saved_arrays(saved)}
    return sum(math.prod(a.shape) * host_dtype(a).itemsize for a in arrays.values())
