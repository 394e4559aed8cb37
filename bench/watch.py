"""``--stall``: a job that no longer makes progress ends, and says where its ranks are."""

import contextlib
from typing import Any, Callable, ContextManager, Iterator

from mm3d.watchdog import Watchdog


@contextlib.contextmanager
def watching(comm, seconds: int | None) -> Iterator[Callable[..., ContextManager]]:
    """What `Watchdog.attached` is while a watchdog of `comm` watches; without `seconds` none does.
    """
    if seconds is None:
        yield unwatched
        return
    with Watchdog(comm, seconds) as watchdog:
        yield watchdog.attached


def unwatched(grid: Any, model: Any = None) -> ContextManager:
    """Nobody knows where this rank is."""
    return contextlib.nullcontext()
