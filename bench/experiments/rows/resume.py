"""Going on where a reproduction was stopped: which rows are there, and whether they belong."""

import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Sequence

import msgspec
from mpi4py import MPI

from bench.cases import variants
from bench.errors import StoreError
from bench.instruments import host
from bench.records import atomic, journal, run_file
from bench.records.journal import Journal, Reproduction


def same_machine(library: str) -> dict[str, Any]:
    """Describe the source, the machine, its libraries and the variables that tune them.

    Rows belong together only where all of it is the same.

    Parameters
    ----------
    library : str
        The array library.
    """
    found = host.describe_host(library, 1, MPI.Get_library_version(), "")
    return {"source": host.source_digest()} | {
        name: value for name, value in found.items() if name in (
            "cpu_model", "cores", "gpu", "backend", "python", "mpi", "tuning_variables", "blas",
            "blas_architecture") or name.endswith("_version")}


def begin(log: Journal, names: Sequence[str], wanted: dict[str, Any], order: int | None,
          fresh: bool, say: Callable[[str], object]) -> tuple[Reproduction, set[str]]:
    """Go on with a reproduction, or begin a new one.

    Parameters
    ----------
    log : Journal
        Of the folder of results, claimed.
    names : sequence of str
        The rows that are asked for.
    wanted : dict
        All that rows depend on and must have in common to belong together.
    order : int or None
        The seed of the order of rows, if one is asked for.
    fresh : bool
        Whether to begin anew in any case.
    say : callable
        Shows a line to the user: why a reproduction that was stopped is not gone on with.

    Returns
    -------
    Reproduction, set of str
        The reproduction, and the names of its finished rows.
    """
    token = os.environ[journal.VARIABLE] = secrets.token_hex(8)
    old = None if fresh else journal.unfinished_reproduction(log.entries())
    if old:
        changed = journal.setting_differences(old.settings, wanted)
        if order not in (None, old.order):
            changed.append(f"order {order} instead of {old.order}")
        if not changed:
            finished = {name for name in names if measured_before(name, old, log.folder)}
            log.write("resume", token=token, order=old.order, rows=sorted(names),
                      finished=sorted(finished))
            return replace(old, rows=tuple(dict.fromkeys([*old.rows, *names]))), finished
        say(f"not going on with what was begun at {old.begun[:19]} UTC, but beginning anew, "
            f"because of: {'; '.join(changed)}")
    order = secrets.randbelow(2 ** 31) if order is None else order
    new = Reproduction(order, journal.utc_now(), wanted, tuple(names))
    log.write("begin", token=token, order=order, settings=wanted, rows=sorted(names))
    return new, set()


def missing(reproduction: Reproduction, folder: Path) -> list[str]:
    """The rows of a reproduction that it has not measured."""
    return [name for name in reproduction.rows
            if not measured_before(name, reproduction, folder)]


def measured_before(name: str, reproduction: Reproduction, folder: Path) -> bool:
    """Whether a whole file of the row is there that this reproduction has written."""
    for path in folder.glob(f"{name}-*.h5"):
        try:
            run = run_file.read_run(path)
        except StoreError:
            continue    # is measured again; tables say what is wrong with the file
        if (isinstance(run, run_file.Run) and run.created >= reproduction.begun
                and run.configuration.get("order") == reproduction.order
                and not run.configuration["overridden"]
                and all(value == reproduction.settings.get(name, value)
                        for name, value in msgspec.structs.asdict(
                            variants.recorded_variant(run.configuration)).items())
                and all(run.configuration[name] == reproduction.settings[name]
                        for name in ("seed", "warmup", "repetitions"))
                and run.configuration.get("recompute", "none")
                == reproduction.settings.get("recompute", "none")):
            return True
    return False


def tidy(folder: Path) -> None:
    """Delete what writers that were killed have left; for who has claimed the folder."""
    for pattern in ("*.h5.part", ".probe-*"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    atomic.remove_parts(folder)
