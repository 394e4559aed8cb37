"""Compute what stands around the layers of a GPT: the embedding, and norm, head and loss."""

import math
import numbers
from typing import Any

from mm3d.arrays.backend import Array
from mm3d.model.cross_entropy import Targets
from mm3d.model.gpt_spec import output_specs
from mm3d.model.heads import TiedWeight
from mm3d.model.initial_values import InitialValues, draw_parameter
from mm3d.model.specs import Builder
from mm3d.schemes.product import Product


class Output:
    """Hold norm, head and loss of the last stage.

    Parameters
    ----------
    builder : Builder
        Builds the layers; if it has built the embedding, a tied head uses its table.
    vocab, hidden, tied
        As for `mm3d.model.gpt_spec.output_specs`.
    **options
        Its further parameters.
    """

    def __init__(self, builder: Builder, vocab: int, hidden: int, tied: bool,
                 **options: Any) -> None:
        self.layers = builder.build_layers(output_specs(vocab, hidden, tied, **options))
        self.norm, self.head, self.loss = self.layers
        self.parameters = [*self.norm.parameters, *self.head.parameters]

    def forward(self, y: Array, targets: Targets) -> tuple[Array, Any]:
        """Compute the sum of the losses of this rank's rows from the output of the layers."""
        x, norm = self.norm.forward(y)
        logits, head = self.head.forward(x)
        total, loss = self.loss.forward(logits, targets)
        return total, (norm, head, loss)

    def backward(self, targets: Targets, saved: Any) -> Array:
        """Compute the scaled gradient by the output of the layers; the logits are lost."""
        norm, head, loss = saved
        return self.norm.backward(
            self.head.backward(self.loss.backward(targets, loss), head), norm)

    def zero_gradients(self) -> None:
        """Set the gradient of the head to zero where it is none of the parameters."""
        if isinstance(self.head.weight, TiedWeight):
            self.head.weight.zero_gradient()

    def add_tied_gradient(self) -> None:
        """Add the gradient of a tied head to that of the embedding on the same rank."""
        if isinstance(self.head.weight, TiedWeight):
            self.head.weight.add_to_table()


def draw_ends(parameters: list, seed: int, values: InitialValues) -> None:
    """Draw the initial values of parameters of the ends."""
    for p in parameters:
        draw_parameter(p, seed, values)


def check_scheme(scheme: Any, tied: bool) -> None:
    """Raise ValueError for a scheme that lacks what a GPT needs beyond a Transformer.

    That is the layout of the table, and with a tied head products with it transposed.
    """
    missing = [] if hasattr(scheme, "down_weight") else ["down_weight"]
    if tied:
        outer, inner = scheme.spaces(1, 1)
        product = type(scheme.product(inner, outer, (1, 1), (1, 1)))
        missing += [name for name in ("forward_transposed", "backward_transposed")
                    if getattr(product, name) is getattr(Product, name)]
    if missing:
        raise ValueError(f"scheme {scheme.name!r} has no {' and no '.join(missing)}: a "
                         f"{'tied ' * tied}GPT needs it, another scheme would do")


def check_vocabulary(vocab: int, label_smoothing: float, z_loss: float) -> None:
    """Raise ValueError for a vocabulary or factors of the loss that make no sense."""
    if not isinstance(vocab, numbers.Integral) or isinstance(vocab, bool) or vocab < 1:
        raise ValueError(f"vocab={vocab!r} should be a whole number of at least 1")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing!r} should be at least 0 and below 1")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss={z_loss!r} should be a number of at least 0")
