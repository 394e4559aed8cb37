"""Chains of layer specs: repeated blocks, residual blocks, and layers that are computed again.

They say in which order layers work in forward and in backward, and so turn what each layer states
into what the model takes.
"""

from dataclasses import dataclass
from typing import Iterable, Iterator

from mm3d.model.layers import Layer, Residual
from mm3d.model.recomputed_layers import Recomputed
from mm3d.model.specs import Builder, Saved, Spec, Work
from mm3d.schemes.parallelism import Parallelism


@dataclass(frozen=True)
class ChainSpec(Spec):
    """Layers one after another.

    Attributes
    ----------
    layers : tuple of Spec
        The layers.
    name : str
        Its name in the block or the model that it is part of; empty if it has none.
    """

    layers: tuple[Spec, ...]
    name: str = ""

    def in_forward(self) -> Iterator[Work]:
        for layer in self.layers:
            yield from layer.in_forward()

    def in_again(self) -> Iterator[Work]:
        for layer in self.layers[:-1]:
            yield from layer.in_forward()
        yield from self.layers[-1].in_again()

    def in_backward(self, again: bool = False) -> Iterator[Work]:
        for layer in self.layers[:-1]:
            yield from layer.in_backward()
        yield from self.layers[-1].in_backward(again)

    def repeated(self) -> Iterator[Work]:
        for layer in self.layers:
            yield from layer.repeated()

    def input_words(self, on: Parallelism) -> int:
        return self.layers[0].input_words(on)

    def saved(self, on: Parallelism, again: bool = False) -> Saved:
        *before, last = self.layers
        kept = [*(layer.saved(on) for layer in before), last.saved(on, again)]
        total = kept[0]
        for more in kept[1:]:
            total = total.followed_by(more)
        return total

    def passing(self, on: Parallelism, again: bool = False) -> float:
        *before, last = self.layers
        return max([*(layer.passing(on) for layer in before), last.passing(on, again)])

    def build(self, builder: Builder) -> list[Layer]:
        return builder.build(self.layers)


@dataclass(frozen=True)
class Repeated(ChainSpec):
    """The same layers several times, one after another.

    Attributes
    ----------
    layers : tuple of Spec
        The layers.
    name : str
        Comes before the names of the layers, with the number of the repetition in the model, as
        in "layers.0."; where it is empty their names are their own.
    times : int
        Number of repetitions, at least 1.
    """

    times: int = 1

    def in_forward(self) -> Iterator[Work]:
        yield from _times(self.times, super().in_forward())

    def in_again(self) -> Iterator[Work]:
        yield from _times(self.times - 1, super().in_forward())
        yield from super().in_again()

    def in_backward(self, again: bool = False) -> Iterator[Work]:
        yield from _times(self.times - 1, super().in_backward())
        yield from super().in_backward(again)

    def repeated(self) -> Iterator[Work]:
        yield from _times(self.times, super().repeated())

    def saved(self, on: Parallelism, again: bool = False) -> Saved:
        total = last = super().saved(on, again)
        if self.times > 1:
            total = once = super().saved(on) if again else last
            for _ in range(self.times - 2):
                total = total.followed_by(once)
            total = total.followed_by(last)
        return total

    def passing(self, on: Parallelism, again: bool = False) -> float:
        most = super().passing(on, again)
        return max(most, super().passing(on)) if again and self.times > 1 else most

    def build(self, builder: Builder) -> list[Layer]:
        built = []
        for _ in range(self.times):
            with builder.number(self.name):
                built += builder.build(self.layers)
        return built


@dataclass(frozen=True)
class ResidualSpec(ChainSpec):
    """x + f(x), f being the layers; keeps nothing of its own."""

    def build(self, builder: Builder) -> list[Layer]:
        return builder.add(Residual(*builder.build(self.layers)), self.name, "residual")


@dataclass(frozen=True)
class RecomputedSpec(ChainSpec):
    """Layers of which the input alone is kept, and which backward computes again."""

    def in_again(self) -> Iterator[Work]:
        yield from ()    # it keeps its input, which is there

    def in_backward(self, again: bool = False) -> Iterator[Work]:
        yield from super().in_backward(True)

    def repeated(self) -> Iterator[Work]:
        yield from super().in_again()
        yield from super().repeated()

    def saved(self, on: Parallelism, again: bool = False) -> Saved:
        return Saved(input=self.input_words(on))

    def passing(self, on: Parallelism, again: bool = False) -> float:
        """Besides, what the layers keep until their backward, other than the chain's input.

        Of single layers the statistics of rows and gathered vectors are left out, which are few.
        """
        kept = super().saved(on, True)
        chains = any(isinstance(layer, ChainSpec) for layer in self.layers)
        return super().passing(on, True) + (kept.activations + chains * kept.rest) / on.ranks

    def build(self, builder: Builder) -> list[Layer]:
        return builder.add(Recomputed(*builder.build(self.layers)), self.name, "recomputed")


def _times(times: int, works: Iterable[Work]) -> Iterator[Work]:
    """Each of `works` so many times."""
    if times:
        for work in works:
            yield work._replace(times=times * work.times)


@dataclass(frozen=True)
class ModelSpec:
    """A model without ranks and arrays: its layers and the activations that they pass on.

    Attributes
    ----------
    batch, seq, hidden : int
        Global shape of the activations that enter and leave it.
    chain : ChainSpec
        Its layers.
    """

    batch: int
    seq: int
    hidden: int
    chain: ChainSpec
