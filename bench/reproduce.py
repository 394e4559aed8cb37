"""The verb ``reproduce``: every row of both tables, one mpirun for each rank count."""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Iterable

from tqdm import tqdm

from bench import leftovers, machine, resume, textfile, variants
from bench.cases import Case, UsageError, case, equal_tokens, select, shuffled
from bench.job import variant_of
from bench.journal import Journal, Reproduction
from bench.plots import plots
from bench.tables import tables
from mm3d import environment, store

PATIENCE = 15    # seconds that a job has to end when it is told to


class Stopped(Exception):
    """A signal that asks for an end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


class Progress:
    """Rows done of all: a bar on a terminal, a line a row in a log."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.total, self.done, self.start = total, done, time.monotonic()
        self.failures: list[str] = []
        self._bar = tqdm(total=total, initial=done, unit="row", disable=None, dynamic_ncols=True)

    def say(self, line: str) -> None:
        """A line, above the bar."""
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()

    def row(self, line: str) -> None:
        """A line that ends a row, "done: ..." or "failed: ..."."""
        self.done += 1
        if line.startswith("failed"):
            self.failures.append(line)
        elapsed = tqdm.format_interval(time.monotonic() - self.start)
        self.say(f"[{self.done:2d}/{self.total} {elapsed}] {line}")
        self._bar.update()

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()


def reproduce(arguments) -> int:
    """Measure every selected row, then print the tables and draw the figures.

    A row that fails is named and does not keep the others from being measured.  Rows that an
    earlier reproduction, which was stopped or killed, has finished with the same settings are
    not measured again.

    Returns
    -------
    int
        0 when all rows were measured, 1 when some failed, 128 and its number after a signal.

    Raises
    ------
    UsageError
        When started under mpirun, there is no mpirun to start, or an argument cannot be meant.
    StoreError
        When the results folder cannot be written, or is in use.
    """
    if environment.local_ranks() > 1:
        raise UsageError("reproduce starts mpirun itself: run it without, as in "
                         "python -m bench reproduce")
    wanted = resume.settings(arguments)
    asked = rows(arguments)
    variant = variant_of(arguments, asked)
    cases = [case(row, arguments.preset, variant) for row in asked]
    out = store.check_folder(arguments.out or machine.default_out())
    log = Journal(out)
    log.claim()
    resume.tidy(out)
    reproduction, finished = resume.begin(log, cases, wanted, arguments)
    arguments.order = reproduction.order
    cases = shuffled(cases, reproduction.order)
    progress = Progress(len(cases), len(finished))
    progress.say(f"{len(cases)} rows, preset {arguments.preset}, on {machine.cpu_model()}, "
                 f"{environment.cores()} cores; results in {out}; order {reproduction.order}")
    if left_behind := leftovers.advice(leftovers.abandoned()):
        progress.say(left_behind)
    if finished:
        progress.say(f"going on with what was begun at {reproduction.begun[:19]} UTC: "
                     f"{len(finished)} rows are there and not measured again")
    left = [one for one in cases if one.name not in finished]
    stopped = None
    try:
        measured_all(left, passed_on(arguments, out), progress)
    except Stopped as error:
        stopped = error
    finally:
        progress.close()
    return conclude(log, reproduction, progress, stopped)


def rows(arguments) -> list:
    """The rows that are asked for.

    Raises
    ------
    UsageError
        When there are none.
    """
    if not arguments.ranks:
        found = select(arguments.table, arguments.scheme)
    else:
        found = [row for ranks in arguments.ranks
                 for row in select(arguments.table, arguments.scheme, ranks) if row.gpus == ranks]
    if not found:
        raise UsageError(f"no row of --table {arguments.table} --scheme {arguments.scheme} is "
                         f"for {' or '.join(map(str, arguments.ranks))} ranks")
    return found + (equal_tokens(found) if arguments.equal_tokens else [])


def passed_on(arguments, out: Path) -> list[str]:
    """The options of ``run`` that every row is measured with."""
    options = [f"--preset={arguments.preset}", f"--out={out}",
               *variants.asked_for(arguments).arguments()]
    for name in ("warmup", "repetitions", "max_repetitions", "max_seconds", "width", "order",
                 "traced", "backend", "seed", "stall", "recompute"):
        value = getattr(arguments, name)
        if value is not None:
            options.append(f"--{name.replace('_', '-')}={value}")
    return options


