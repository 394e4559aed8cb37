"""Compute logits from activations, with a weight of the head or with that of the embedding."""

from typing import Any, Protocol

from mm3d.arrays.backend import Array
from mm3d.model.parameters import Parameter
from mm3d.schemes.product import Product


class Weight(Protocol):
    """Describe what a head needs of its weight: a `Parameter` has it."""

    value: Array
    has_master: bool

    def accumulate(self, gradient: Array | None) -> None: ...


class TiedWeight:
    """Use the table of the embedding in the head on the same rank, with a gradient of its own.

    Both gradients are summed at the end of a step, that of the embedding first, so that the
    result does not depend on the order of forward and backward passes, nor on the stages where
    embedding and head are.

    Parameters
    ----------
    table : Parameter
        The table.
    """

    def __init__(self, table: Parameter) -> None:
        self.table, self.has_master, self._twin = table, table.has_master, table.twin()

    @property
    def value(self) -> Array:
        """Return the table's value."""
        return self.table.value

    @property
    def grad(self) -> Array:
        """Return the head's gradient."""
        return self._twin.grad

    def accumulate(self, gradient: Array | None) -> None:
        """Add `gradient` to the head's."""
        self._twin.accumulate(gradient)

    def zero_gradient(self) -> None:
        """Set the head's gradient to zero."""
        self._twin.zero_gradient()

    def add_to_table(self) -> None:
        """Add the head's gradient to the table's."""
        self.table.grad += self._twin.grad


class Head:
    """Compute logits = x W.

    Parameters
    ----------
    product : Product
        The scheme's product up, (hidden, vocab).
    weight : Parameter
        W.
    """

    def __init__(self, product: Product, weight: Parameter) -> None:
        self.product, self.weight, self.parameters = product, weight, [weight]
        self.product.accumulate_float32 = weight.has_master

    def forward(self, x: Array, overlap: None = None) -> tuple[Array, Any]:
        """Compute the logits, in the inner space; return them with the data for backward."""
        return self.product.forward(x, self.weight.value)

    def backward(self, dlogits: Array, saved: Any, overlap: None = None) -> Array:
        """Compute dx = dlogits W^T; add dW to the gradient."""
        dx, dW = self.product.backward(dlogits, self.weight.value, saved)
        self.weight.accumulate(dW)
        return dx


class TiedHead:
    """Compute logits = x E^T, with the table E of the embedding.

    Parameters
    ----------
    product : Product
        The scheme's product down, (vocab, hidden).
    weight : Weight
        E: a copy of the table on another stage, or a `TiedWeight`.
    """

    def __init__(self, product: Product, weight: Weight) -> None:
        self.product, self.weight = product, weight
        self.parameters = [weight] if isinstance(weight, Parameter) else []
        self.product.accumulate_float32 = weight.has_master

    def forward(self, x: Array, overlap: None = None) -> tuple[Array, Any]:
        """Compute the logits, in the inner space; return them with x."""
        return self.product.forward_transposed(x, self.weight.value), x

    def backward(self, dlogits: Array, saved: Any, overlap: None = None) -> Array:
        """Compute dx = dlogits E; add dE to the gradient."""
        dx, dE = self.product.backward_transposed(dlogits, saved, self.weight.value)
        self.weight.accumulate(dE)
        return dx
