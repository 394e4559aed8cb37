"""Read and write machine files: where they may be, and their TOML text."""

from pathlib import Path

import msgspec

from bench.agreement import agree
from bench.prediction import machine_model
from bench.records import atomic

TAKEN = "as of "    # how sources of what was not measured begin


def check(option: str, path: Path, comm) -> None:
    """Check, before anything is measured, that rank 0 can write a machine's file at this path.

    Raises
    ------
    UsageError
        On every rank, when it cannot.
    """
    fits = comm.rank > 0 or path.suffix == ".toml" and _writable(path.parent)
    agree(None if fits else f"{option} {path}: a .toml file in a folder that exists and can be "
          f"written would do", comm)


def _writable(folder: Path) -> bool:
    """Check that files can be made in a folder, by making one."""
    try:
        atomic.probe_folder(folder)
    except OSError:
        return False
    return True


def write(machine: machine_model.Machine | None, path: str | Path, comm) -> str:
    """Write the file of a machine, which rank 0 has, in the place of the one that is there.

    Returns
    -------
    str
        Why it could not be written, and what was there before still is; "" when it was.  The
        same on every rank.
    """
    problem = ""
    if comm.rank == 0:
        try:
            atomic.replace(path, written(machine))
        except OSError as error:
            problem = error.strerror or str(error)
    return comm.bcast(problem)


def written(machine: machine_model.Machine) -> str:
    """Format a machine as TOML, with numbers of six digits."""
    import tomli_w
    plain = msgspec.to_builtins(machine, str_keys=True)
    return _comments(machine) + tomli_w.dumps(_shortened(plain))


def _shortened(value):
    """Round the numbers of a tree to six digits; whole ones stay as they are."""
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shortened(item) for item in value]
    if isinstance(value, float) and not value.is_integer():
        return float(f"{value:.6g}")
    return value


def _comments(machine: machine_model.Machine) -> str:
    """Say what the file is, and what in it was not measured."""
    taken = [name for name in machine.__struct_fields__
             if machine.sources.get(name, "").startswith(TAKEN)]
    return "\n".join([
        "# A machine's model for `python -m bench`: `sources` says where each figure is from,",
        "# `bench.prediction.machine_model.Machine` its units.",
        *[f"# Not measured here: {', '.join(taken)}."] * bool(taken), ""])
