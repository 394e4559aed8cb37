"""The backends in use, replaced for a while."""
from contextlib import contextmanager
from typing import Iterator

from mm3d.arrays import backend
from mm3d.arrays.backend import Backend


@contextmanager
def use_only(*backends: Backend) -> Iterator[None]:
    """Use only these backends within the block, and others only after `get` makes them.

    An array belongs to the first of them that owns it.  After the block the earlier backends are
    in use again.
    """
    before = dict(backend._backends)
    backend._backends.clear()
    backend._owners.clear()
    try:
        for one in backends:
            backend.get(one)
        yield
    finally:
        backend._backends.clear()
        backend._backends.update(before)
        backend._owners.clear()
