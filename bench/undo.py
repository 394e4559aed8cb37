"""Remove what a command made in advance, such as a folder of results, if nothing came of it."""

from typing import Callable

_undone: list[Callable[[], object]] = []


def when_done(undo: Callable[[], object]) -> None:
    """Call `undo` when the command ends, the last one first; it removes only what is empty."""
    _undone.append(undo)


def tidy() -> None:
    """Remove what is empty: a refused command leaves nothing behind."""
    while _undone:
        _undone.pop()()
