"""The events of a step, and the observers that `mm3d.tracing.observe.observed` tells of them."""

from typing import Any, Callable, NamedTuple

PHASES = ("forward", "backward")


class Phase(NamedTuple):
    """A whole pass of a model, "forward" or "backward"."""

    name: str


class Gemm(NamedTuple):
    """`batch` products of m x n and n x k matrices."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.m * self.n * self.k


class Pass(NamedTuple):
    """An elementwise operation or a sum, and the bytes that it reads and writes."""

    operation: str
    bytes: int


class Collective(NamedTuple):
    """A collective of `size` ranks, `stride` apart, along `direction`.

    `bytes` are those of the whole that is gathered, scattered, reduced or broadcast; `pieces`
    says whether the ranks' blocks of it lie in many pieces of memory, as columns do.
    """

    kind: str
    direction: str
    size: int
    stride: int
    bytes: int
    pieces: bool = False


class Overlapped(NamedTuple):
    """A call for a collective that goes on while this rank computes.

    `call` is "begin", "progress" or "wait" (see `mm3d.transport.pending.Pending`).
    """

    call: str
    kind: str
    direction: str


class Layer(NamedTuple):
    """The work of one layer: its `name` in the model, such as "layers.0.mlp.up", and the `part`
    of a Transformer layer that it is, such as "mlp.up", the same in all of them."""

    name: str
    part: str


class Recomputation(NamedTuple):
    """The work of layers that backward computes again: the `name` of what they are part of."""

    name: str


Event = Phase | Gemm | Pass | Collective | Overlapped | Layer | Recomputation


class Observer:
    """Base class of observers: the events of a step as they begin and end.

    Attributes
    ----------
    kinds : tuple of type
        The events that it is told of; of all others it costs a step nothing.
    sizes : bool
        Whether `Collective.bytes` and `Collective.pieces` are computed for it.
    operand : str
        Name of the operand that a collective moves, such as "A", set while a layer or a product
        asks for collectives; a gradient has the name of its operand.
    """

    kinds: tuple[type, ...] = (Phase, Layer, Recomputation, Gemm, Collective)
    sizes = True
    operand = ""

    def enter(self, event: Event, barrier: Callable[[], None] | None = None) -> None:
        """`event` begins; the ranks of a collective wait for each other in `barrier`."""

    def leave(self) -> None:
        """The event that was entered last ends."""


class ArrayObserver(Observer):
    """Base class of observers that see the arrays of the events of their `kinds`, too."""

    def seen(self, event: Event, given: tuple, result: Any) -> None:
        """A product or the begin of an overlapped collective has returned.

        Parameters
        ----------
        event : Gemm or Overlapped
            The event, which has ended.
        given : tuple of Array
            The operands.
        result : Array or Pending
            The product; or the collective, which the observer may wait for.
        """

    def forward(self, layer: Any, x: Any, y: Any) -> Any:
        """Look at y = forward(x) of `layer`; the result is handed to `backward`."""

    def again(self, layer: Any, x: Any) -> Any:
        """Look at the x of which `layer` computes again only what it saves; as `forward`."""

    def backward(self, layer: Any, dy: Any, dx: Any, note: Any) -> None:
        """Look at dx = backward(dy) of `layer`; `note` is the result of `forward` or `again`."""
