"""Compute layers again in backward, and list the products with weights in their order.

What `mm3d.model.recomputation` names is built of one wrapper, `Recomputed`, around those layers of
which only the input is kept.  It is the same for every scheme, and holds nothing itself.
"""

from typing import Any

from mm3d.arrays.backend import Array
from mm3d.model.layers import Chain, Layer, Linear
from mm3d.schemes.overlap import Overlap


class Recomputed(Chain):
    """Apply layers one after another, and keep only the input from forward to backward.

    Backward first recomputes the data that the layers would have kept, with the same operations in
    the same order, and so to the same bit.  The last of them is a linear layer; its output is not
    needed, and it does not multiply again.
    """

    def forward(self, x: Array, overlap: Overlap | None = None) -> tuple[Array, Any]:
        """Compute the last layer's output; return it with x."""
        y = x
        for layer in self.layers:
            y = layer.forward(y, overlap)[0]
        return y, x

    def backward(self, dy: Array, saved: Any, overlap: Overlap | None = None) -> Array:
        """Compute the gradient through all layers, from the last to the first."""
        return super().backward(dy, self.recompute(saved, overlap), overlap)

    def recompute(self, x: Array, overlap: Overlap | None = None) -> Any:
        """Recompute the data that the layers keep."""
        return super().again(x, overlap)

    def again(self, x: Array, overlap: Overlap | None = None) -> Any:
        """Return x, the data that `forward` keeps."""
        return x


def weighted_products(layer: Layer, backward: bool = False,
                      again: bool = False) -> list[tuple[Linear, bool]]:
    """List the products with weights of a forward or a `backward` pass, in their order.

    Parameters
    ----------
    layer : Layer
        The layer or chain of layers that is passed through.
    backward : bool
        Whether the pass is backward.
    again : bool
        Whether forward is computed again, for what it keeps alone.

    Returns
    -------
    list of (Linear, bool)
        For each product the layer that holds the weight, and whether the product is backward's.
    """
    if isinstance(layer, Linear):
        return [] if again else [(layer, backward)]
    layers = getattr(layer, "layers", ())
    if not layers or again and isinstance(layer, Recomputed):
        return []
    if not backward:
        return [use for one in layers
                for use in weighted_products(one, again=again and one is layers[-1])]
    first = weighted_products(Chain(*layers), again=True) if isinstance(layer, Recomputed) else []
    return first + [use for one in reversed(layers) for use in weighted_products(one, True)]
