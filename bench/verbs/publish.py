"""Write what was measured, print its table and say where the file is."""

from pathlib import Path
from typing import Callable

from bench.agreement import on_rank_0
from bench.console import say
from bench.errors import StoreError, UsageError
from bench.prediction import machine_file
from bench.prediction.machine_model import Machine
from bench.records import run_file
from bench.records.measurements import Measurements


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
            outcome = 0, f"written: {run_file.write_run(record, out, name)}"
        except StoreError as error:
            outcome = 1, f"failed: {error}"
    status, line = comm.bcast(outcome)
    if comm.rank == 0:
        if table is not None:
            say(table(record) + "\n")
        say(line)
    return status


def publish_machine(machine: Machine | None, path: str | Path, comm) -> int:
    """Write the file of a machine, which rank 0 has, and say where it is; 1 when it could not."""
    problem = machine_file.write_machine(machine, path, comm)
    if comm.rank == 0:
        say(f"failed: machine file {path} could not be written ({problem}); what was there is "
            f"untouched" if problem else f"machine file: {path}")
    return int(bool(problem))


def failed(name: str, why: object, comm) -> int:
    """Say, on rank 0, that a measurement failed; 1."""
    if comm.rank == 0:
        say(f"failed: {name}: {why}")
    return 1


def trace_file(file: str | None, comm, traced: int | None = None) -> str | None:
    """Check that rank 0 can write into the folder of ``--trace``; `file` itself.

    Parameters
    ----------
    file : str or None
        As given.
    comm : mpi4py.MPI.Intracomm
        All ranks; each must call this.
    traced : int, optional
        The steps of ``--traced``, as given.

    Raises
    ------
    UsageError
        When nothing would be in it.
    StoreError
        The same on every rank, when its folder cannot be written.
    """
    if not file:
        return None
    if traced == 0:
        raise UsageError(f"--trace {file} --traced 0: nothing would be traced; leave one of them "
                         f"out")
    on_rank_0(lambda: run_file.check_folder(Path(file).parent, "the trace's folder", "--trace"),
              comm, caught=StoreError, error=StoreError)
    return file
