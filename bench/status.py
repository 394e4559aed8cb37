"""The exit status of a command line, and what it says when it cannot do what it was told."""

import sys
from typing import Any, Callable

from bench.cases import UsageError
from mm3d.store import StoreError


def status_of(work: Callable[[Any], int], arguments, *known: type[Exception]) -> int:
    """What `work` returns for `arguments`; 2, after a line that says why, when it cannot be done.

    Parameters
    ----------
    work : callable
        Does what the command line says.
    arguments
        The command line.
    *known : types of exceptions
        That tell the user something, beside UsageError, StoreError and OSError.  Any other is
        an error of the program and is not caught.
    """
    try:
        return work(arguments)
    except (UsageError, StoreError, OSError, *known) as error:
        named = isinstance(error, OSError) and error.filename and error.strerror
        print(f"error: {f'{error.filename}: {error.strerror}' if named else error}",
              file=sys.stderr)
        return 2
