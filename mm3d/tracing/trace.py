"""The trace of a dry run: the events that one rank goes through, counted."""

from collections import Counter
from typing import Callable

from mm3d.tracing.events import (Event, Gemm, Layer, Observer, Overlapped, PHASES, Phase,
                                 Recomputation)

AGAIN = " (again)"    # ends the name of the part to which work belongs that is done again


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

    kinds = (*Observer.kinds, Overlapped)

    def __init__(self) -> None:
        self.events: Counter = Counter()
        self.traffic: dict[str, dict] = {}
        self.timeline: list[tuple[str, int]] = []
        self.phase, self.part, self.layers = "build", "", 0
        self._around: list[tuple[str, str, str]] = []    # of what is around what is running
        self._again = ""
        self.pool_peak = self.peak = self.held = self.parameters = self.saved = 0

    def note(self, event: Event) -> None:
        """Count an event of the part and phase that are running."""
        self.events[self.phase, self.part + self._again, event] += 1

    def enter(self, event: Event, barrier: Callable[[], None] | None = None) -> None:
        """Layers and phases give their names to what follows; all else is counted."""
        self._around.append((self.phase, self.part, self._again))
        if isinstance(event, Phase):
            self.phase = event.name
        elif isinstance(event, Layer):
            self.part = event.part
        elif isinstance(event, Recomputation):
            self._again = AGAIN
        else:
            self.note(event)

    def leave(self) -> None:
        """Back to the phase and part around it."""
        self.phase, self.part, self._again = self._around.pop()

    def count(self, kind: type, phase: str | None = None) -> Counter:
        """How often each event of a kind happened in a phase (by default in both)."""
        found: Counter = Counter()
        for (when, _, event), times in self.events.items():
            if isinstance(event, kind) and when in (phase, *(() if phase else PHASES)):
                found[event] += times
        return found

    def flops(self, phase: str | None = None) -> int:
        """Floating-point operations of all matrix products."""
        return sum(times * event.flops for event, times in self.count(Gemm, phase).items())

    def flops_again(self) -> int:
        """Those among them of what backward computes again."""
        return sum(times * event.flops for (_, part, event), times in self.events.items()
                   if isinstance(event, Gemm) and part.endswith(AGAIN))

    def words(self, phase: str | None = None) -> int:
        """Words, as `mm3d.grid.axis.Traffic` counts them."""
        return sum(traffic.words for when in ([phase] if phase else PHASES)
                   for traffic in self.traffic[when].values())
