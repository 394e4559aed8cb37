"""Resume a reproduction that was stopped: find the rows that it has finished."""

import contextlib
import os
import secrets
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Callable, Sequence

from mpi4py import MPI

from bench.cases import variants
from bench.errors import StoreError, Unreadable
from bench.instruments import host
from bench.records import atomic, journal, model_run, run_file
from bench.records.journal import Journal, Reproduction
from bench.records.measurements import Measurements


WAITED = ("waited_machine", "waited_scale")    # settings of rows whose ranks wait for their work
ROUND = "round"    # the setting that numbers the reproductions of one command


def machine_settings(library: str) -> dict[str, Any]:
    """Describe the source, the machine, its libraries and the variables that tune them.

    Rows belong to one reproduction only where all of these are the same.
    """
    found = host.describe_host(library, 1, MPI.Get_library_version(), "")
    return {"source": host.source_digest()} | {
        name: value for name, value in found.items() if name in (
            "cpu_model", "cores", "gpu", "backend", "python", "mpi", "tuning_variables", "blas",
            "blas_architecture", "emulated_cluster") or name.endswith("_version")}


def begin_or_resume(log: Journal, names: Sequence[str], wanted: dict[str, Any],
                    order: int | None, fresh: bool,
                    say: Callable[[str], object]) -> tuple[Reproduction, set[str]]:
    """Resume the reproduction that was stopped in a folder, or begin a new one.

    `wanted` are all settings that rows must have in common to belong to one reproduction, `order`
    the seed of the order of rows, if one is asked for; `fresh` begins anew in any case; `say`
    shows a line to the user, the reason why a reproduction is not resumed.

    Returns the reproduction, and the names of its finished rows.
    """
    token = os.environ[journal.ENTRY_ENV] = secrets.token_hex(8)
    old = None if fresh else journal.unfinished_reproduction(log.entries())
    if old:
        changed = journal.setting_differences(old.settings, wanted)
        if order not in (None, old.order):
            changed.append(f"order {order} instead of {old.order}")
        if not changed:
            finished = {name for name in names if is_measured(name, old, log.folder)}
            log.write("resume", token=token, order=old.order, rows=sorted(names),
                      finished=sorted(finished))
            return replace(old, rows=tuple(dict.fromkeys([*old.rows, *names]))), finished
        say(f"not going on with what was begun at {old.begun[:19]} UTC, but beginning anew, "
            f"because of: {'; '.join(changed)}")
    order = secrets.randbelow(2 ** 31) if order is None else order
    new = Reproduction(order, journal.utc_now(), wanted, tuple(names))
    log.write("begin", token=token, order=order, settings=wanted, rows=sorted(names))
    return new, set()


def next_round(entries: list[dict], wanted: dict[str, Any], rounds: int) -> int:
    """Return the number of the round in which a reproduction of several rounds goes on.

    This is the latest round that was begun, or the one after it if it is complete; 1 if it had
    other settings than `wanted`, which lack `ROUND`, or all rounds are complete.
    """
    begun = [entry for entry in entries if entry["event"] == "begin"]
    settings = dict(begun[-1].get("settings", {})) if begun else {}
    number = settings.pop(ROUND, 0)
    if not number or journal.setting_differences(settings, wanted):
        return 1
    number += journal.unfinished_reproduction(entries) is None
    return number if number <= rounds else 1


def missing_rows(reproduction: Reproduction, folder: Path) -> list[str]:
    """List the rows of a reproduction that it has not measured, as far as files can be read."""
    missing = []
    for name in reproduction.rows:
        with contextlib.suppress(Unreadable):    # there it may be
            if is_measured(name, reproduction, folder):
                continue
        missing.append(name)
    return missing


def is_measured(name: str, reproduction: Reproduction, folder: Path) -> bool:
    """Return True if the folder has a complete file of the row from this reproduction.

    Raises Unreadable when a file that may be the one cannot be read.
    """
    unread = ""
    for path in run_file.list_files(folder, f"{name}-"):
        try:
            run = run_file.read_run(path)
        except Unreadable as error:
            unread = str(error)
        except StoreError:
            continue    # it is measured again; tables report the problem of the file
        else:
            if _belongs_to(reproduction, run):
                return True
    if unread:
        raise Unreadable(f"{unread}, so nobody can tell whether {name} is measured: make it "
                         f"readable, or begin anew with --fresh")
    return False


def _belongs_to(reproduction: Reproduction, run: Measurements) -> bool:
    recorded, wanted = run.configuration, reproduction.settings
    if not isinstance(run, model_run.Run):    # a training of --table combined
        return (run.created >= reproduction.begun and run.kind == wanted.get("table")
                and recorded.get("order") == reproduction.order)
    variant = asdict(variants.recorded_variant(recorded))
    return (run.created >= reproduction.begun and recorded.get("order") == reproduction.order
            and not recorded["overridden"]
            and all(value == wanted.get(name, value) for name, value in variant.items())
            and all(recorded[name] == wanted[name] for name in ("seed", "warmup", "repetitions"))
            and all(recorded.get(name) == wanted.get(name) for name in WAITED)
            and recorded.get("recompute", "none") == wanted.get("recompute", "none"))


def remove_parts_of_files(folder: Path) -> None:
    """Delete the files that killed writers have left in a folder that this process has claimed."""
    for pattern in ("*.h5.part", ".probe-*"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    atomic.remove_parts(folder)
