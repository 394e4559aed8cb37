"""Watch a job for ranks that no longer make progress, as ``--stall`` asks."""

import contextlib
from typing import Any, ContextManager


def unwatched(grid: Any, model: Any = None) -> ContextManager:
    """Return a context in which no watchdog observes this rank."""
    return contextlib.nullcontext()
