"""The verb ``reproduce``: every row of both tables, one mpirun for each rank count."""

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterable

from tqdm import tqdm

from bench import machine
from bench.cases import Case, UsageError, case, select, shuffled, step_counts
from bench.plots import plots
from bench.tables import tables
from mm3d import backend, environment, store


class Progress:
    """Rows done of all: a bar on a terminal, a line a row in a log."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.start = total, 0, time.monotonic()
        self._bar = tqdm(total=total, unit="row", disable=None, dynamic_ncols=True)

    def say(self, line: str) -> None:
        """A line, above the bar."""
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()

    def row(self, line: str) -> None:
        """A line that ends a row."""
        self.done += 1
        elapsed = tqdm.format_interval(time.monotonic() - self.start)
        self.say(f"[{self.done:2d}/{self.total} {elapsed}] {line}")
        self._bar.update()

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()


def reproduce(arguments) -> int:
    """Measure every selected row, then print the tables and draw the figures.

    A row that fails is named and does not keep the others from being measured.

    Returns
    -------
    int
        0 when all rows were measured, 1 otherwise.

    Raises
    ------
    UsageError
        When started under mpirun, there is no mpirun to start, or an argument cannot be meant.
    StoreError
        When the results folder cannot be written.
    """
    if environment.local_ranks() > 1:
        raise UsageError("reproduce starts mpirun itself: run it without, as in "
                         "python -m bench reproduce")
    step_counts(arguments)
    try:
        backend.get(arguments.backend)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if arguments.order is None:
        arguments.order = secrets.randbelow(2 ** 31)
    cases = shuffled((case(row, arguments.preset)
                      for row in select(arguments.table, arguments.scheme)), arguments.order)
    out = store.check_folder(arguments.out or machine.default_out())
    options = passed_on(arguments, out)
    progress = Progress(len(cases))
    progress.say(f"{len(cases)} rows, preset {arguments.preset}, on {machine.cpu_model()}, "
                 f"{environment.cores()} cores; results in {out}; "
                 f"order {arguments.order}")
    failures: list[str] = []
    # A polite kill ends the job that is running too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for ranks in dict.fromkeys(one.row.gpus for one in cases):
            progress.say(f"starting {ranks} ranks")
            failures += measured([one for one in cases if one.row.gpus == ranks], options,
                                 progress)
    finally:
        progress.close()
    if failures:
        print(f"\n{len(failures)} of {len(cases)} rows failed:", *failures, sep="\n  ",
              file=sys.stderr)
    if len(failures) < len(cases):
        finish(out)
    return 1 if failures else 0


def passed_on(arguments, out: Path) -> list[str]:
    """The options of ``run`` that every row is measured with."""
    options = [f"--preset={arguments.preset}", f"--out={out}"]
    for name in ("warmup", "repetitions", "max_repetitions", "max_seconds", "width", "order",
                 "traced", "dtype", "backend", "seed"):
        value = getattr(arguments, name)
        if value is not None:
            options.append(f"--{name.replace('_', '-')}={value}")
    return options


def measured(cases: list[Case], options: list[str], progress: Progress) -> list[str]:
    """Measure `cases`, all of one rank count, in one job; what failed.

    When the job dies, the row that it was at has failed and the rest get a job each.
    """
    pending, failures = list(cases), []
    jobs = [pending]
    while jobs:
        job = jobs.pop(0)
        status, failed = launched(job, options, progress, pending)
        failures += failed
        left = [one for one in job if one in pending]
        if left:
            line = f"failed: {left[0].title}: mpirun ended with status {status}"
            pending.remove(left[0])
            failures.append(line)
            progress.row(line)
            jobs = [[one] for one in left[1:]] + jobs
    return failures


def launched(job: list[Case], options: list[str], progress: Progress,
             pending: list[Case]) -> tuple[int, list[str]]:
    """Run `job` under mpirun; its exit status and failed rows.

    Rows are taken from `pending` as the job reports them.
    """
    command = run_command(job, options)
    failures = []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
                               text=True, start_new_session=True,
                               env=os.environ | environment.launcher_environment())
    try:
        for line in process.stdout:
            reported = [one for one in pending if line.startswith(
                (f"done: {one.title}:", f"failed: {one.title}:"))]
            if not reported:
                progress.say(line.rstrip())
                continue
            pending.remove(reported[0])
            progress.row(line.rstrip())
            if line.startswith("failed"):
                failures.append(line.rstrip())
        return process.wait(), failures
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def run_command(job: Iterable[Case], options: list[str]) -> list[str]:
    """The mpirun command line that measures the rows of `job`."""
    rows = [one.row for one in job]
    tables, schemes = (",".join(sorted({getattr(row, name) for row in rows}))
                       for name in ("table", "scheme"))
    try:
        return environment.mpirun_command(
            rows[0].gpus, sys.executable, "-m", "bench", "run",
            f"--table={tables}", f"--scheme={schemes}", *options)
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error


def finish(out: Path) -> None:
    """Print the tables, keep them beside the results, and draw the figures."""
    text = tables(out)
    print(f"\n{text}\n")
    (out / "tables.txt").write_text(text + "\n")
    for path in plots(out):
        print(f"drawn: {path}")
