"""Measure the parts of a layer of experts, between marks that its steps leave."""

import time
from typing import Any, Callable

from mm3d.model.experts.layer import ExpertsLayer

PARTS = ("router", "dispatch", "experts", "combine")
# The parts of a phase in their order, each with the mark that ends it; the last ends the phase.
ORDER = {"forward": (("router", "routed"), ("dispatch", "arrived"), ("experts", "leaving"),
                     ("combine", "")),
         "backward": (("combine", "arrived"), ("experts", "leaving"), ("dispatch", "routing"),
                      ("router", ""))}


class PartClock:
    """Time the parts of a layer's steps.

    Router: logits, choice, the gather of all ranks' counts, and the plan of where rows go.
    Dispatch: rows to their experts.  Experts: products, biases and GELU.  Combine: rows back to
    their tokens, and the sums with the gates.  In backward each part computes their gradients.

    Parameters
    ----------
    layer : ExpertsLayer
        The layer; its functions are wrapped for good.
    synchronize : callable
        Waits for the device.
    """

    def __init__(self, layer: ExpertsLayer, synchronize: Callable[[], None]) -> None:
        self.synchronize, self._marks = synchronize, {}
        self._wrap(layer.routings, "add", after="routed")
        self._wrap(layer.dispatch, "send", after="arrived")
        self._wrap(layer.dispatch, "combine", before="leaving")
        self._wrap(layer.dispatch, "combine_backward", after="arrived")
        self._wrap(layer.dispatch, "send_backward", before="leaving", after="routing")

    def _wrap(self, owner: Any, name: str, before: str = "", after: str = "") -> None:
        """Let a function leave a mark when it begins or ends."""
        function = getattr(owner, name)

        def marked(*values: Any) -> Any:
            if before:
                self._mark(before)
            result = function(*values)
            if after:
                self._mark(after)
            return result
        setattr(owner, name, marked)

    def _mark(self, name: str) -> None:
        """Note the time of a mark."""
        self.synchronize()
        self._marks[name] = time.perf_counter()

    def measure(self, phase: str, step: Callable[[], Any]) -> tuple[list[float], Any]:
        """Run a phase; return the seconds of `PARTS`, and its result."""
        self._marks = {}
        last = time.perf_counter()
        result = step()
        self.synchronize()
        self._marks[""] = time.perf_counter()
        seconds = {}
        for part, mark in ORDER[phase]:
            seconds[part] = self._marks[mark] - last
            last = self._marks[mark]
        return [seconds[part] for part in PARTS], result
