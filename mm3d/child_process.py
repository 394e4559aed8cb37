"""Run a child process in a session of its own, and leave no process of it behind.

The child leads a process group.  All of the group ends with the block that started it: in time,
at a limit of time, at an exception, Ctrl-C included.  An ``mpirun`` that is told to end ends its
ranks, which are not in its group.
"""
from __future__ import annotations

import contextlib
import ctypes
import locale
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

# The encoding in which programs that are started here print: the locale's, or UTF-8 in Python's
# UTF-8 mode, which they have too.
CHILDREN_PRINT = locale.getpreferredencoding(False)
GRACE = 10.0     # seconds between SIGTERM and SIGKILL
ORPHANS = 1.0    # seconds of these, at most, for processes that have outlived the child
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ChildResult:
    """Describe the end of a child process."""

    # Exit status, or minus the number of the signal that ended it; None when it was ended at the
    # limit of time.
    status: int | None
    # Standard output and standard error up to that moment.
    out: str
    err: str


def run_child(command: Sequence[str], limit: float | None = None, log: Path | None = None,
              **options) -> ChildResult:
    """Run a command to its end, or end it after `limit` seconds.

    `command` is the program and its arguments.  The file `log` gets standard output and standard
    error, as they are printed; `out` of the result is then both.  Options are those of
    `start_child`: `env`, `cwd`, `grace`, `with_parent`.  Raises OSError when the program cannot be
    started.
    """
    with contextlib.ExitStack() as files:
        # Files and not pipes: a process that keeps a pipe open, in a session of its own, would
        # have to be waited for.
        out, err = ((files.enter_context(log.open(
            "w+", encoding=CHILDREN_PRINT, errors="replace")), None) if log else (
                _temporary_file(files), _temporary_file(files)))
        with start_child(command, stdout=out, stderr=err or subprocess.STDOUT,
                         **options) as child:
            try:
                status: int | None = child.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
        return ChildResult(status, _content(out), _content(err) if err else "")


@contextlib.contextmanager
def start_child(command: Sequence[str], *, stdout: int | IO[str] = subprocess.PIPE,
                stderr: int | IO[str] | None = None, env: Mapping[str, str] | None = None,
                cwd: Path | None = None, grace: float = GRACE,
                with_parent: bool = False) -> Iterator[subprocess.Popen]:
    """Start a child process, and end it with its group at the end of the block.

    `command` is the program and its arguments; its standard input is empty, and output is text.
    `stdout`, `stderr`, `env` and `cwd` are as of `subprocess.Popen`.  If the block ends first, the
    child has `grace` seconds to end between SIGTERM and SIGKILL.  On Linux `with_parent` ends it
    also when this process is killed; this process is then forked, which is not safe for a rank of
    a job, nor for a process that uses a GPU.  Raises OSError when the program cannot be started.
    """
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
        encoding=CHILDREN_PRINT, errors="replace", start_new_session=True, env=env, cwd=cwd,
        preexec_fn=_ask_for_signal() if with_parent else None)
    try:
        yield child
    finally:
        end_child(child, grace)


def end_child(child: subprocess.Popen, grace: float = GRACE) -> None:
    """End a child process and its group: by SIGTERM, after `grace` seconds by SIGKILL."""
    begun = time.monotonic()
    try:
        _send_to_group(child, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace)
        end = min(time.monotonic() + ORPHANS, begun + grace)
        while _send_to_group(child, 0) and time.monotonic() < end:
            time.sleep(0.01)
    finally:    # at once where a second Ctrl-C ends the patience
        _send_to_group(child, signal.SIGKILL)
        child.wait()
        if child.stdout:
            child.stdout.close()


def _send_to_group(child: subprocess.Popen, number: int) -> bool:
    """Send a signal to the group of a child; return whether any process is left in it."""
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        return False
    return True


def _ask_for_signal() -> Callable[[], object] | None:
    """Return the call by which a forked process gets a SIGTERM when its parent has ended."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl    # looked up here: after a fork it may wait for ever
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _temporary_file(files: contextlib.ExitStack) -> IO[str]:
    return files.enter_context(tempfile.TemporaryFile(
        "w+", encoding=CHILDREN_PRINT, errors="replace"))


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
