"""Create communicators, with a clear error once MPI's few thousand are in use."""

from typing import Any, Callable

from mpi4py import MPI

EXHAUSTED = "too many communicators"    # what MPICH says, in lower case


def create(make: Callable[..., MPI.Intracomm], *arguments: Any) -> MPI.Intracomm:
    """Create a communicator by one of mpi4py's methods, such as ``comm.Split``.

    Parameters
    ----------
    make : callable
        The method, which all ranks of its communicator call.
    *arguments
        Its arguments.

    Raises
    ------
    RuntimeError
        On every rank alike, in one line, when MPI has no communicator left.
    """
    try:
        return make(*arguments)
    except MPI.Exception as error:
        if EXHAUSTED not in str(error).lower():
            raise
    raise RuntimeError("MPI has no communicators left: call free() of the models, meshes and "
                       "grids (scheme.grid.free()) that are not used any more")
