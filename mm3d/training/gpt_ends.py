"""Build what stands around the layers of a GPT: the embedding, and norm, head and loss."""

from typing import Any

import numpy as np

from mm3d.arrays.backend import Array
from mm3d.grid.layout import Layout
from mm3d.model.cross_entropy import CrossEntropy
from mm3d.model.embedding import Embedding
from mm3d.model.heads import Head, TiedHead
from mm3d.model.initial_values import InitialValues, draw_parameter
from mm3d.model.layers import LayerNorm
from mm3d.model.parameters import Parameter
from mm3d.model.transformer import Transformer
from mm3d.model.vectors import Vector
from mm3d.training.tied import TiedWeight


class Input:
    """Hold the embedding of the first stage.

    Parameters
    ----------
    chunk : Transformer
        Layers of this rank, which give the spaces and types.
    vocab : int
        Number of tokens.
    seed : int
        Seed of the model.
    values : InitialValues
        Initial values.
    """

    def __init__(self, chunk: Transformer, vocab: int, seed: int, values: InitialValues) -> None:
        make = ParameterMaker(chunk, seed, values)
        product = table_product(chunk, vocab)
        weight = make("embedding.weight", product.weight, (vocab, chunk.hidden),
                      product.gathered_along)
        positions = make("positions.weight", Layout(product.weight.spec),
                         (chunk.shape[1], chunk.hidden))
        self.embedding = Embedding(chunk.outer, product.weight, weight, positions)
        self.parameters = self.embedding.parameters


class Output:
    """Hold norm, head and loss of the last stage.

    Parameters
    ----------
    chunk, vocab, seed, values
        As for `Input`.
    tied : bool
        Whether the head uses the embedding's table.
    table : Parameter or None
        The table, if it is on this rank too.
    ignored, smoothing, z_loss
        As for `mm3d.model.cross_entropy.CrossEntropy`.
    """

    def __init__(self, chunk: Transformer, vocab: int, seed: int, values: InitialValues,
                 tied: bool, table: Parameter | None, ignored: int, smoothing: float,
                 z_loss: float) -> None:
        make, hidden = ParameterMaker(chunk, seed, values), chunk.hidden
        vector = Vector(chunk.outer, (hidden,))
        self.norm = LayerNorm(vector, *(make(f"norm.{part}", vector.layout, (hidden,))
                                        for part in ("weight", "bias")))
        self.parameters = list(self.norm.parameters)
        if not tied:
            product = chunk.scheme.product(chunk.outer, chunk.inner, (hidden, vocab), (1, 1))
            self.head = Head(product, make("head.weight", product.weight, (hidden, vocab),
                                           product.gathered_along))
            self.parameters.append(self.head.weight)
        else:
            product, weight = table_product(chunk, vocab), table and TiedWeight(table)
            if weight is None:
                weight = make("embedding.weight", product.weight, (vocab, hidden),
                              product.gathered_along)
                weight.first_copy = False
                self.parameters.append(weight)
            self.head = TiedHead(product, weight)
        self.loss = CrossEntropy(chunk.inner, vocab, ignored, smoothing, z_loss)

    def forward(self, y: Array, targets: np.ndarray) -> tuple[Array, Any]:
        """Compute the sum of the losses of this rank's rows from the output of the layers."""
        x, norm = self.norm.forward(y)
        logits, head = self.head.forward(x)
        total, loss = self.loss.forward(logits, targets)
        return total, (norm, head, loss)

    def backward(self, saved: Any, scale: float) -> Array:
        """Compute `scale` times the gradient by the output of the layers."""
        norm, head, loss = saved
        return self.norm.backward(self.head.backward(self.loss.backward(loss, scale), head), norm)

    def zero_gradients(self) -> None:
        """Set the gradient of the head to zero where it is none of the parameters."""
        if isinstance(self.head.weight, TiedWeight):
            self.head.weight.grad[...] = 0


def table_product(chunk: Transformer, vocab: int) -> Any:
    """Create the product down whose weight is the embedding's table."""
    return chunk.scheme.product(chunk.inner, chunk.outer, (vocab, chunk.hidden), (1, 1))


def build_table(chunk: Transformer, vocab: int) -> tuple[Layout, tuple[int, int]]:
    """Return layout and shape of the embedding's table."""
    return table_product(chunk, vocab).weight, (vocab, chunk.hidden)


class ParameterMaker:
    """Create parameters in the types of a Transformer, with their initial values."""

    def __init__(self, chunk: Transformer, seed: int, values: InitialValues) -> None:
        self.chunk, self.seed, self.values = chunk, seed, values

    def __call__(self, name: str, layout: Layout, shape: tuple[int, ...],
                 gathered_along: Any = None) -> Parameter:
        chunk = self.chunk
        made = Parameter(name, chunk.grid, layout, shape, chunk.library_dtype(chunk.dtype),
                         gathered_along, chunk.library_dtype(chunk.master))
        draw_parameter(made, self.seed, self.values)
        return made
