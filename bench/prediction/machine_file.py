"""Write machine files in TOML."""

from pathlib import Path

import msgspec

from bench.agreement import agree
from bench.prediction import machine_model
from bench.records import atomic
from mm3d.console import say

HEADER = """\
# A machine's model for `python -m bench`: `sources` says where each figure is from,
# `bench.prediction.machine_model.Machine` its units.
"""


def check_writable(option: str, path: Path, comm) -> None:
    """Check that rank 0 can write a machine file at this path, before anything is measured.

    Parameters
    ----------
    option : str
        The option that names the path, for the message.
    path : Path
        The file to write.
    comm : mpi4py.MPI.Intracomm
        All ranks, which call this.

    Raises
    ------
    UsageError
        On every rank, when it cannot.
    """
    fits = comm.rank > 0 or path.suffix == ".toml" and _writable(path.parent)
    agree(None if fits else f"{option} {path}: a .toml file in a folder that exists and can be "
          f"written would do", comm)


def _writable(folder: Path) -> bool:
    """Return whether a file can be created in the folder, by creating one."""
    try:
        atomic.probe_folder(folder)
    except OSError:
        return False
    return True


def write_machine(machine: machine_model.Machine | None, path: str | Path, comm) -> str:
    """Write the file of a machine, which rank 0 has; an existing file is replaced as a whole.

    Returns
    -------
    str
        The reason if it could not be written, and an existing file is unchanged; otherwise "".
        The same on every rank.
    """
    problem = ""
    if comm.rank == 0:
        try:
            atomic.replace(path, format_machine(machine))
        except OSError as error:
            problem = error.strerror or str(error)
    return comm.bcast(problem)


def format_machine(machine: machine_model.Machine) -> str:
    """Format a machine as TOML, its numbers with six digits."""
    import tomli_w
    plain = msgspec.to_builtins(machine, str_keys=True)
    return HEADER + tomli_w.dumps(_round_numbers(plain))


def _round_numbers(value):
    """Round the numbers of a tree to six digits; whole numbers are kept."""
    if isinstance(value, dict):
        return {key: _round_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_round_numbers(item) for item in value]
    if isinstance(value, float) and not value.is_integer():
        return float(f"{value:.6g}")
    return value


def publish_machine(machine: machine_model.Machine | None, path: str | Path, comm) -> int:
    """Write the machine of rank 0 to a file and print its name; return 1 if that fails, else 0."""
    problem = write_machine(machine, path, comm)
    if comm.rank == 0:
        say(f"failed: machine file {path} could not be written ({problem}); what was there is "
            f"untouched" if problem else f"machine file: {path}")
    return int(bool(problem))
