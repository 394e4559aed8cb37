"""Timing: seconds of forward and backward, on every rank, for every repetition."""

from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Callable

import numpy as np


def measure(forward: Callable[[], Any], backward: Callable[[Any], Any], comm,
            synchronize: Callable[[], None], warmup: int, repetitions: int,
            prepare: Callable[[], None] = lambda: None) -> dict[str, np.ndarray] | None:
    """Time `forward` and `backward` apart.

    Before each of the two all ranks meet at a barrier and the device is idle; a phase ends when
    the device is idle again.  `prepare` and the barriers are not timed.

    Parameters
    ----------
    forward : callable
        One forward pass; what it returns is handed to `backward`.
    backward : callable
        One backward pass.
    comm : mpi4py.MPI.Intracomm
        The ranks that take part.
    synchronize : callable
        Waits until the device has finished.
    warmup : int
        Repetitions before the first that counts.
    repetitions : int
        Repetitions that count, at least one.
    prepare : callable, optional
        Called before each repetition, such as to clear gradients.

    Returns
    -------
    dict of str to ndarray, or None
        "forward" and "backward": seconds, (repetitions, ranks), float64, on rank 0; None on
        the other ranks.

    Raises
    ------
    ValueError
        When `repetitions` is less than 1 or `warmup` less than 0.
    """
    if repetitions < 1 or warmup < 0:
        raise ValueError(f"repetitions {repetitions}, warm-up {warmup}: at least one repetition "
                         f"and no negative warm-up would do")
    local = np.empty((2, warmup + repetitions))
    for repetition in range(warmup + repetitions):
        prepare()
        local[0, repetition], saved = _timed(forward, comm, synchronize)
        local[1, repetition], _ = _timed(partial(backward, saved), comm, synchronize)
        # Nothing of one repetition stays in memory in the next.
        del saved, _
    everyone = np.empty((comm.size, *local.shape)) if comm.rank == 0 else None
    comm.Gather(local, everyone)
    if everyone is None:
        return None
    counted = everyone[:, :, warmup:].transpose(1, 2, 0)
    return {"forward": counted[0].copy(), "backward": counted[1].copy()}


def _timed(step: Callable[[], Any], comm, synchronize: Callable[[], None]) -> tuple[float, Any]:
    synchronize()
    comm.Barrier()
    start = perf_counter()
    result = step()
    synchronize()
    return perf_counter() - start, result


def slowest(samples: np.ndarray) -> np.ndarray:
    """Of samples (repetitions, ranks) the maximum over ranks: a step is done when all are."""
    return samples.max(axis=1)


def typical(samples: np.ndarray) -> float:
    """The median over repetitions of the maximum over ranks."""
    return median(slowest(samples).tolist())


def average_step_time(samples: dict[str, np.ndarray], batch: int) -> float:
    """Seconds a sequence: (forward + backward) / batch, the paper's equation 6, of medians."""
    return (typical(samples["forward"]) + typical(samples["backward"])) / batch