def measured_all(cases: list[Case], options: list[str], progress: Progress) -> None:
    """Measure `cases`, a job for each rank count.

    Raises
    ------
    Stopped
        When a signal asks for an end; the job that was running is over then.
    """
    def stop(number: int, frame: Any) -> None:
        raise Stopped(number)
    handlers = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for ranks in dict.fromkeys(one.row.gpus for one in cases):
            progress.say(f"starting {ranks} ranks")
            measured([one for one in cases if one.row.gpus == ranks], options, progress)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def measured(cases: list[Case], options: list[str], progress: Progress) -> None:
    """Measure `cases`, all of one rank count, in one job.

    When the job dies, the row that it was at has failed and the rest get a job each.
    """
    pending = list(cases)
    jobs = [pending]
    while jobs:
        job = jobs.pop(0)
        status = launched(job, options, progress, pending)
        left = [one for one in job if one in pending]
        if left:
            pending.remove(left[0])
            progress.row(f"failed: {left[0].title}: mpirun ended with status {status}")
            jobs = [[one] for one in left[1:]] + jobs


def launched(job: list[Case], options: list[str], progress: Progress,
             pending: list[Case]) -> int:
    """Run `job` under mpirun; its exit status.

    Rows are taken from `pending` as the job reports them.
    """
    command = run_command(job, options)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
                               text=True, start_new_session=True, preexec_fn=end_with_parent,
                               env=environment.for_launcher(command))
    try:
        for line in process.stdout:
            reported = [one for one in pending if line.startswith(
                (f"done: {one.title}:", f"failed: {one.title}:"))]
            if not reported:
                progress.say(line.rstrip())
                continue
            pending.remove(reported[0])
            progress.row(line.rstrip())
        return process.wait()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def end_with_parent() -> None:
    """Have Linux end this process, which becomes mpirun, also when its parent is killed."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run_command(job: Iterable[Case], options: list[str]) -> list[str]:
    """The mpirun command line that measures the rows of `job`."""
    job = list(job)
    names = ",".join(":".join(filter(None, (one.row.table, one.row.scheme, one.row.like)))
                     for one in job)
    try:
        return environment.mpirun_command(
            job[0].row.gpus, sys.executable, "-m", "bench", "run", f"--rows={names}", *options)
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error


def conclude(log: Journal, reproduction: Reproduction, progress: Progress,
             stopped: Stopped | None) -> int:
    """Say what came of it, and show what is there; the exit status."""
    failures = progress.failures
    measured_rows = progress.done - len(failures)
    # Others may have been begun with than were asked for now: they are to be gone on with.
    missing = resume.missing(reproduction, log.folder)
    outcome = "stopped" if stopped else "incomplete" if failures or missing else "complete"
    log.write("end", outcome=outcome, measured=measured_rows, of=progress.total)
    if failures:
        print(f"\n{len(failures)} of {progress.total} rows failed:", *failures, sep="\n  ",
              file=sys.stderr)
    if measured_rows:
        finish(log.folder, figures=not stopped)
    if stopped or failures:
        print(f"\n{stopped or 'Ended'}: {measured_rows} of {progress.total} rows are in "
              f"{log.folder}; {advice(sys.argv[1:])}", file=sys.stderr)
        if left_behind := leftovers.advice(leftovers.abandoned()):
            print(left_behind, file=sys.stderr)
    elif missing:
        print(f"\nOf what was begun at {reproduction.begun[:19]} UTC {len(missing)} rows are not "
              f"measured yet: the command that began it goes on with them")
    return stopped.status if stopped else 1 if failures else 0


def advice(words: list[str]) -> str:
    """The command that measures what is left, after one with these `words`."""
    left = [word for word in words if len(word) < 3 or not "--fresh".startswith(word)]
    return (f"the same command{' without --fresh' * (left != words)} measures the others:\n  "
            f"{shlex.join(['python', '-m', 'bench', *left])}")


def finish(out: Path, figures: bool = True) -> None:
    """Print the tables, keep them beside the results, and draw the figures."""
    text = tables(out)
    print(f"\n{text}\n")
    textfile.replace(out / "tables.txt", text + "\n")    # a full disk leaves the old ones
    drawn, left_out = plots(out) if figures else ([], [])
    for line in [f"drawn: {path}" for path in drawn] + [f"not drawn: {why}" for why in left_out]:
        print(line)
