"""Define the events of a step, and the base classes of observers that are told of them.

`mm3d.tracing.observe.observed` attaches an observer to a grid and a model.
"""

from typing import Any, Callable, NamedTuple

PHASES = ("forward", "backward")
HALVES = ("backward_input", "backward_weights")    # of a backward pass in two


class Phase(NamedTuple):
    """Describe a pass of a model."""

    name: str    # "forward", "backward", or a half of backward


class Gemm(NamedTuple):
    """Describe `batch` products of m x n and n x k matrices."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    result: str = ""    # the type of the product, if it is not `dtype`

    @property
    def flops(self) -> int:
        """Number of multiplications and additions."""
        return 2 * self.batch * self.m * self.n * self.k


class MemoryPass(NamedTuple):
    """Describe an elementwise operation or a sum, with the bytes that it reads and writes."""

    operation: str
    bytes: int
    within: str = ""    # the function of the `Call` that it is a part of


class Call(NamedTuple):
    """Describe a call of a function that may have a kernel: of arrays, their shape and dtype; of
    functions, "sum"."""

    function: str
    given: tuple
    named: tuple    # (name, value)


class Collective(NamedTuple):
    """Describe a collective of `size` ranks, `stride` apart, along `direction`.

    `bytes` is the size of the whole array that is gathered, scattered, reduced or broadcast, or
    that this rank sends in an all-to-all; `pieces` is whether a rank's block of it is not
    contiguous, as columns are not.
    """

    kind: str
    direction: str
    size: int
    stride: int
    bytes: int
    pieces: bool = False


class Overlapped(NamedTuple):
    """Describe a call of a nonblocking collective, which goes on while this rank computes."""

    call: str    # "begin", "progress" or "wait" (see `mm3d.transport.pending.Pending`)
    kind: str
    direction: str


class LayerEvent(NamedTuple):
    """Describe the work of one layer."""

    name: str    # in the model, such as "layers.0.mlp.up"
    part: str    # the same for all Transformer layers, such as "mlp.up"


class Boundary(NamedTuple):
    """Describe the bytes that a call of a layer is given, and of its result; or of gradients."""

    given: int
    made: int


class Recomputation(NamedTuple):
    """Describe layers computed again in backward; `name` is the name of their chain."""

    name: str


Event = (Phase | Gemm | MemoryPass | Call | Collective | Overlapped | LayerEvent | Boundary
         | Recomputation)


class Observer:
    """Base class of observers, which are told when the events of a step begin and end."""

    # The events that it is told of; other events cost a step nothing.
    kinds: tuple[type, ...] = (Phase, LayerEvent, Recomputation, Gemm, Collective)
    sizes = True    # whether `Collective.bytes` and `Collective.pieces` are computed for it
    # Name of the operand that a collective moves, such as "A", set while a layer or a product
    # calls collectives; a gradient has the name of its operand.
    operand = ""

    def enter(self, event: Event, barrier: Callable[[], None] | None = None) -> None:
        """Begin `event`; in `barrier` the ranks of a collective wait for each other."""

    def leave(self) -> None:
        """End the event that was entered last."""

    def see_layer(self, call: str, x: Any, result: Any) -> None:
        """Look at the first argument and the result of a layer's `call`, within its event."""

    def see_pass(self, call: str, result: Any) -> None:
        """Look at the result of a pass of a model, as `see_layer`."""


class ArrayObserver(Observer):
    """Base class of observers that are also given the arrays of the events of their `kinds`."""

    def see_result(self, event: Event, given: tuple, result: Any) -> None:
        """Look at the result of a product, or of the begin of a nonblocking collective.

        The event has ended; the observer may wait for a pending collective.
        """

    def forward(self, layer: Any, x: Any, y: Any) -> Any:
        """Look at y = forward(x) of `layer`; the result is passed to `backward`."""

    def again(self, layer: Any, x: Any) -> Any:
        """Look at x, from which `layer` computes what it saves, but not y; as `forward`."""

    def backward(self, layer: Any, dy: Any, dx: Any, note: Any) -> None:
        """Look at dx = backward(dy) of `layer`; `note` is the result of `forward` or `again`."""
