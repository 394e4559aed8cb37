"""Publish a measurement: write its file, print its table and the name of the file."""

import argparse
import gc
from functools import partial
from pathlib import Path
from typing import Any, Callable

from bench.agreement import make_on_rank_0
from bench.errors import Failed, LeftOut, StoreError, UsageError, WrongResult
from bench.records import journal, run_file
from bench.records.measurements import Measurements
from mm3d.console import complain, say
from mm3d.launcher import wait_patiently


def publish(record: Measurements | None, out: Path, name: str, comm,
            show: Callable[[Measurements], None] | None = None) -> int:
    """Write a record into the folder `out`, print its tables by `show`, and the name of its file.

    The record and `show` are used on rank 0 alone.  Return 0 when it was written, 1 when it could
    not be, which rank 0 prints; the same on every rank.
    """
    outcome = None
    if comm.rank == 0:
        try:
            outcome = 0, f"written: {run_file.write_run(record, out, name)}"
        except StoreError as error:
            outcome = 1, f"failed: {error}"
    status, line = comm.bcast(outcome)
    if comm.rank == 0:
        if show is not None:
            show(record)
            say()
        (complain if status else say)(line)
    return status


def measure_and_publish(name: str, work: Callable[[], Measurements | None], out: Path, comm,
                        show: Callable[[Measurements], None] | None = None) -> int:
    """Publish the record that `work` returns; report the failure where a result was wrong."""
    try:
        record = work()
    except WrongResult as wrong:
        return report_failure(name, f"{wrong}; no times were written", comm)
    return publish(record, out, name, comm, show)


def publisher(arguments: argparse.Namespace, comm) -> Callable[..., int]:
    """Lock the folder of ``--out``; return `measure_and_publish` into it, of a name and work."""
    from bench.reports.micro_tables import showing    # rows show no record alone
    return partial(measure_and_publish, out=journal.claim_folder(arguments.out, comm), comm=comm,
                   show=showing(arguments.show))


def publish_row(one: Any, measured: Callable[[], Any], write: Callable[[Any], tuple[int, str]],
                out: Path, comm) -> tuple[int, str]:
    """Measure a row and write its files; note in the journal, and print, how it ended.

    Every rank calls `measured`, which measures it, and rank 0 `write`, which writes that and
    returns the exit status and the end of the line.  Return, the same on every rank, the exit
    status, 0 when all was written, and the line that was printed.
    """
    def written(found: Any) -> tuple[int, str]:
        if journal.superseded(out):
            return 1, f"failed: {one.title}: another reproduce has taken over {out.name}"
        try:
            status, line = write(found)
        except StoreError as error:
            return 1, f"failed: {one.title}: {error}"
        return status, f"done: {one.title}: {line}"
    gc.collect()    # the memory of the last row is freed before this one asks for its own
    try:
        found = measured()
        outcome = written(found) if comm.rank == 0 else None
        wait_patiently(comm)    # while rank 0 writes
        status, line = comm.bcast(outcome)
    except Failed as error:
        how = "left out" if isinstance(error, LeftOut) else "failed"
        status, line = 1, f"{how}: {one.title}: {error}"
    if comm.rank == 0:
        journal.journal_of(out).write("row", row=one.name, outcome=line.partition(":")[0],
                                      line=line)
        say(line)
    return status, line


def report_failure(name: str, reason: object, comm) -> int:
    """Print, on rank 0, that a measurement failed; return 1, the exit status."""
    if comm.rank == 0:
        complain(f"failed: {name}: {reason}")
    return 1


def check_pictures(folder: str | None, comm) -> None:
    """Raise StoreError on every rank if rank 0 cannot write into the folder of ``--pictures``."""
    if folder:
        make_on_rank_0(lambda: journal.check_folder(folder, "--pictures"), comm)


def check_trace_file(file: str | None, comm, traced: int | None = None) -> str | None:
    """Return the file of ``--trace``, if any, into whose folder rank 0 can write.

    UsageError when no step would be traced; StoreError on every rank when it cannot be written.
    """
    if not file:
        return None
    if traced == 0:
        raise UsageError(f"--trace {file} --traced 0: nothing would be traced; leave one of them "
                         f"out")
    make_on_rank_0(lambda: journal.check_output(file, "--trace"), comm)
    return file
