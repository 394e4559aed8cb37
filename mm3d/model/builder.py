"""Make what the layers of a model have in common: parameters, names, and spaces."""

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Sequence

from mm3d.grid.activations import Space
from mm3d.grid.axis import Axis
from mm3d.grid.layout import Layout
from mm3d.grid.split import Split
from mm3d.model.experts.totals import Routings
from mm3d.model.draws import MaskKey
from mm3d.model.parameters import Parameter
from mm3d.schemes.scheme import Scheme


@dataclass(frozen=True)
class ExpertRanks:
    """Hold the ranks outside a tensor group that tokens and experts are divided among."""

    # Directions along which ranks have other sequences of the same batch, the slowest first.
    replicas: Sequence[Axis] = ()
    # The one of them that divides the experts; None if each replica has all of them.
    axis: Axis | None = None
    # Makes the parameters of divided experts, from the arguments of `Parameter`, with layouts on
    # the tensor group and the global shape, whose first dimension is divided along `axis`.
    create_parameter: Callable[..., Parameter] | None = None
    # Number of sequences of all replicas, divided among them as evenly as can be; by default each
    # has as many as this one.
    batch: int | None = None


class Builder:
    """Make the parameters of layers on one rank, and name layers in the model.

    `scheme` supplies the grid and the products; `outer` and `inner` are the spaces of activations
    outside and inside a pair of linear layers; parameters and activations are of `dtype`, masters
    and gradients of `master`, by default without separate masters.  Layers with dropout need the
    key of its masks.  `parameter` makes the parameters: `Parameter`, or another with the same
    arguments, such as one that replicas of the model divide.  By default no `expert_ranks` outside
    the grid divide tokens and experts.  `routings` is what the layers with experts share.
    """

    def __init__(self, scheme: Scheme, outer: Space, inner: Space, dtype: Any,
                 master: Any = None, mask_key: MaskKey | None = None,
                 parameter: Callable[..., Parameter] = Parameter,
                 expert_ranks: ExpertRanks | None = None) -> None:
        self.expert_ranks, self.routings = expert_ranks or ExpertRanks(), Routings()
        self.scheme, self.outer, self.inner, self.mask_key = scheme, outer, inner, mask_key
        self.dtype, self.master, self.parameter, self._prefix = dtype, master, parameter, ""

    def spaces(self, way: str) -> tuple[Space, Space]:
        """Return the spaces of x and y of a linear layer; `way` is "up" or "down"."""
        return (self.outer, self.inner) if way == "up" else (self.inner, self.outer)

    def create_parameter(self, name: str, layout: Layout, shape: tuple[int, ...],
                         gathered_along: Split | None = None,
                         kind: Callable[..., Parameter] | None = None) -> Parameter:
        """Create the parameter `name` of the current block, of global `shape`.

        `gathered_along` says how a weight that products gather is divided; `kind` makes it
        instead of `parameter`.
        """
        return (kind or self.parameter)(self.full_name(name), self.scheme.grid, layout, shape,
                                        self.dtype, gathered_along, self.master)

    def full_name(self, name: str) -> str:
        """Return the name in the model of `name` in the current block."""
        return f"{self._prefix}{name}"

    def named(self, layer: Any, name: str, part: str) -> Any:
        """Set a layer's name in the model, and its part, the same in all blocks; return it."""
        layer.name, layer.part = self.full_name(name), part
        return layer

    @contextmanager
    def block(self, name: str) -> Iterator[None]:
        """Prefix all names inside the context, as with "layers.0."."""
        before = self._prefix
        self._prefix = f"{before}{name}."
        try:
            yield
        finally:
            self._prefix = before
