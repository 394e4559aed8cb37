"""Write machine files in TOML."""

from pathlib import Path

import msgspec

from bench.agreement import make_on_rank_0
from bench.errors import StoreError, UsageError
from bench.prediction.machine_model import Machine
from bench.records import atomic, run_file
from mm3d.console import say

HEADER = """\
# A machine's model for `python -m bench`: `sources` says where each figure is from,
# `bench.prediction.machine_model.Machine` its units.
"""


def check_writable(path: Path, comm) -> None:
    """Check that rank 0 can write a machine file at this path, before anything is measured.

    Raises
    ------
    UsageError, StoreError
        On every rank, when it has another ending, or its folder cannot be written.
    """
    if path.suffix != ".toml":
        raise UsageError(f"--out {path}: a .toml file would do")
    make_on_rank_0(lambda: run_file.check_folder(path.parent, "the machine file's folder"), comm,
                   StoreError, StoreError)


def publish_machine(machine: Machine | None, path: Path, comm) -> int:
    """Write the machine of rank 0 to a file and print its name; return 1 if that fails, else 0.

    An existing file is replaced as a whole.
    """
    problem = ""
    if comm.rank == 0:
        try:
            atomic.replace(path, format_machine(machine))
        except OSError as error:
            problem = error.strerror or str(error)
        say(f"failed: machine file {path} could not be written ({problem}); what was there is "
            f"untouched" if problem else f"machine file: {path}")
    return comm.bcast(int(bool(problem)))


def format_machine(machine: Machine) -> str:
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
