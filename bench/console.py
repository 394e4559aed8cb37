"""Print lines of results, whatever becomes of standard output."""

import os
import sys


def say(text: str) -> None:
    """Print `text`; a failure to print must not end a measurement.

    When standard output is closed or its disk is full, standard error says so once, and nothing
    more is printed.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"error: standard output cannot be written ({error.strerror}): going on without it, "
              f"and writing all files", file=sys.stderr, flush=True)
