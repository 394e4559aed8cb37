"""Layers that are computed again in backward, and the order in which weights are used.

What `mm3d.recompute` names is built of one wrapper, `Recomputed`, around those layers of which
only the input is kept.  It is the same for every scheme, and holds nothing itself.
"""

from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Iterator

from mm3d.axis import Pending
from mm3d.backend import Array
from mm3d.layers import Chain, Layer, Linear

Use = tuple[Linear, bool]    # a product with the weight of a layer, and whether it is backward's


class Recomputed(Chain):
    """Layers one after another, of which the input alone is kept from forward to backward.

    Backward first computes again what they would have kept, with the same operations in the same
    order, and so to the same bit; the last of them is a linear layer, whose output nothing needs
    and which does not multiply again.
    """

    def forward(self, x: Array) -> tuple[Array, Any]:
        """The last layer's output, and x."""
        y = x
        for layer in self.layers:
            y = layer.forward(y)[0]
        return y, x

    def backward(self, dy: Array, saved: Any) -> Array:
        """The gradient through all layers, from the last to the first."""
        return super().backward(dy, self.recompute(saved))

    def recompute(self, x: Array) -> Any:
        """What the layers keep."""
        return super().again(x)

    def again(self, x: Array) -> Any:
        """What `forward` keeps: x."""
        return x


def order(layer: Layer, back: bool = False, again: bool = False) -> list[Use]:
    """The products with weights of a forward or `back` of a backward pass, one after another.

    Parameters
    ----------
    layer : Layer
        What is passed through, such as a chain of all.
    back : bool
        Whether backward.
    again : bool
        Whether forward is computed again, for what it keeps alone.
    """
    if isinstance(layer, Linear):
        return [] if again else [(layer, back)]
    layers = getattr(layer, "layers", ())
    if not layers or again and isinstance(layer, Recomputed):
        return []
    if not back:
        return [use for one in layers for use in order(one, again=again and one is layers[-1])]
    first = order(Chain(*layers), again=True) if isinstance(layer, Recomputed) else []
    return first + [use for one in reversed(layers) for use in order(one, back=True)]


@contextmanager
def one_ahead(uses: list[Use]) -> Iterator[None]:
    """Within the block each weight sets out while the product before it is computed.

    Parameters
    ----------
    uses : list of (Linear, bool)
        The products in the order in which the block computes them, as `order` gives them.
    """
    following, linears = dict(pairwise(uses)), dict.fromkeys(linear for linear, _ in uses)
    for linear in linears:
        linear.recall()
        linear.product.ahead = partial(_send, following, linear)
    try:
        yield
    finally:
        for linear in linears:
            del linear.product.ahead


def _send(following: dict[Use, Use], linear: Linear, back: bool) -> Pending | None:
    """Let the weight set out that is used after that of `linear`."""
    if (linear, back) not in following:
        return None
    then, then_back = following[linear, back]
    return then.send(then_back)
