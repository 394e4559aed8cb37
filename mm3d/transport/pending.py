"""Hold a nonblocking collective until it is complete."""

from typing import Any, Callable

from mm3d.arrays.backend import Array


class Pending:
    """Hold a collective in flight, which `wait` completes.

    `out` is the result, once complete.  `finish` makes it ready, or orders later computation after
    it, once the `request` is complete; with neither the collective is.  MPI makes no progress by
    itself: a long product calls `progress` now and then.  The buffers `kept` live until the
    collective is complete.
    """

    def __init__(self, out: Array, finish: Callable[[], Any] | None = None,
                 request: Any = None, kept: tuple[Array, ...] = ()) -> None:
        self.out, self.finish, self.request, self.kept = out, finish, request, kept

    @property
    def done(self) -> bool:
        """Return whether the collective is complete."""
        return self.request is None and self.finish is None

    def progress(self) -> None:
        """Let MPI make progress on the request."""
        self.request.Test()

    def wait(self) -> Array:
        """Complete the collective and return the result."""
        if self.request is not None:
            self.request.Wait()
        if self.finish is not None:
            self.finish()
        self.finish, self.request, self.kept = None, None, ()
        return self.out

    def take(self) -> Array:
        """Complete the collective, return the result and drop the reference to it."""
        out = self.wait()
        self.out = None
        return out
