"""How much of the communication of a step other work hides."""

from typing import Any, Callable

import numpy as np

from mm3d.grid import Grid
from mm3d.transport import Pending


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


def _seen(grid: Grid, step: Callable[[], object], at_once: bool) -> float:
    """Seconds that this rank spends on collectives that may go on in one step."""
    marks, mark = [], grid.backend.mark

    def timed(call: Callable) -> Callable:
        def told(*arguments: Any) -> Any:
            start = mark()
            result = call(*arguments)
            marks.append((start, mark()))
            return result
        return told

    def begun(begin: Callable) -> Callable:
        def told(*arguments: Any) -> Any:
            pending = timed(begin)(*arguments)
            if not isinstance(pending, Pending):    # nothing to prefetch, or nothing that can
                marks.pop()
                return pending
            pending.progress, pending.wait = timed(pending.progress), timed(pending.wait)
            if at_once:
                pending.wait()
            return pending
        return told

    for axis in grid.axes.values():
        axis.begin_reduce_scatter = begun(axis.begin_reduce_scatter)
        axis.prefetch = begun(axis.prefetch)
    try:
        grid.comm.Barrier()
        step()
    finally:
        for axis in grid.axes.values():
            del axis.begin_reduce_scatter, axis.prefetch
    return sum(grid.backend.seconds(*pair) for pair in marks)
