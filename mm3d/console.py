"""Print lines, whatever becomes of standard output and standard error.

What cannot be printed ends nothing: a run goes on and writes its files where nobody reads its
lines any more, where the disk of its log is full, and where a stream was closed from the start.
A program calls `protect` first, which also protects what libraries print; everything of its own
it prints by `say` and `complain`.
"""
from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys

NAMES = {1: "stdout", 2: "stderr"}


class _Output(io.FileIO):
    """Write to standard output or standard error, and lose what cannot be written."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)

    def write(self, data) -> int:
        """Write `data` or lose it; return the number of bytes that are dealt with."""
        try:
            written = super().write(data)
            while written is None:    # another program has made it nonblocking, and it is full
                select.select([], [self], [])
                written = super().write(data)
            return written
        except OSError as error:
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self.fileno())    # also for its children
            # A reader that has left, such as head, has seen enough.
            if self.fileno() == 1 and error.errno != errno.EPIPE:
                complain(f"warning: standard output cannot be written ({error.strerror}): going "
                         f"on without it, and writing all files")
            return len(memoryview(data).cast("B"))


def open_closed_streams() -> None:
    """Open the standard streams that were closed when this process started, on nothing.

    Otherwise the first files or sockets of this process get their numbers, and what any library
    prints goes into these.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)    # the least free number


def protect() -> None:
    """Let ``sys.stdout`` and ``sys.stderr`` lose what cannot be written, and print any text.

    Letters that the encoding of a stream lacks are printed as escapes.  A stream that a program
    has put in place of its own stays.
    """
    for number, name in NAMES.items():
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, io.TextIOWrapper(
                io.BufferedWriter(_Output(number)), encoding=getattr(stream, "encoding", None),
                errors="backslashreplace", line_buffering=True))


def say(*lines: object) -> None:
    """Print lines to standard output at once, as one text, which no other rank's lines cut."""
    print("\n".join(map(str, lines)) + "\n", end="", flush=True)


def complain(*lines: object) -> None:
    """Print lines to standard error at once, also without `protect`."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print("\n".join(map(str, lines)) + "\n", end="", file=sys.stderr, flush=True)


def can_complain() -> bool:
    """Return whether there is a standard error, as far as can be told without writing to it."""
    return sys.stderr is not None and not getattr(sys.stderr, "closed", False)


def flush() -> None:
    """Flush standard output and standard error, as far as they can be written."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):    # a full disk, a closed stream
                stream.flush()
