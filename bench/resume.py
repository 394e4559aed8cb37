"""Going on where a reproduction was stopped: which rows are there, and whether they belong."""

import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from mpi4py import MPI

from bench import journal, machine, variants
from bench.cases import Case, UsageError, step_counts, traced_steps
from bench.journal import Journal, Reproduction
from mm3d import backend, store


def settings(arguments) -> dict[str, Any]:
    """All that a row depends on, and that must be the same for rows to belong together.

    The sizes, repetitions and numbers that are asked for, the source, the machine, its libraries
    and the variables that tune them.  Not which rows are asked for, nor in which order.

    Raises
    ------
    UsageError
        When an argument cannot be meant.
    """
    warmup, limits = step_counts(arguments)
    try:
        library = backend.get(arguments.backend).name
    except ValueError as error:
        raise UsageError(str(error)) from error
    found = machine.describe(library, 1, MPI.Get_library_version(), "")
    same = {name: value for name, value in found.items() if name in (
        "cpu_model", "cores", "gpu", "backend", "python", "mpi", "tuning_variables",
        "blas", "blas_architecture") or name.endswith("_version")}
    return {"preset": arguments.preset, "warmup": warmup, **vars(limits),
            "traced": traced_steps(arguments), "seed": arguments.seed,
            "recompute": arguments.recompute,
            **msgspec.structs.asdict(variants.asked_for(arguments, backend.get(library))),
            "source": machine.source_digest(), **same}


def begin(log: Journal, cases: list[Case], wanted: dict[str, Any],
          arguments) -> tuple[Reproduction, set[str]]:
    """The reproduction to go on with, or a new one, and the names of its finished rows."""
    token = os.environ[journal.VARIABLE] = secrets.token_hex(8)
    names = [one.name for one in cases]
    old = None if arguments.fresh else journal.unfinished(log.entries())
    if old:
        changed = journal.differences(old.settings, wanted)
        if arguments.order not in (None, old.order):
            changed.append(f"order {arguments.order} instead of {old.order}")
        if not changed:
            finished = {name for name in names if measured_before(name, old, log.folder)}
            log.write("resume", token=token, order=old.order, rows=sorted(names),
                      finished=sorted(finished))
            return replace(old, rows=tuple(dict.fromkeys([*old.rows, *names]))), finished
        print(f"not going on with what was begun at {old.begun[:19]} UTC, but beginning anew, "
              f"because of: {'; '.join(changed)}", flush=True)
    order = secrets.randbelow(2 ** 31) if arguments.order is None else arguments.order
    new = Reproduction(order, journal.now(), wanted, tuple(names))
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
            run = store.read(path)
        except store.StoreError:
            continue    # is measured again; tables say what is wrong with the file
        if (isinstance(run, store.Run) and run.created >= reproduction.begun
                and run.configuration.get("order") == reproduction.order
                and not run.configuration["overridden"]
                and all(value == reproduction.settings.get(name, value) for name, value in
                        msgspec.structs.asdict(variants.recorded(run.configuration)).items())
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
