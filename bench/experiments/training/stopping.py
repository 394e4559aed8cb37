"""Stop a training between two steps: by Ctrl-C, by SIGTERM, or when its time is over."""

import signal
import time
from contextlib import contextmanager
from typing import Any, Iterator

import numpy as np
from mpi4py import MPI

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Know whether a training is to stop, the same on all ranks.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    seconds : float, optional
        The time after which to stop; without it there is no limit.
    """

    def __init__(self, comm: Any, seconds: float | None = None) -> None:
        self.comm, self.asked = comm, False
        self.until = None if seconds is None else time.monotonic() + seconds

    def ask(self, number: int, frame: Any) -> None:
        """Ask for a stop after this step; a second signal ends the process as usual."""
        self.asked = True
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT
                      else signal.SIG_DFL)

    def agree(self, seconds: float) -> tuple[float, str]:
        """Return the longest of all ranks' `seconds`, and why to stop; every rank must call it.

        The reason is "signal", "time", or empty.
        """
        late = self.until is not None and time.monotonic() >= self.until
        found = np.array([seconds, self.asked, late], float)
        self.comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
        return float(found[0]), "signal" if found[1] else "time" if found[2] else ""


@contextmanager
def stop_on_request(comm: Any, seconds: float | None = None) -> Iterator[Stop]:
    """Return a context in which signals ask for a stop instead of ending the process."""
    stop = Stop(comm, seconds)
    before = {number: signal.signal(number, stop.ask) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
