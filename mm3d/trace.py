"""What one rank does, event by event: the events, who is told of them, and the trace of a dry run.
"""

from collections import Counter
from typing import Callable, NamedTuple

PHASES = ("forward", "backward")


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


class Layer(NamedTuple):
    """The work of one layer: its `name` in the model, such as "layers.0.mlp.up", and the `part`
    of a Transformer layer that it is, such as "mlp.up", the same in all of them."""

    name: str
    part: str


class Recomputation(NamedTuple):
    """The work of layers that backward computes again: the `name` of what they are part of."""

    name: str


Event = Gemm | Pass | Collective | Layer | Recomputation

AGAIN = " (again)"    # ends the name of the part to which work belongs that is done again


class Observer:
    """What `mm3d.observe.observed` tells of every layer, product and collective.

    Attributes
    ----------
    operand : str
        Name of what travels while an algorithm asks for a collective, such as "A"; a gradient
        has the name of its operand.
    everything : bool
        Whether it is told of products, too, and how large collectives are.
    """

    operand = ""
    everything = True

    def enter(self, event: Event, meet: Callable[[], None] | None = None) -> None:
        """`event` begins; the ranks of a collective wait for each other in `meet`."""

    def leave(self) -> None:
        """What was entered last has ended."""


class Trace(Observer):
    """What one rank did.

    Attributes
    ----------
    events : Counter
        How often each (phase, part of a layer, Event) happened.
    traffic : dict
        For "forward" and "backward" what `Grid.traffic` says.
    timeline : list of (str, int)
        Phase and bytes in use whenever memory was taken.
    layers : int
        Of the model.
    pool_peak, peak, held : int
        Most bytes at one time in arrays that the model obtains from its backend, as
        `Backend.memory` counts them; in all arrays, with the intermediate ones; and in these
        with what a `Pool` keeps to lend again.
    parameters, saved : int
        Bytes of parameters with their gradients, and of what forward keeps for backward.

    What backward computes again is among the events of backward, in parts such as
    "mlp.up (again)".
    """

    def __init__(self) -> None:
        self.events: Counter = Counter()
        self.traffic: dict[str, dict] = {}
        self.timeline: list[tuple[str, int]] = []
        self.phase, self.part, self.layers = "build", "", 0
        self._around: list[tuple[str, str]] = []    # of what is around the part that is running
        self._again = ""
        self.pool_peak = self.peak = self.held = self.parameters = self.saved = 0

    def note(self, event: Event) -> None:
        """Count an event of the part and phase that are running."""
        self.events[self.phase, self.part + self._again, event] += 1

    def enter(self, event: Event, meet: Callable[[], None] | None = None) -> None:
        """A layer gives its part's name to what follows; all else is counted."""
        self._around.append((self.part, self._again))
        if isinstance(event, Layer):
            self.part = event.part
        elif isinstance(event, Recomputation):
            self._again = AGAIN
        else:
            self.note(event)

    def leave(self) -> None:
        """Back to the part around it."""
        self.part, self._again = self._around.pop()

    def of(self, kind: type, phase: str | None = None) -> Counter:
        """How often each event of a kind happened in a phase (by default in both)."""
        found: Counter = Counter()
        for (when, _, event), times in self.events.items():
            if isinstance(event, kind) and when in (phase, *(() if phase else PHASES)):
                found[event] += times
        return found

    def flops(self, phase: str | None = None) -> int:
        """Floating-point operations of all matrix products."""
        return sum(times * event.flops for event, times in self.of(Gemm, phase).items())

    def flops_again(self) -> int:
        """Those among them of what backward computes again."""
        return sum(times * event.flops for (_, part, event), times in self.events.items()
                   if isinstance(event, Gemm) and part.endswith(AGAIN))

    def words(self, phase: str | None = None) -> int:
        """Words, as `mm3d.axis.Traffic` counts them."""
        return sum(traffic.words for when in ([phase] if phase else PHASES)
                   for traffic in self.traffic[when].values())
