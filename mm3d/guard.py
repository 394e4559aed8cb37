"""End the job of all ranks when one rank fails, and print once what fails on many alike.

Under plain ``mpirun python program.py`` a rank that raises, or calls ``sys.exit(3)``, waits in
``MPI_Finalize`` for the others, which wait for it in their next collective: the job hangs.  After
`install` such a rank ends the job instead, after its traceback and its own ``atexit`` functions.

The guard decides at the end of the interpreter, from what is known then.  An uncaught exception
is in ``sys.last_value``, also where a program has set ``sys.excepthook``.  The code of an exit is
recorded when the interpreter itself reads it from the exception.  So an exception at a prompt, an
exception in a thread, and an exit that the program catches do not count as failures.  An exit
that bypasses ``sys.exit``, such as ``raise SystemExit(3)``, is not detected.

A rank that fails lets all others know of its error, by messages that only ranks that fail receive:
the others may be anywhere.  One that has heard of the same error says nothing of its own.  What a
rank would say after the first one has ended the job, about 2 seconds after its error, is lost.
Until then a program that receives messages of any tag from any rank may receive one of these.
"""
from __future__ import annotations

import atexit
import builtins
import hashlib
import os
import re
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any, NoReturn

from mm3d import console
from mpi4py import MPI

FLUSH_SECONDS = 2.0    # in which the launcher passes on what was written
ARRIVAL_SECONDS = 0.2    # in which a rank hears of ranks that have failed earlier
EARLIER_SECONDS = 1.0    # in which it hears of those before it that fail in the same moment
ADDRESS = re.compile("0x[0-9a-f]+")    # of an object, another one on each rank
DIGEST = 16    # bytes that stand for an error
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
            if isinstance(found, str) and self.guard.is_in_charge() and self.guard.is_told(found):
                return 1    # instead of the message
        return found

    @code.setter
    def code(self, value: Any) -> None:
        SystemExit.code.__set__(self, value)


Exit.__name__ = Exit.__qualname__ = "SystemExit"    # the name that tracebacks show
Exit.__module__ = "builtins"


class Guard:
    """End the job of all ranks if this rank ends with a failure.

    Its `code` is that of the exit that ends the program; None before and without one.
    """

    def __init__(self) -> None:
        self.code: Any = None
        self._process, self._silent = os.getpid(), False
        self._sent: list[Any] = []
        self._hook = sys.excepthook

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
        if status and self.is_in_charge():
            self.abort(status)

    def abort(self, status: int) -> NoReturn:
        """End the job, after all that was printed is passed on, here and where it is told."""
        console.flush()
        end = time.monotonic() + FLUSH_SECONDS + self._silent * (EARLIER_SECONDS + FLUSH_SECONDS)
        while time.monotonic() < end:
            MPI.COMM_WORLD.Iprobe(tag=_tag())    # messages go on their way only in calls of MPI
            time.sleep(0.05)
        MPI.COMM_WORLD.Abort(status)
        os._exit(status)    # where MPI returns from it

    def report(self, kind: type[BaseException], error: BaseException,
               trace: TracebackType | None) -> None:
        """Print an uncaught exception as ``sys.excepthook``, unless another rank has the same."""
        if self.exit_status() and sys.last_value is error and self.is_in_charge():
            self.print_once(error)
        else:
            self._hook(kind, error, trace)

    def print_once(self, error: BaseException) -> None:
        """Print an exception that ends this rank, unless another rank prints the same."""
        text = "".join(traceback.format_exception(error))
        if not self.is_told(text):
            world = MPI.COMM_WORLD
            head = (f"rank {world.rank} of {world.size}; ranks with the same error say "
                    f"nothing:")
            if self._hook is sys.__excepthook__:
                console.complain(head, text.removesuffix("\n"))    # at once: ranks' lines mix
            else:
                console.complain(head)
                self._hook(type(error), error, error.__traceback__)

    def is_told(self, text: str) -> bool:
        """Return whether another rank that fails tells `text`; otherwise this rank is to tell it.

        A rank that hears of it before it fails relies on the ranks that it hears of, and does not
        let others know.  Of several that fail in the same moment the first that can tells it.
        """
        world, can_tell = MPI.COMM_WORLD, console.can_complain()
        mine = hashlib.blake2b(ADDRESS.sub("", text).encode(errors="replace"),
                               digest_size=DIGEST).digest()
        try:
            self._silent = _is_heard(mine, range(world.size),
                                     ARRIVAL_SECONDS + EARLIER_SECONDS * (not can_tell))
            if not self._silent and can_tell:
                self._sent += [world.Isend([mine, MPI.BYTE], rank, _tag())
                               for rank in range(world.size) if rank != world.rank]
                self._silent = _is_heard(mine, range(world.rank), EARLIER_SECONDS)
        except MPI.Exception:    # of a world that is broken: better twice than never
            return False
        return self._silent

    def is_in_charge(self) -> bool:
        """Return whether the guard may end the job: not at a prompt, in a fork or under pytest."""
        prompt = sys.flags.interactive or sys.flags.inspect or hasattr(sys, "ps1")
        child = os.getpid() != self._process    # forked by a rank
        return not (prompt or child or "_pytest" in sys.modules or MPI.Is_finalized())


def install() -> Guard | None:
    """Make this rank end the job of all ranks when it fails.

    Returns None if no guard is installed: in a job of one rank, where MPI has not been started,
    and with ``MM3D_ABORT=0``.
    """
    if (os.environ.get(ABORT_VARIABLE) == "0" or not MPI.Is_initialized()
            or MPI.COMM_WORLD.size == 1):
        return None
    guard = Guard()
    for name in ("exit", "quit"):    # of the module site, for prompts, but used in programs too
        if type(getattr(builtins, name, None)).__name__ == "Quitter":
            setattr(builtins, name, guard.exit)
    sys.exit, sys.excepthook = guard.exit, guard.report
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


def end_job(error: BaseException) -> NoReturn:
    """Print an exception, once for all ranks that have the same, and end the job with status 1.

    For a program that installs no guard.  An interrupt is a word, of any rank, with status 130.
    """
    guard = Guard()
    if not isinstance(error, KeyboardInterrupt):
        guard.print_once(error)
        guard.abort(1)
    if not guard.is_told("interrupted"):
        console.complain("interrupted")
    guard.abort(130)


def _tag() -> int:
    """Return the tag of messages about errors, which programs hardly use."""
    return MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)


def _is_heard(mine: bytes, ranks: range, seconds: float) -> bool:
    """Receive messages for some time; return whether one of `ranks` has the error `mine`."""
    status, end = MPI.Status(), time.monotonic() + seconds * bool(ranks)
    while True:
        while MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE, _tag(), status):
            digest = bytearray(DIGEST)
            MPI.COMM_WORLD.Recv([digest, MPI.BYTE], status.source, _tag())
            if digest == mine and status.source in ranks:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
