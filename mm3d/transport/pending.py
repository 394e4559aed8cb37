"""A collective that goes on while this rank computes."""

from typing import Any, Callable

from mm3d.arrays.backend import Array


class Pending:
    """A collective in flight: it goes on while this rank multiplies, until `wait`.

    Parameters
    ----------
    out : Array
        The result, once complete.
    finish : callable, optional
        Orders what is computed from then on after the collective; None if that is complete.
    request : mpi4py.MPI.Request, optional
        The request to complete before that.  MPI moves nothing by itself: a product that lasts
        long calls `progress` now and then.
    kept : tuple of Array
        Buffers that must stay until then.
    """

    def __init__(self, out: Array, finish: Callable[[], Any] | None = None,
                 request: Any = None, kept: tuple[Array, ...] = ()) -> None:
        self.out, self.finish, self.request, self.kept = out, finish, request, kept

    @property
    def done(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.request is None and self.finish is None

    def progress(self) -> None:
        """Let MPI move the request on."""
        self.request.Test()

    def wait(self) -> Array:
        """Complete the collective; returns the result."""
        if self.request is not None:
            self.request.Wait()
        if self.finish is not None:
            self.finish()
        self.finish, self.request, self.kept = None, None, ()
        return self.out

    def take(self) -> Array:
        """`wait`, and hold the result no longer."""
        out = self.wait()
        self.out = None
        return out
