"""Compute logits from activations, with the head's own weight or with the embedding's table."""

from typing import Any

from mm3d.arrays.backend import Array
from mm3d.model.builder import Builder
from mm3d.model.layers import Linear
from mm3d.model.parameters import Parameter


class Head(Linear):
    """Compute logits = x W, in the inner space.

    Parameters
    ----------
    build : Builder
        Makes W.
    hidden, vocab : int
        Global sizes of W, hidden x vocab.
    """

    table = None    # of the embedding

    def __init__(self, build: Builder, hidden: int, vocab: int) -> None:
        super().__init__(build, "head", "up", (hidden, vocab), has_bias=False)


class TiedHead:
    """Compute logits = x E^T, with the table E of the embedding.

    On the rank of the table the weight is a second use of it, with a gradient of its own.  Both
    are summed at the end of a step, the embedding's first, so that the result does not depend on
    the order of forward and backward passes, nor on the stages where embedding and head are.

    Parameters
    ----------
    build : Builder
        Makes the copy.
    hidden, vocab : int
        Global sizes of E, vocab x hidden.
    table : Parameter, optional
        E; without it a copy is made, as the table is on another stage.
    """

    def __init__(self, build: Builder, hidden: int, vocab: int,
                 table: Parameter | None = None) -> None:
        build.named(self, "head", "head")
        shape, self.table, self.parameters = (vocab, hidden), table, []
        self.product = build.scheme.product(build.inner, build.outer, shape, (1, 1))
        if table is not None:
            self.weight = table.twin()
        else:
            copy = self.weight = build.create_parameter(
                "embedding.weight", self.product.weight, shape, self.product.gathered_along)
            copy.first_copy, self.parameters = False, [copy]
        self.product.use_weight(self.weight)

    def forward(self, x: Array, within: None = None) -> tuple[Array, Any]:
        """Compute the logits, in the inner space; return them with x."""
        return self.product.forward_transposed(x, self.weight.value), x

    def backward(self, dlogits: Array, saved: Any, within: None = None) -> Array:
        """Compute dx = dlogits E; add dE to the gradient."""
        dx, dE = self.product.backward_transposed(dlogits, saved, self.weight.value)
        self.weight.accumulate(dE)
        return dx
