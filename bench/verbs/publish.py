"""Write what was measured, print its table and say where the file is."""

from pathlib import Path
from typing import Callable

from bench.output import say
from mm3d import store
from mm3d.record import Measurements


def publish(record: Measurements | None, out: Path, name: str, comm,
            table: Callable[[Measurements], str] | None = None) -> int:
    """Write a record into the folder `out`, then print its table and the name of its file.

    Parameters
    ----------
    record : Measurements or None
        The record on rank 0; it is not looked at on the others.
    out : Path
        The folder.
    name : str
        The beginning of the file's name.
    comm : mpi4py.MPI.Intracomm
        The ranks, all of which call this.
    table : callable, optional
        Formats the record; called on rank 0 alone.

    Returns
    -------
    int
        0 when it was written, 1 when it could not be, which rank 0 says; the same on every rank.
    """
    outcome = None
    if comm.rank == 0:
        try:
            outcome = 0, f"written: {store.write(record, out, name)}"
        except store.StoreError as error:
            outcome = 1, f"failed: {error}"
    status, line = comm.bcast(outcome)
    if comm.rank == 0:
        if table is not None:
            say(table(record) + "\n")
        say(line)
    return status


def failed(name: str, why: object, comm) -> int:
    """Say, on rank 0, that a measurement failed; 1."""
    if comm.rank == 0:
        say(f"failed: {name}: {why}")
    return 1
