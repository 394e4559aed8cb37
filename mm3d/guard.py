"""A rank that fails ends the job of all ranks.

Under plain ``mpirun python program.py`` a rank that raises, or calls ``sys.exit(3)``, waits in
``MPI_Finalize`` for the others, which wait for it in their next collective: the job hangs.  With
`install` such a rank ends the job instead, after its traceback and its own ``atexit`` functions.

The decision falls at the end of the interpreter, from what it knows then.  An exception that
nobody caught is in ``sys.last_value`` (also where a program has a ``sys.excepthook`` of its own);
the code of an exit is noted when the interpreter itself asks the exception for it.  So neither an
exception at a prompt, nor one in a thread, nor an exit that somebody catches counts.  An exit
that bypasses ``sys.exit``, as ``raise SystemExit(3)`` does, is not seen.
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

GRACE = 2.0    # seconds in which the launcher passes on what was written
OFF = "MM3D_ABORT"


class Exit(SystemExit):
    """What ``sys.exit`` raises: it notes that the interpreter ends with its code."""

    guard: Guard

    @property
    def code(self) -> Any:
        """As of SystemExit."""
        found = SystemExit.code.__get__(self)
        if sys._getframe().f_back is None:    # asked by the interpreter, under which nothing runs
            self.guard.code = found
        return found

    @code.setter
    def code(self, value: Any) -> None:
        SystemExit.code.__set__(self, value)


Exit.__name__ = Exit.__qualname__ = "SystemExit"    # which is what a traceback shall say
Exit.__module__ = "builtins"


class Guard:
    """Ends the job when this rank ends with a failure.

    Attributes
    ----------
    code : object
        Of the exit that ends the program.
    """

    def __init__(self) -> None:
        self.code: Any = None
        self._process = os.getpid()

    def exit(self, status: Any = None, /) -> NoReturn:
        """As ``sys.exit``."""
        # In a thread it ends the thread alone; the hook there is silent on no subclass.
        if threading.current_thread() is not threading.main_thread():
            raise SystemExit(status)
        error = Exit(status) if status is not None else Exit()
        error.guard = self
        raise error

    def status(self) -> int:
        """With which status this rank ends, as far as is known; 0 when it has not failed."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        trace = getattr(error, "__traceback__", None)
        if trace is not None and trace.tb_frame.f_back is None:    # it has left the whole program
            return 130 if isinstance(error, KeyboardInterrupt) else 1
        if self.code is None or isinstance(self.code, int):
            return (self.code or 0) & 0xff
        return 1    # a message, which has been printed

    def end(self) -> None:
        """At the end of the interpreter: end the job, if this rank has failed."""
        status = self.status()
        if not status or not self.applies():
            return
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):    # a full disk, a closed stream
                    stream.flush()
        time.sleep(GRACE)
        MPI.COMM_WORLD.Abort(status)

    def applies(self) -> bool:
        """Whether nobody else decides over the end of this program."""
        prompt = sys.flags.interactive or sys.flags.inspect or hasattr(sys, "ps1")
        child = os.getpid() != self._process    # that a rank has forked
        return not (prompt or child or "_pytest" in sys.modules or MPI.Is_finalized())


def install() -> Guard | None:
    """Have this rank end the job of all ranks when it fails.

    Nothing is done in a job of one rank, where MPI has not been started, under ``python -m
    mpi4py``, which does the same, and with ``MM3D_ABORT=0``.
    """
    if (os.environ.get(OFF) == "0" or "mpi4py.run" in sys.modules or not MPI.Is_initialized()
            or MPI.COMM_WORLD.size == 1):
        return None
    guard = Guard()
    for name in ("exit", "quit"):    # of the module site, for prompts, but used in programs too
        if type(getattr(builtins, name, None)).__name__ == "Quitter":
            setattr(builtins, name, guard.exit)
    sys.exit = guard.exit
    atexit.register(guard.end)
    return guard


def disarm() -> None:
    """Leave it to the program to end the job of all ranks.

    For one whose ranks agree on a status other than 0 and leave together, which is no failure of
    one that others wait for.
    """
    guard = getattr(sys.exit, "__self__", None)
    if isinstance(guard, Guard):
        atexit.unregister(guard.end)
