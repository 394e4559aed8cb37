"""Specs: the layers of a model before there are ranks and arrays.

A `LayerSpec` states all that is known of a layer from its sizes: its parameters, its products,
what it moves and keeps on a grid, and how to build it.  Chains of specs say in which order layers
work, which of them are residual blocks, and which are computed again in backward.  The model that
runs (`mm3d.model.transformer`) and the closed forms (`mm3d.model.cost`) both come from the same
specs, so a new kind of layer is one spec with its layer.
"""

from abc import ABC, abstractmethod
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Iterable, Iterator, NamedTuple

from mm3d.grid.activations import Space
from mm3d.model.layers import Layer
from mm3d.schemes.closed_form import Move, ProductShape
from mm3d.schemes.parallelism import Parallelism
from mm3d.schemes.scheme import Scheme


class Saved(NamedTuple):
    """Words kept from forward to backward, over all ranks.

    Attributes
    ----------
    input : int
        Of the layer's, or the chain's, own input; 0 where that is not kept.
    activations : int
        Of other activations.
    rest : int
        Of statistics of rows, and of gathered vectors and operands.
    """

    input: int = 0
    activations: int = 0
    rest: int = 0

    def followed_by(self, more: "Saved") -> "Saved":
        """What is kept of this layer and of one that follows it."""
        return Saved(self.input, self.activations + more.input + more.activations,
                     self.rest + more.rest)


class Work(NamedTuple):
    """`times` passes of layers like `layer`; see `LayerSpec.moves` for `again`."""

    times: int
    layer: "LayerSpec"
    again: bool = False


class Builder:
    """Builds layers from specs, under their names in the model.

    Parameters
    ----------
    scheme : Scheme
        Whose grid and products they use.
    outer, inner : Space
        Where activations lie outside and inside a pair of linear layers.
    dtype : dtype
        Of parameters and activations.
    master : dtype, optional
        Of masters and gradients, if not `dtype`.
    """

    def __init__(self, scheme: Scheme, outer: Space, inner: Space, dtype: Any,
                 master: Any = None) -> None:
        self.scheme, self.outer, self.inner = scheme, outer, inner
        self.dtype, self.master = dtype, master
        self._prefix, self._numbers, self._built = "", Counter(), {}

    def build(self, specs: Iterable["Spec"]) -> list[Layer]:
        """Build the layers of `specs`, in order."""
        return [layer for spec in specs for layer in spec.build(self)]

    def full_name(self, name: str) -> str:
        """The name in the model of what is called `name` where the builder is now."""
        return ".".join(filter(None, (self._prefix, name)))

    def add(self, layer: Layer, name: str, part: str) -> list[Layer]:
        """Give a layer its name in the model and that of its part, and return it in a list."""
        layer.name, layer.part = self.full_name(name), part
        self._built[layer.name] = layer
        return [layer]

    def find(self, name: str) -> Layer:
        """The layer called `name` that was built before in the same block.

        Raises
        ------
        KeyError
            When there is none.
        """
        return self._built[self.full_name(name)]

    @contextmanager
    def number(self, name: str) -> Iterator[None]:
        """Put ``name.N.`` before all names within the block, N counting these blocks from 0."""
        before = self._prefix
        if name:
            self._prefix = self.full_name(f"{name}.{self._numbers[self.full_name(name)]}")
            self._numbers[f"{before}.{name}" if before else name] += 1
        try:
            yield
        finally:
            self._prefix = before


class Spec(ABC):
    """A layer or a chain of layers, without ranks and arrays."""

    @abstractmethod
    def in_forward(self) -> Iterator[Work]:
        """The layers that work in forward."""

    @abstractmethod
    def in_again(self) -> Iterator[Work]:
        """Those that work where forward is computed again for what it keeps alone."""

    @abstractmethod
    def in_backward(self, again: bool = False) -> Iterator[Work]:
        """The layers that work in backward, after a forward or after an `again`."""

    @abstractmethod
    def repeated(self) -> Iterator[Work]:
        """The layers whose forward is computed again in backward."""

    @abstractmethod
    def input_words(self, on: Parallelism) -> int:
        """Words of the input, over all ranks."""

    @abstractmethod
    def saved(self, on: Parallelism, again: bool = False) -> Saved:
        """Words kept after a forward, or after an `again`."""

    @abstractmethod
    def passing(self, on: Parallelism, again: bool = False) -> float:
        """Most words of a rank in backward that come and go, where everything divides.

        Its gradients, what products gather and what is computed again; not what forward keeps,
        nor parameters and their gradients.
        """

    @abstractmethod
    def build(self, builder: Builder) -> list[Layer]:
        """Build the layers."""


@dataclass(frozen=True)
class LayerSpec(Spec):
    """One layer.

    Attributes
    ----------
    name : str
        Its name in the block or the model that it is part of, such as "mlp.up".
    """

    name: str

    @property
    def part(self) -> str:
        """What traces call its work, the same in all blocks."""
        return self.name

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Global shapes of the trained arrays by the end of their names, such as "weight"."""
        return {}

    def products(self, batch: int, seq: int) -> list[ProductShape]:
        """Its products with weights."""
        return []

    def flops(self, batch: int, seq: int) -> int:
        """Floating-point operations of all its matrix products forward, over all ranks.

        Backward does twice as many.  By default those of its `products`.
        """
        return sum(2 * one.M * one.N * one.K for one in self.products(batch, seq))

    def moves(self, on: Parallelism, again: bool = False) -> tuple[list[Move], list[Move]]:
        """Collectives forward and backward; by default none.

        With `again` those of backward after a forward that was computed again for what it keeps
        alone, as by ``Linear.again``, which neither multiplies nor moves anything.
        """
        return [], []

    @abstractmethod
    def make(self, builder: Builder, name: str) -> Layer:
        """Build the layer, whose name in the model is `name`."""

    def build(self, builder: Builder) -> list[Layer]:
        """Build the layer."""
        layer = self.make(builder, builder.full_name(self.name))
        return builder.add(layer, self.name, self.part)

    def in_forward(self) -> Iterator[Work]:
        yield Work(1, self)

    def in_again(self) -> Iterator[Work]:
        yield from ()

    def in_backward(self, again: bool = False) -> Iterator[Work]:
        yield Work(1, self, again)

    def repeated(self) -> Iterator[Work]:
        yield from ()
