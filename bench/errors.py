"""Define the errors of the benchmark and the exit status of each."""

import sys
from typing import Callable, Iterable


def status_of(work: Callable[[], int], *known: type[Exception]) -> int:
    """Return what `work` returns; 2, after a line that says why, when it cannot be done.

    Parameters
    ----------
    work : callable
        Does what the command line says.
    *known : types of exceptions
        Further errors to report to the user, beside UsageError, StoreError and OSError.  Any
        other is an error of the program and is not caught.
    """
    try:
        return work()
    except (UsageError, StoreError, OSError, *known) as error:
        named = isinstance(error, OSError) and error.filename and error.strerror
        print(f"error: {f'{error.filename}: {error.strerror}' if named else error}",
              file=sys.stderr)
        return 2


class UsageError(ValueError):
    """Invalid argument; the same on every rank, before any communication."""


def require_known(known: dict, name: str, what: str, *also: str):
    if name not in known:
        choices: Iterable[str] = [*known, *also]
        raise UsageError(f"{what} {name!r} is unknown: choose one of {', '.join(choices)}")
    return known[name]


class WrongResult(Exception):
    """A wrong result, of which no time counts; the message names it."""


class Failed(Exception):
    """A row that could not be measured, for a reason that is the same on every rank."""


class LeftOut(Failed):
    """A row that was not begun, as its nodes lack memory for it; the same on every rank."""


class StoreError(Exception):
    """A folder that cannot be written, or a file that is not a run; says which and why."""
