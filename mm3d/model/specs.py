"""Define the interface of specs: the layers of a model, described without ranks and arrays.

A `LayerSpec` states everything that follows from the sizes of a layer: its parameters, its
products with weights, the collectives that it enters and the words that it saves on a grid, and
how to build it.  Chains of specs (`mm3d.model.chain_specs`) state the order of the layers, which
of them form residual blocks, and which are recomputed in backward.  The model that runs
(`mm3d.model.transformer`) and the closed forms of its costs (`mm3d.model.cost`) are made from the
same specs, so a new kind of layer needs one spec beside the layer itself.
"""

from abc import ABC, abstractmethod
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator, NamedTuple

from mm3d.arrays.plain_numbers import keep_plain_numbers
from mm3d.grid.activations import Space
from mm3d.grid.layout import Layout
from mm3d.grid.split import Split
from mm3d.model.experts.shared import ExpertRanks, Routings
from mm3d.model.layers import Layer
from mm3d.model.masks import MaskKey
from mm3d.model.parameters import Parameter
from mm3d.schemes.closed_form import Move, ProductShape
from mm3d.schemes.parallelism import Parallelism
from mm3d.schemes.scheme import Scheme


class LayerPass(NamedTuple):
    """Describe passes through equal layers.

    Attributes
    ----------
    times : int
        Number of the passes.
    layer : LayerSpec
        One of the layers.
    recomputed : bool
        For backward: whether the saved data were recomputed, see `LayerSpec.moves`.
    """

    times: int
    layer: "LayerSpec"
    recomputed: bool = False


class Builder:
    """Build layers from specs, and give them their names in the model.

    Parameters
    ----------
    scheme : Scheme
        Supplies the grid and the products.
    outer, inner : Space
        The spaces of activations outside and inside a pair of linear layers.
    dtype : dtype
        Type of parameters and activations.
    master : dtype, optional
        Type of masters and gradients; by default `dtype`, without separate masters.
    first_layer : int
        Number of the first block called "layers".
    mask_key : MaskKey, optional
        Key of the masks of dropout; layers with dropout need it.
    parameter : callable
        Makes the parameters: `Parameter`, or another with the same arguments, such as one that
        replicas of the model divide.
    expert_ranks : ExpertRanks, optional
        Ranks outside the grid that tokens and experts are divided among; by default none.

    Attributes
    ----------
    routings : Routings
        What the layers with experts share.
    """

    def __init__(self, scheme: Scheme, outer: Space, inner: Space, dtype: Any,
                 master: Any = None, first_layer: int = 0,
                 mask_key: MaskKey | None = None,
                 parameter: Callable[..., Parameter] = Parameter,
                 expert_ranks: ExpertRanks | None = None) -> None:
        self.expert_ranks, self.routings = expert_ranks or ExpertRanks(), Routings()
        self.scheme, self.outer, self.inner, self.mask_key = scheme, outer, inner, mask_key
        self.dtype, self.master, self.parameter = dtype, master, parameter
        self._prefix, self._numbers, self._built = "", Counter(layers=first_layer), {}

    def build_layers(self, specs: Iterable["Spec"]) -> list[Layer]:
        """Build the layers of `specs`, in order."""
        return [layer for spec in specs for layer in spec.build_layers(self)]

    def create_parameter(self, name: str, layout: Layout, shape: tuple[int, ...],
                         gathered_along: Split | None = None) -> Parameter:
        """Create the parameter `name` of global `shape`, in the types of the model.

        `name` is the full name, such as "layers.0.mlp.up.weight"; `gathered_along` says how a
        weight that products gather is divided.
        """
        return self.parameter(name, self.scheme.grid, layout, shape, self.dtype, gathered_along,
                              self.master)

    def full_name(self, name: str) -> str:
        """Return the name in the model of the layer called `name` in the current block."""
        return ".".join(filter(None, (self._prefix, name)))

    def register_layer(self, layer: Layer, name: str, part: str) -> list[Layer]:
        """Set the layer's full name and the name of its part; return the layer in a list."""
        layer.name, layer.part = self.full_name(name), part
        self._built[layer.name] = layer
        return [layer]

    def find_layer(self, name: str) -> Layer:
        """Return the layer called `name` that was built before in the current block.

        Raises
        ------
        KeyError
            When there is none.
        """
        return self._built[self.full_name(name)]

    @contextmanager
    def numbered_block(self, name: str) -> Iterator[None]:
        """Prefix all names inside the context with ``name.N.``; N counts these blocks from 0.

        An empty `name` changes nothing.
        """
        before = self._prefix
        if name:
            self._prefix = self.full_name(f"{name}.{self._numbers[self.full_name(name)]}")
            self._numbers[f"{before}.{name}" if before else name] += 1
        try:
            yield
        finally:
            self._prefix = before


