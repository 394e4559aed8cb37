"""How much of the communication of a step other work hides."""

from typing import Any, Callable

import numpy as np

from mm3d.arrays.backend import Backend
from mm3d.grid.grid import Grid
from mm3d.tracing.events import ArrayObserver, Overlapped
from mm3d.tracing.observe import observed
from mm3d.transport.pending import Pending


def set_overlap(model: Any, overlap: bool) -> None:
    """Let communication go on during the products of `model`, of a scheme that can, or not."""
    for linear in model.linears:
        linear.product.overlap = overlap


def hidden_share(grid: Grid, step: Callable[[], object], repetitions: int) -> float:
    """The share of the time of those collectives of `step` that may go on, which is not seen.

    Seen is what this rank, on a device the stream that computes, spends on them, beginning,
    moving on and waiting; of the same steps with each collective ended where it begins, that is
    all of their time.  Medians over the repetitions, summed over the ranks; NaN where there is
    no such collective.
    """
    seen = np.array([[_seen(grid, step, at_once) for at_once in (False, True)]
                     for _ in range(repetitions)])
    going_on, ended = np.array(grid.comm.allreduce(np.median(seen, axis=0)))
    return float(1 - going_on / ended) if ended else float("nan")


class _Overlap(ArrayObserver):
    """Measures the calls for collectives that go on, or ends each of them where it begins."""

    kinds = (Overlapped,)

    def __init__(self, backend: Backend, at_once: bool) -> None:
        self.backend, self.at_once = backend, at_once
        self.open: list[Any] = []
        self.marks: list[tuple[Any, Any]] = []

    def enter(self, event: Overlapped, barrier: Callable[[], None] | None = None) -> None:
        """Mark the begin of a call."""
        self.open.append(self.backend.record_mark())

    def leave(self) -> None:
        """Mark its end."""
        self.marks.append((self.open.pop(), self.backend.record_mark()))

    def see_result(self, event: Overlapped, given: tuple, result: Pending) -> None:
        """Wait for the collective that has begun, if that is wanted."""
        if self.at_once:
            result.wait()


def _seen(grid: Grid, step: Callable[[], object], at_once: bool) -> float:
    """Seconds that this rank spends on collectives that may go on in one step."""
    overlap = _Overlap(grid.backend, at_once)
    with observed(grid, overlap):
        grid.comm.Barrier()
        step()
    return sum(grid.backend.seconds_between(*pair) for pair in overlap.marks)
