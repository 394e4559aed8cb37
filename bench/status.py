"""The exit status of a command line, and what it says when it cannot do what it was told."""

import sys
from typing import Callable

from bench.cases import UsageError
from mm3d.store import StoreError


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
