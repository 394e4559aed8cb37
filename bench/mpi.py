"""Start MPI in the ranks of a job, and in other processes only where a verb needs it.

MPI libraries keep files in ``/dev/shm``, which stay there when a process is killed.  A process
that only starts ``mpirun``, or an emulated cluster, must have none.
"""

import os
import sys
from contextlib import suppress
from typing import Any


def defer_start() -> None:
    """Let the first import of ``mpi4py.MPI`` not start MPI; `start` does."""
    with suppress(ModuleNotFoundError):    # mm3d says what to do about it
        import mpi4py
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True    # at the end of the interpreter, if it has been started


def start() -> None:
    """Start MPI as ``mpi4py.MPI`` does by default; nothing if it has been started."""
    from mm3d import mpi_start    # mm3d before MPI
    from mpi4py import MPI, rc
    if not MPI.Is_initialized():
        with mpi_start.starting():
            MPI.Init_thread(getattr(MPI, f"THREAD_{rc.thread_level.upper()}"))


def expect_interrupt(starting: bool) -> None:
    """Let an interrupt end a program that is `starting` with a word instead of a traceback."""
    def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if issubclass(kind, KeyboardInterrupt):
            os.write(2, b"interrupted\n")    # what prints may be imported by half
        else:
            sys.__excepthook__(kind, error, trace)
    if starting:
        sys.excepthook = report
