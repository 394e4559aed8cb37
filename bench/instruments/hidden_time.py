"""Measure the share of a step's communication that is hidden behind other work."""

from typing import Any, Callable

import numpy as np

from mm3d.arrays.backend import Backend
from mm3d.grid.grid import Grid
from mm3d.tracing.events import ArrayObserver, Overlapped
from mm3d.tracing.observe import observed
from mm3d.transport.pending import Pending


def set_overlap(model: Any, overlap: int) -> None:
    """Set the panels in which communication overlaps with the products of `model`; 0 is off."""
    for linear in model.linears:
        linear.product.overlap = overlap


def hidden_share(grid: Grid, step: Callable[[], object], repetitions: int) -> float:
    """Measure the share of the time of overlapping collectives in `step` that is hidden.

    Visible is the time that this rank (on a device, its computing stream) spends on beginning,
    progressing and waiting for them.  The whole time is that of a step in which each ends where it
    begins.  Medians over the repetitions are summed over the ranks; NaN without such collectives.
    """
    seen = np.array([[_visible_seconds(grid, step, at_once) for at_once in (False, True)]
                     for _ in range(repetitions)])
    going_on, ended = np.array(grid.comm.allreduce(np.median(seen, axis=0)))
    return float(1 - going_on / ended) if ended else float("nan")


class _Overlap(ArrayObserver):
    """Observe the calls for overlapping collectives; end each where it begins if `at_once`."""

    kinds = (Overlapped,)

    def __init__(self, backend: Backend, at_once: bool) -> None:
        self.backend, self.at_once = backend, at_once
        self.open: list[Any] = []
        self.marks: list[tuple[Any, Any]] = []

    def enter(self, event: Overlapped, barrier: Callable[[], None] | None = None) -> None:
        self.open.append(self.backend.record_mark())

    def leave(self) -> None:
        self.marks.append((self.open.pop(), self.backend.record_mark()))

    def see_result(self, event: Overlapped, given: tuple, result: Pending) -> None:
        if self.at_once:
            result.wait()


def _visible_seconds(grid: Grid, step: Callable[[], object], at_once: bool) -> float:
    """Measure the seconds that this rank spends on overlapping collectives in one step."""
    overlap = _Overlap(grid.backend, at_once)
    with observed(grid, overlap):
        grid.comm.Barrier()
        step()
    return sum(grid.backend.seconds_between(*pair) for pair in overlap.marks)
