"""Create communicators, or stand in for those of ranks that do not exist."""

from typing import Any, Callable, NoReturn

from mpi4py import MPI

EXHAUSTED = "too many communicators"    # what MPICH says, in lower case


def create(make: Callable[..., MPI.Intracomm], *arguments: Any) -> MPI.Intracomm:
    """Create a communicator by one of mpi4py's methods, such as ``comm.Split``.

    Raises RuntimeError on every rank alike, in one line, when MPI has no communicator left.
    """
    try:
        return make(*arguments)
    except MPI.Exception as error:
        if EXHAUSTED not in str(error).lower():
            raise
    raise RuntimeError("MPI has no communicators left: call free() of the models, meshes and "
                       "grids (scheme.grid.free()) that are not used any more")


class Freed:
    """Stand in for a freed communicator, and refuse every use but to free it again.

    The RuntimeError of any other use names `what` was freed.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def free(self) -> None:
        """Do nothing: it is freed."""

    Free = free

    def refuse(self) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError(f"{self._what} was freed: a new grid, mesh or model would do")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):    # what Python asks for, such as `copy`, also before __init__
            raise AttributeError(name)
        self.refuse()


class DryCommunicator:
    """Stand in for a communicator whose ranks other than `rank` do not exist.

    A mesh or a grid on it has all its directions, coordinates and blocks, and collectives and
    messages that move nothing.  Received values are undefined, so it is for arrays without
    contents.
    """

    def __init__(self, size: int, rank: int = 0) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size} does not exist: 0 to {size - 1} would do")
        self.size, self.rank = size, rank

    def Free(self) -> None:
        """Do nothing: there is no communicator to free."""

    def Dup(self) -> "DryCommunicator":
        """Return this communicator."""
        return self

    def Get_attr(self, key: int) -> int:
        """Return the largest tag, which no schedule reaches."""
        return 2 ** 62

    def allgather(self, own: Any) -> list[Any]:
        """Return this rank's object once for each rank, as if all gave the same."""
        return [own] * self.size

    def Isend(self, buffer: Any, target: int, tag: int) -> "DryRequest":
        """Send nothing."""
        return DryRequest()

    Issend = Irecv = Isend


class DryRequest:
    """Stand in for the request of a message, complete at once, where MPI may not be initialized.
    """

    def Test(self) -> bool:
        """Return True."""
        return True

    def Wait(self) -> None:
        """Do nothing."""
