"""Raise an error of one rank on all ranks, in one line."""

import errno
import os
import re
from typing import Any, Callable

# Errors of disks, HDF5 and arguments, whose text says enough without their type.
PROBLEMS = (OSError, RuntimeError, ValueError, KeyError, MemoryError)


def on_root(comm: Any, problem: str, act: Callable[[], Any]) -> Any:
    """Call `act` on rank 0, and return its result on all ranks.

    Raises OSError on every rank alike, with `problem` before the line of its error.
    """
    result, line = comm.bcast(_attempt(act) if comm.rank == 0 else None)
    if line:
        raise OSError(f"{problem}: {line}")
    return result


def on_each(comm: Any, problem: str, act: Callable[[], Any]) -> Any:
    """Call `act` on each rank, and return this rank's result.

    Raises OSError on every rank alike, with the line of the first rank that failed.
    """
    result, line = _attempt(act)
    lines = comm.allgather(line)
    failed = [rank for rank, found in enumerate(lines) if found]
    if failed:
        raise OSError(f"{problem}: {lines[failed[0]]} (rank {failed[0]} of {comm.size})")
    return result


def _attempt(act: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return what `act` returns, and the line of its error, of any kind: other ranks wait."""
    try:
        return act(), None
    except Exception as error:
        return None, describe_error(error)


def describe_error(error: BaseException) -> str:
    """Return an error in one line, without HDF5's additions to the system's message."""
    text = " ".join(str(error).split())
    said = re.search(r"error message = '([^']*)'", text)
    if said:
        return said[1]
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return os.strerror(error.errno)
    if text and isinstance(error, PROBLEMS):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
