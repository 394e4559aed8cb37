"""End the job of all ranks when one rank fails.

Under plain ``mpirun python program.py`` a rank that raises, or calls ``sys.exit(3)``, waits in
``MPI_Finalize`` for the others, which wait for it in their next collective: the job hangs.  After
`install` such a rank ends the job instead, after its traceback and its own ``atexit`` functions.

The guard decides at the end of the interpreter, from what is known then.  An uncaught exception
is in ``sys.last_value``, also where a program has set ``sys.excepthook``.  The code of an exit is
recorded when the interpreter itself reads it from the exception.  So an exception at a prompt, an
exception in a thread, and an exit that the program catches do not count as failures.  An exit
that bypasses ``sys.exit``, such as ``raise SystemExit(3)``, is not detected.
"""
from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import sys
import threading
import time
from typing import Any, NoReturn

from mpi4py import MPI

FLUSH_SECONDS = 2.0    # in which the launcher passes on what was written
ABORT_VARIABLE = "MM3D_ABORT"    # "0" leaves the guard out


class Exit(SystemExit):
    """The exception of ``sys.exit``, which records when the interpreter ends with its code."""

    guard: Guard

    @property
    def code(self) -> Any:
        """The code, as in SystemExit."""
        found = SystemExit.code.__get__(self)
        if sys._getframe().f_back is None:    # read by the interpreter: no Python frame is left
            self.guard.code = found
        return found

    @code.setter
    def code(self, value: Any) -> None:
        SystemExit.code.__set__(self, value)


Exit.__name__ = Exit.__qualname__ = "SystemExit"    # the name that tracebacks show
Exit.__module__ = "builtins"


class Guard:
    """End the job of all ranks if this rank ends with a failure.

    Attributes
    ----------
    code : object
        The code of the exit that ends the program; None before and without one.
    """

    def __init__(self) -> None:
        self.code: Any = None
        self._process = os.getpid()

    def exit(self, status: Any = None, /) -> NoReturn:
        """Raise the exit as ``sys.exit`` does."""
        # In a thread it ends only the thread, and threading.excepthook ignores no subclass.
        if threading.current_thread() is not threading.main_thread():
            raise SystemExit(status)
        error = Exit(status) if status is not None else Exit()
        error.guard = self
        raise error

    def exit_status(self) -> int:
        """Return the exit status of this rank, as far as it is known; 0 without a failure."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        trace = getattr(error, "__traceback__", None)
        if trace is not None and trace.tb_frame.f_back is None:    # it has left the whole program
            return 130 if isinstance(error, KeyboardInterrupt) else 1
        if self.code is None or isinstance(self.code, int):
            return (self.code or 0) & 0xff
        return 1    # the code is a message, which has been printed

    def abort_if_failed(self) -> None:
        """End the job at the end of the interpreter, if this rank has failed."""
        status = self.exit_status()
        if not status or not self.is_in_charge():
            return
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):    # a full disk, a closed stream
                    stream.flush()
        time.sleep(FLUSH_SECONDS)
        MPI.COMM_WORLD.Abort(status)

    def is_in_charge(self) -> bool:
        """Return whether the guard may end the job: not at a prompt, in a fork or under pytest."""
        prompt = sys.flags.interactive or sys.flags.inspect or hasattr(sys, "ps1")
        child = os.getpid() != self._process    # forked by a rank
        return not (prompt or child or "_pytest" in sys.modules or MPI.Is_finalized())


def install() -> Guard | None:
    """Make this rank end the job of all ranks when it fails.

    Returns
    -------
    Guard or None
        None if no guard is installed: in a job of one rank, where MPI has not been started, under
        ``python -m mpi4py``, which ends the job itself, and with ``MM3D_ABORT=0``.
    """
    if (os.environ.get(ABORT_VARIABLE) == "0" or "mpi4py.run" in sys.modules
            or not MPI.Is_initialized() or MPI.COMM_WORLD.size == 1):
        return None
    guard = Guard()
    for name in ("exit", "quit"):    # of the module site, for prompts, but used in programs too
        if type(getattr(builtins, name, None)).__name__ == "Quitter":
            setattr(builtins, name, guard.exit)
    sys.exit = guard.exit
    atexit.register(guard.abort_if_failed)
    return guard


def disarm() -> None:
    """Remove the guard: the program ends the job of all ranks itself.

    For a program whose ranks agree on a status other than 0 and all end with it, so that no rank
    waits for another.
    """
    guard = getattr(sys.exit, "__self__", None)
    if isinstance(guard, Guard):
        atexit.unregister(guard.abort_if_failed)
