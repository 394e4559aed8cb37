"""Ranks that do not exist: the transport of dry runs, which moves nothing."""

from typing import Iterator

from mm3d.arrays.backend import Array
from mm3d.transport.mpi import MpiTransport


class DryCommunicator:
    """The ranks of a communicator of which only one exists: this one.

    A grid made on it has all its directions, coordinates and blocks, and collectives that move
    nothing.  What would have travelled is left undefined, so it is for arrays without contents.

    Parameters
    ----------
    size, rank : int
        How many ranks there would be, and which of them this is.
    """

    def __init__(self, size: int, rank: int = 0) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size} does not exist: 0 to {size - 1} would do")
        self.size, self.rank = size, rank

    def Free(self) -> None:
        """Nothing to give back."""


class SilentTransport(MpiTransport):
    """Collectives between ranks that do not exist: nothing travels."""

    name = "silent"
    note = "nothing travels between ranks that do not exist"
    nonblocking = False
    on_host = False

    def take_moved(self) -> float:
        """None."""
        return 0

    def _all_gather(self, send: Array, recv: Array, lengths: list[int]) -> None:
        """Nothing to gather."""

    def _reduce_scatter(self, send: Array, recv: Array, lengths: list[int]) -> None:
        """Nothing to sum."""

    def _all_reduce(self, send: Array, recv: Array) -> None:
        """Nothing to sum."""

    def _broadcast(self, buffer: Array, root: int) -> None:
        """Nobody to tell."""

    def _reduce(self, send: Array, recv: Array | None, root: int) -> None:
        """Nothing to sum."""

    def _pieces(self, flat: Array, a: Array, dim: int,
                counts: list[int]) -> Iterator[tuple[Array, Array]]:
        """All of them in one: they have no contents, and there may be a million."""
        yield self.backend.xp.reshape(flat, a.shape), a
