"""Machine files: where they may be, and how a machine's model is written down."""

import json
import tempfile
from pathlib import Path

import msgspec

from bench import model, textfile
from bench.cases import UsageError
from bench.output import say

TAKEN = "as of "    # how sources of what was not measured begin


def check(option: str, path: Path, comm) -> None:
    """Find out before anything is measured whether rank 0 can write a machine's file there.

    Raises
    ------
    UsageError
        On every rank, when it cannot.
    """
    fits = comm.rank > 0 or path.suffix == ".toml" and _writable(path.parent)
    if not comm.bcast(fits):
        raise UsageError(f"{option} {path}: a .toml file in a folder that exists and can be "
                         f"written would do")


def _writable(folder: Path) -> bool:
    """Whether files can be made in it, found out by making one."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def publish(machine: model.Machine | None, path: str | Path, comm) -> int:
    """Write the file of a machine, which rank 0 has, in the place of the one that is there.

    Returns
    -------
    int
        0 when it was written, and 1 when what was there before still is, which rank 0 says; the
        same on every rank.
    """
    status = 0
    if comm.rank == 0:
        try:
            textfile.replace(path, written(machine))
        except OSError as error:
            status = 1
            say(f"failed: machine file {path} could not be written ({error.strerror}); what was "
                f"there is untouched")
        else:
            say(f"machine file: {path}")
    return comm.bcast(status)


def written(machine: model.Machine) -> str:
    """The TOML file of a machine."""
    plain = msgspec.to_builtins(machine)
    lines, tables = [], []
    for name, value in plain.items():
        if isinstance(value, dict):
            tables += _table(name, value)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for item in value:
                tables += ["", f"[[{name}]]", *(f"{key} = {_value(v)}"
                                                for key, v in item.items())]
        else:
            lines.append(f"{name} = {_value(value)}")
    return "\n".join([*_comments(machine), *lines, *tables, ""])


def _comments(machine: model.Machine) -> list[str]:
    """What the file is, and what in it was not measured."""
    taken = [name for name, source in machine.sources.items() if source.startswith(TAKEN)]
    return ["# A machine's model for `python -m bench`: `sources` says where each figure is from,",
            "# `bench.model.Machine` its units.",
            *[f"# Not measured here: {', '.join(taken)}."] * bool(taken)]


def _table(name: str, value: dict) -> list[str]:
    return ["", f"[{name}]", *(f"{key} = {_value(v)}" for key, v in value.items())]


def _value(value) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(v)}" for key, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return f"{value:.15g}" if value.is_integer() else f"{value:.6g}"
    return json.dumps(value)
