"""Hold a nonblocking collective until it is complete."""

from typing import Any, Callable

from mm3d.arrays.backend import Array


class Pending:
    """Hold a collective in flight, which `wait` completes.

    `out` receives the result.  `wait` waits for the `request`, then calls `finish`, which makes
    `out` ready or orders later computation after it; without both, the collective is complete
    already.  The buffers `kept` live until then.  MPI makes no progress by itself: a long product
    calls `progress` now and then.
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
        """Complete the collective, return the result and keep no reference to its memory."""
        out = self.wait()
        self.out = None
        return out
