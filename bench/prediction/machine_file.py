"""Write machine files in TOML."""

from pathlib import Path
from typing import Any, Sequence

import msgspec

from bench.agreement import make_on_rank_0
from bench.errors import UsageError
from bench.prediction.machine_model import Machine
from bench.records import atomic, journal
from mm3d.console import complain, say

HEADER = """\
# A machine's model for `python -m bench`: `sources` says where each figure is from,
# `python -m bench plan --machine help` what each is, and its unit.
"""


def check_writable(path: Path, comm) -> None:
    """Check that rank 0 can write a machine file at this path, before anything is measured.

    Raises UsageError, StoreError on every rank, when it has another ending, or its folder cannot
    be written.
    """
    if path.suffix != ".toml":
        raise UsageError(f"--out {path}: a .toml file would do")
    make_on_rank_0(lambda: journal.check_output(path, "--out"), comm)


def publish_machine(machine: Machine | None, path: Path, comm) -> int:
    """Write the machine of rank 0 to a file and print its name; return 1 if that fails, else 0.

    An existing file is replaced as a whole.
    """
    failed = comm.rank == 0 and write_machine(path, msgspec.to_builtins(machine, str_keys=True))
    return comm.bcast(int(bool(failed)))


def write_machine(path: Path, tree: dict[str, Any], missing: Sequence[str] = ()) -> str:
    """Write the fields of a machine to a file and print its name; return why it cannot, or "".

    Fields that are `missing` are named in the file, for its user to add.
    """
    try:
        atomic.replace(path, format_tree(tree, missing))
    except OSError as error:
        problem = error.strerror or str(error)
        complain(f"failed: machine file {path} could not be written ({problem}); what was there "
                 f"is untouched")
        return problem
    say(f"machine file: {path}")
    return ""


def format_tree(tree: dict[str, Any], missing: Sequence[str] = ()) -> str:
    """Format the fields of a machine as TOML; the first lines name those that are missing."""
    import tomli_w
    lines = "".join(f"# missing: {name}\n" for name in missing)
    return HEADER + lines + tomli_w.dumps(_storable(tree))


def _storable(value):
    """Round the numbers of a tree to six digits, whole ones not; escape what UTF-8 has not."""
    if isinstance(value, dict):
        return {key: _storable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_storable(item) for item in value]
    if isinstance(value, float) and not value.is_integer():
        return float(f"{value:.6g}")
    if isinstance(value, str):    # names of files may have bytes of no encoding
        return value.encode(errors="backslashreplace").decode()
    return value
