"""Print on rank 0."""

import os
import sys


def say(text: str) -> None:
    """Print `text`.

    A reader that has gone away, or a disk that is full, must not cost what is yet to be measured:
    then standard error says so, once, and nothing more is printed.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"error: standard output cannot be written ({error.strerror}): going on without it, "
              f"and writing all files", file=sys.stderr, flush=True)
