"""Define chains of layer specs: repeated blocks, residual blocks, and recomputed layers.

A chain knows the order in which its layers are computed in forward and in backward, and sums up
the costs that each layer states.
"""

from dataclasses import dataclass
from typing import Iterable, Iterator

from mm3d.model.chains import Residual
from mm3d.model.layers import Layer
from mm3d.model.recomputed_layers import Recomputed
from mm3d.model.specs import Builder, LayerPass, Spec


@dataclass(frozen=True)
class ChainSpec(Spec):
    """Describe layers that are applied one after another.

    Attributes
    ----------
    layers : tuple of Spec
        The layers, in order.
    name : str
        Name of the chain in its block or model; empty if it has none.
    """

    layers: tuple[Spec, ...]
    name: str = ""

    def forward_passes(self) -> Iterator[LayerPass]:
        for layer in self.layers:
            yield from layer.forward_passes()

    def recomputed_passes(self) -> Iterator[LayerPass]:
        for layer in self.layers[:-1]:
            yield from layer.forward_passes()
        yield from self.layers[-1].recomputed_passes()

    def backward_passes(self, recomputed: bool = False) -> Iterator[LayerPass]:
        # Only the last layer of a recomputed chain is not computed in full.
        for layer in self.layers[:-1]:
            yield from layer.backward_passes()
        yield from self.layers[-1].backward_passes(recomputed)

    def passes_repeated_in_backward(self) -> Iterator[LayerPass]:
        for layer in self.layers:
            yield from layer.passes_repeated_in_backward()

    def build_layers(self, builder: Builder) -> list[Layer]:
        return builder.build_layers(self.layers)


@dataclass(frozen=True)
class Repeated(ChainSpec):
    """Describe a block of layers that is repeated.

    Attributes
    ----------
    layers : tuple of Spec
        The layers of one block.
    name : str
        Prefix of the layers' names, followed by the number of the block in the model, as in
        "layers.0."; with an empty name there is no prefix.
    times : int
        Number of blocks, at least 1.
    """

    times: int = 1

    def forward_passes(self) -> Iterator[LayerPass]:
        yield from _multiply_passes(self.times, super().forward_passes())

    def recomputed_passes(self) -> Iterator[LayerPass]:
        yield from _multiply_passes(self.times - 1, super().forward_passes())
        yield from super().recomputed_passes()

    def backward_passes(self, recomputed: bool = False) -> Iterator[LayerPass]:
        yield from _multiply_passes(self.times - 1, super().backward_passes())
        yield from super().backward_passes(recomputed)

    def passes_repeated_in_backward(self) -> Iterator[LayerPass]:
        yield from _multiply_passes(self.times, super().passes_repeated_in_backward())

    def build_layers(self, builder: Builder) -> list[Layer]:
        built = []
        for _ in range(self.times):
            with builder.numbered_block(self.name):
                built += builder.build_layers(self.layers)
        return built


@dataclass(frozen=True)
class ResidualSpec(ChainSpec):
    """Describe a residual block, x + f(x) with f the chain of its layers; the sum saves nothing.
    """

    def build_layers(self, builder: Builder) -> list[Layer]:
        residual = Residual(*builder.build_layers(self.layers))
        return builder.register_layer(residual, self.name, "residual")


@dataclass(frozen=True)
class RecomputedSpec(ChainSpec):
    """Describe layers that save their input alone, and are recomputed in backward."""

    def recomputed_passes(self) -> Iterator[LayerPass]:
        yield from ()    # the input is all that it saves

    def backward_passes(self, recomputed: bool = False) -> Iterator[LayerPass]:
        yield from super().backward_passes(True)

    def passes_repeated_in_backward(self) -> Iterator[LayerPass]:
        yield from super().recomputed_passes()
        yield from super().passes_repeated_in_backward()

    def build_layers(self, builder: Builder) -> list[Layer]:
        recomputed = Recomputed(*builder.build_layers(self.layers))
        return builder.register_layer(recomputed, self.name, "recomputed")


def _multiply_passes(times: int, passes: Iterable[LayerPass]) -> Iterator[LayerPass]:
    """Iterate over `passes`, with the number of each multiplied by `times`."""
    if times:
        for one in passes:
            yield one._replace(times=times * one.times)


@dataclass(frozen=True)
class ModelSpec:
    """Describe a model without ranks and arrays: its layers, and the shape of its activations.

    Attributes
    ----------
    batch, seq, hidden : int
        Global shape of the activations that enter and leave the model.
    chain : ChainSpec
        The layers.
    first_layer : int
        Number of the first layer; not 0 in a part of a model that begins later.
    """

    batch: int
    seq: int
    hidden: int
    chain: ChainSpec
    first_layer: int = 0