class Spec(ABC):
    """Describe a layer or a chain of layers, without ranks and arrays, by a dataclass."""

    def __post_init__(self) -> None:
        keep_plain_numbers(self)

    @abstractmethod
    def forward_passes(self) -> Iterator[LayerPass]:
        """Iterate over the layers that are computed in forward."""

    @abstractmethod
    def recomputed_passes(self) -> Iterator[LayerPass]:
        """Iterate over the layers that are computed when only the saved data are recomputed."""

    @abstractmethod
    def backward_passes(self, recomputed: bool = False) -> Iterator[LayerPass]:
        """Iterate over the layers that are computed in backward, without recomputed forwards.

        `recomputed` says whether the data for this backward were recomputed.
        """

    @abstractmethod
    def passes_repeated_in_backward(self) -> Iterator[LayerPass]:
        """Iterate over the layers whose forward is computed again in backward."""

    @abstractmethod
    def build_layers(self, builder: Builder) -> list[Layer]:
        """Build the layers."""


@dataclass(frozen=True)
class LayerSpec(Spec):
    """Describe one layer.

    Attributes
    ----------
    name : str
        Name of the layer in its block or model, such as "mlp.up".
    """

    name: str

    @property
    def part(self) -> str:
        """Return the name of the layer in traces, which is the same in all blocks."""
        return self.name

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the global shapes of the parameters by the last part of their names ("weight").
        """
        return {}

    def products(self, batch: int, seq: int) -> list[ProductShape]:
        """List the products with weights."""
        return []

    def flops(self, batch: int, seq: int) -> int:
        """Count the floating-point operations of all matrix products of forward, over all ranks.

        Backward takes twice as many.  By default these are the operations of `products`.
        """
        return sum(2 * one.M * one.N * one.K for one in self.products(batch, seq))

    def moves(self, parallelism: Parallelism,
              recomputed: bool = False) -> tuple[list[Move], list[Move]]:
        """List the collectives of forward and of backward; by default there are none.

        With `recomputed` the collectives of backward are those after ``Linear.recompute_saved``,
        which neither multiplies nor communicates.
        """
        return [], []

    def weights_flops(self, batch: int, seq: int) -> int:
        """Count the operations of the weights' half of backward; by default it has none."""
        return 0

    @abstractmethod
    def make_layer(self, builder: Builder, name: str) -> Layer:
        """Build the layer, called `name` in the model."""

    def build_layers(self, builder: Builder) -> list[Layer]:
        layer = self.make_layer(builder, builder.full_name(self.name))
        return builder.register_layer(layer, self.name, self.part)

    def forward_passes(self) -> Iterator[LayerPass]:
        yield LayerPass(1, self)

    def recomputed_passes(self) -> Iterator[LayerPass]:
        yield from ()

    def backward_passes(self, recomputed: bool = False) -> Iterator[LayerPass]:
        yield LayerPass(1, self, recomputed)

    def passes_repeated_in_backward(self) -> Iterator[LayerPass]:
        yield from ()
