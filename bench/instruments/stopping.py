"""Stop a training between two steps: by a signal, a file, or when its time is over."""

import signal
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

import numpy as np
from mpi4py import MPI

SIGNALS = (signal.SIGINT, signal.SIGTERM)
REASONS = ("signal", "max_seconds", "stop_file")
PAUSE = 0.5    # seconds between two looks for the file, which may be on a slow file system


def stop_file_exists(file: Path) -> bool:
    """Return whether a file that asks for a stop is there.

    Where that is unknown, such as in an unreadable folder, it warns: nothing stops then.
    """
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        warnings.warn(f"whether {file} is there cannot be told: {error.strerror}", stacklevel=2)
        return False
    return True


class Stop:
    """Decide whether a training is to stop, the same on all ranks.

    It stops after some seconds, None for no limit, or when a file exists, which rank 0 looks for.
    """

    def __init__(self, comm: Any, seconds: float | None, file: str | None) -> None:
        self.comm, self.asked = comm, False
        self.until = None if seconds is None else time.monotonic() + seconds
        self.file = Path(file) if file is not None and comm.rank == 0 else None
        self._looked = -PAUSE

    def ask(self, number: int, frame: Any) -> None:
        """Ask for a stop after this step; a second signal ends the process as usual."""
        self.asked = True
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT
                      else signal.SIG_DFL)

    def agree(self, seconds: float) -> tuple[float, str]:
        """Return the longest of all ranks' `seconds`, and why to stop: a reason, or empty.

        Every rank must call it.
        """
        late, exists = self.until is not None and time.monotonic() >= self.until, False
        if self.file is not None and time.monotonic() >= self._looked + PAUSE:
            self._looked, exists = time.monotonic(), stop_file_exists(self.file)
        found = np.array([seconds, self.asked, late, exists], float)
        self.comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
        return float(found[0]), next((why for why, n in zip(REASONS, found[1:]) if n), "")

    def agree_on_signal(self) -> str:
        """Return whether a signal came on any rank, as reason or empty; all ranks call it."""
        return REASONS[0] if self.comm.allreduce(self.asked, MPI.LOR) else ""


@contextmanager
def stop_on_request(comm: Any, seconds: float | None, file: str | None) -> Iterator[Stop]:
    """Return a context in which signals ask for a `Stop` instead of ending the process."""
    stop = Stop(comm, seconds, file)
    before = {number: signal.signal(number, stop.ask) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
