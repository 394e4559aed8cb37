"""End a job that no longer makes progress, and say where its ranks are."""

import contextlib
from typing import Any, Callable, ContextManager, Iterator

from mm3d.tracing.watchdog import Watchdog


@contextlib.contextmanager
def watch_stalls(comm, seconds: int | None) -> Iterator[Callable[..., ContextManager]]:
    """Run a watchdog of `comm` and yield its `attached`; if `seconds` is None, yield `unwatched`.
    """
    if seconds is None:
        yield unwatched
        return
    with Watchdog(comm, seconds) as watchdog:
        yield watchdog.attached


def unwatched(grid: Any, model: Any = None) -> ContextManager:
    """Return a context in which no watchdog observes this rank."""
    return contextlib.nullcontext()
