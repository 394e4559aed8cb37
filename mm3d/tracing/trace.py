"""Trace a dry run: count the events of one rank, and its memory."""

from collections import Counter
from typing import Any, Callable

from mm3d.grid.axis import Traffic
from mm3d.tracing.events import (Boundary, Event, Gemm, HALVES, LayerEvent, MemoryPass, Observer,
                                 Overlapped, PHASES, Phase, Recomputation)

RECOMPUTED_SUFFIX = " (again)"    # of the name of a part, for its work that is done again
# The phase outside of all passes: the ends of a GPT, messages between stages, the sums of
# gradients over replicas at the end of a step, the optimizer, and the refresh of parameters.
SUMS = "sums"


class Trace(Observer):
    """Count the events, the traffic and the memory of one rank.

    Attributes
    ----------
    events : Counter
        Number of times that each (phase, part of a layer, Event) occurred.
    traffic : dict
        By phase, "forward", "backward" or its halves, traffic as `Grid.traffic` returns it; for
        "sums" what moves outside of passes.
    times : int
        Number of equal events that each event counted from now on stands for.
    pool_peak, peak, held : int
        The most bytes at one time in arrays of the backend, as `Backend.memory` counts them; in
        all arrays, also intermediate ones; and in all arrays and idle memory of the pool.
    activations : int
        Of `peak`, the bytes of arrays that layers had saved for backward.
    parameters, divided, saved, operands : int
        Bytes of parameters with their gradients; of those that replicas divide; of arrays that
        forward keeps for backward; and of those kept between the halves of backward.

    Work that backward computes again is among the events of backward, in parts such as
    "mlp.up (again)".
    """

    kinds = (*Observer.kinds, Overlapped)

    def __init__(self) -> None:
        self.events: Counter = Counter()
        self.traffic: dict[str, dict] = {}
        self._model: Any = None    # whose traffic is counted
        self.phase, self.part, self.times = "build", "", 1
        self._outer: list[tuple[str, str, str]] = []    # phases, parts, suffixes that are entered
        self._suffix = ""
        self.pool_peak = self.peak = self.activations = self.held = 0
        self.parameters = self.divided = self.saved = self.operands = 0

    def count_event(self, event: Event) -> None:
        """Count an event in the current phase and part."""
        self.events[self.phase, self.part + self._suffix, event] += self.times

    def enter(self, event: Event, barrier: Callable[[], None] | None = None) -> None:
        """Enter a phase, layer or recomputation, or count another event."""
        self._outer.append((self.phase, self.part, self._suffix))
        if isinstance(event, Phase):
            self.begin_phase(event.name)
        elif isinstance(event, LayerEvent):
            self.part = event.part
        elif isinstance(event, Recomputation):
            self._suffix = RECOMPUTED_SUFFIX
        else:
            self.count_event(event)

    def leave(self) -> None:
        """Return to the phase and part before the last `enter`."""
        phase, self.part, self._suffix = self._outer.pop()
        if phase != self.phase:
            self.begin_phase(phase)

    def see_layer(self, call: str, x: Any, result: Any) -> None:
        """Count the bytes that a layer is given and returns."""
        made = result[0] if isinstance(result, tuple) else result
        self.count_event(Boundary(getattr(x, "nbytes", 0), getattr(made, "nbytes", 0)))

    def begin_phase(self, phase: str) -> None:
        """Begin a phase, and add the traffic so far to the phase before."""
        if self._model is not None:
            moved = {key: one for key, one in self._model.traffic().items() if one.calls}
            if moved or self.phase in (*PHASES, *HALVES):
                own = self.traffic.setdefault(self.phase, {})
                own |= {key: own[key] + one if key in own else one for key, one in moved.items()}
            self._model.reset_traffic()
        self.phase = phase

    def count_traffic(self, model: Any) -> None:
        """Count from now on the traffic of a model or a grid."""
        self._model = model
        model.reset_traffic()

    def finish(self) -> None:
        """Count the traffic up to here, and let the model go: traces are kept, without models."""
        self.begin_phase("done")
        self._model = None

    @property
    def phases(self) -> tuple[str, ...]:
        """Passes of the step: forward, and backward or its halves, or both."""
        return tuple(one for one in (*PHASES, *HALVES) if one in self.traffic) or PHASES

    @property
    def all_phases(self) -> tuple[str, ...]:
        """Return `phases`, and the sums over replicas where they were traced."""
        return (*self.phases, SUMS) if SUMS in self.traffic else self.phases

    def count(self, kind: type, phase: str | None = None) -> Counter:
        """Count how often each event of a kind occurred in a phase (by default in all)."""
        found: Counter = Counter()
        wanted = [phase] if phase else self.phases
        for (when, _, event), times in self.events.items():
            if isinstance(event, kind) and when in wanted:
                found[event] += times
        return found

    def flops(self, phase: str | None = None) -> int:
        """Return the floating-point operations of all matrix products."""
        return sum(times * event.flops for event, times in self.count(Gemm, phase).items())

    def flops_again(self) -> int:
        """Return the floating-point operations of matrix products that backward computes again."""
        return sum(times * event.flops for (_, part, event), times in self.events.items()
                   if isinstance(event, Gemm) and part.endswith(RECOMPUTED_SUFFIX))

    def total_traffic(self) -> dict[tuple[str, str], Traffic]:
        """Return the traffic of all phases together, by direction and collective."""
        found: dict[tuple[str, str], Traffic] = {}
        for moved in self.traffic.values():
            for key, one in moved.items():
                found[key] = found.get(key, Traffic()) + one
        return found

    def words(self, phase: str | None = None) -> int:
        """Return the words that `mm3d.grid.axis.Traffic` counts."""
        return sum(traffic.words for when in ([phase] if phase else self.phases)
                   for traffic in self.traffic[when].values())

    def work(self, seconds: Callable[[Gemm | MemoryPass], float],
             phase: str | None = None) -> float:
        """Sum the `seconds` of all products and elementwise passes, of one phase or of all."""
        return sum(times * seconds(event) for (when, _, event), times in self.events.items()
                   if isinstance(event, (Gemm, MemoryPass)) and phase in (None, when))
