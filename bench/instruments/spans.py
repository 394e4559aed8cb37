"""Record spans: when each layer, product and collective of a step began and ended on this rank.

A `Recorder` observes traced repetitions (`mm3d.tracing.observe.observed`); the times that are
reported as results are measured without it.  Before a collective all ranks of its direction wait
at a barrier, which is a span of its own, so that waiting for another rank is not counted as
transfer.
"""

from typing import Any, Callable, Iterable, NamedTuple

import numpy as np

from mm3d.grid.axis import COLLECTIVES
from mm3d.tracing.events import Collective, Event, Gemm, LayerEvent, Observer, Phase, Recomputation

NAMED = {Phase: "phase", LayerEvent: "layer", Recomputation: "again"}    # by their own names
PART_OF_KIND = {"gemm": "gemm", "layer": "elementwise", "again": "elementwise", "wait": "waiting",
                "phase": "other"}


class Span(NamedTuple):
    """An interval of time in a step, with the work that it was spent on.

    Attributes
    ----------
    name : str
        Title, such as "layers.0.mlp.up" or "all-gather A along y".
    kind, phase : str
        "phase", "layer", "again" (layers that backward computes again), "gemm", "collective" or
        "wait"; "forward" or "backward".
    start, end, own : float
        Seconds on the recorder's clock; seconds outside of the spans within this one.
    axis, collective, operand : str
        Direction, kind and operand of a collective or of the barrier before it; empty elsewhere.
    bytes, flops : int
        Of a product, bytes of operands and result, and operations; of a collective, bytes of the
        whole array that is gathered, scattered, reduced or broadcast.
    """

    name: str
    kind: str
    phase: str
    start: float
    end: float
    own: float
    axis: str = ""
    collective: str = ""
    operand: str = ""
    bytes: int = 0
    flops: int = 0

    @property
    def part(self) -> str:
        """The part of a phase, one of `part_names`, that its own time belongs to."""
        return (f"{self.collective} {self.axis}" if self.kind == "collective"
                else PART_OF_KIND[self.kind])


class Recorder(Observer):
    """Record the spans of this rank, in the order of their ends, on a clock in seconds.

    The backend is synchronized at both ends of every span, and its profiler gets the names.
    """

    def __init__(self, backend: Any, now: Callable[[], float]) -> None:
        self.spans: list[Span] = []
        self._backend, self._now, self._open, self._phase = backend, now, [], ""

    def enter(self, event: Event, barrier: Callable[[], None] | None = None) -> None:
        """Begin the span of `event`, for a collective after a barrier of its ranks."""
        if isinstance(event, Phase):
            self._phase = event.name
        if kind := NAMED.get(type(event)):
            self._begin(event.name, kind)
        elif isinstance(event, Gemm):
            size = event.m * event.n + event.n * event.k + event.m * event.k
            self._begin(_shape(event), "gemm", flops=event.flops,
                        bytes=event.batch * size * np.dtype(event.dtype).itemsize)
        elif isinstance(event, Collective):
            operand = self._operand(event.kind)
            where = {"axis": event.direction, "collective": event.kind, "operand": operand}
            if barrier is not None:
                self._begin(f"wait along {event.direction}", "wait", **where)
                barrier()
                self.leave()
            name = " ".join(filter(None, (event.kind.replace("_", "-"), operand,
                                          f"along {event.direction}")))
            self._begin(name, "collective", **where, bytes=event.bytes)

    def leave(self) -> None:
        """End the span that began last."""
        self._backend.synchronize()
        end = self._now()
        self._backend.end_range()
        name, kind, about, start, inner = self._open.pop()
        if self._open:
            self._open[-1][-1] += end - start
        self.spans.append(Span(name, kind, self._phase, start, end, end - start - inner, **about))

    def _begin(self, name: str, kind: str, **about: Any) -> None:
        self._backend.begin_range(name)
        self._backend.synchronize()
        self._open.append([name, kind, about, self._now(), 0.0])

    def _operand(self, kind: str) -> str:
        """Name a collective's operand: a gradient where backward sums it or gathers that of C."""
        again = any(kind == "again" for _, kind, *_ in self._open)
        gradient = self._phase == "backward" and not again and (kind.startswith("reduce")
                                                                or self.operand == "C")
        return f"d{self.operand}" if gradient and self.operand else self.operand


def _shape(event: Gemm) -> str:
    lead = f"{event.batch} x " if event.batch > 1 else ""
    return f"gemm {lead}{event.m} x {event.n} x {event.k}"


def part_names(directions: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the parts of a phase's time on a grid with these directions.

    "elementwise" is the time within a layer that is neither a product, nor a collective, nor
    waiting; "other" is the time between layers.
    """
    return ("gemm", *(f"{kind} {direction}" for direction in directions for kind in COLLECTIVES),
            "elementwise", "waiting", "other")


def breakdown(spans: Iterable[Span], whole: float, names: Iterable[str]) -> dict[str, float]:
    """Sum the seconds of each part in `names` over the spans of one phase of `whole` seconds.

    They add up to `whole`: time outside of all spans is "other".
    """
    seconds = dict.fromkeys(names, 0.0)
    for span in spans:
        seconds[span.part] += span.own
    seconds["other"] = whole - sum(s for part, s in seconds.items() if part != "other")
    return seconds
