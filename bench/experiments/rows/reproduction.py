"""Measure many rows, one mpirun for each rank count."""

import signal
import sys
from typing import Any, Iterable, Protocol

from bench.cases.case import Case
from bench.errors import UsageError
from mm3d import launcher
from mm3d.child_process import start_child

OUTCOMES = ("done", "failed", "left out")    # the beginnings of lines that end a row
GRACE = 15    # seconds that a job has to end after a SIGTERM


class Stopped(Exception):
    """A signal that asks this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


class Progress(Protocol):
    """Show a user the progress of a reproduction."""

    def say(self, line: str) -> None:
        """Show a line of a job."""

    def row(self, line: str) -> None:
        """Show a line that ends a row; it begins with one of `OUTCOMES`."""


def measure_cases(cases: list[Case], options: list[str], progress: Progress) -> None:
    """Measure `cases`, a job for each rank count.

    Parameters
    ----------
    cases : list of Case
        The cases, in the order in which they are measured.
    options : list of str
        Options of ``bench run``.
    progress : Progress
        Is shown every line of the jobs.

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
            measure_in_jobs([one for one in cases if one.row.gpus == ranks], options, progress)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def measure_in_jobs(cases: list[Case], options: list[str], progress: Progress) -> None:
    """Measure `cases`, all of one rank count, in one job if it survives.

    When the job dies, its current row has failed, and each of the remaining rows gets a job of
    its own.
    """
    pending = list(cases)
    jobs = [pending]
    while jobs:
        job = jobs.pop(0)
        status = run_job(job, options, progress, pending)
        left = [one for one in job if one in pending]
        if left:
            pending.remove(left[0])
            progress.row(f"failed: {left[0].title}: mpirun ended with status {status}")
            jobs = [[one] for one in left[1:]] + jobs


def run_job(job: list[Case], options: list[str], progress: Progress,
            pending: list[Case]) -> int:
    """Measure the cases of `job` under mpirun; return its exit status.

    Cases are removed from `pending` as the job reports them.
    """
    command = job_command(job, options)
    with start_child(command, env=launcher.environment_to_start(command), grace=GRACE,
                     with_parent=True) as child:
        for line in child.stdout:
            reported = [one for one in pending if line.startswith(
                tuple(f"{outcome}: {one.title}:" for outcome in OUTCOMES))]
            if not reported:
                progress.say(line.rstrip())
                continue
            pending.remove(reported[0])
            progress.row(line.rstrip())
        return child.wait()


def job_command(job: Iterable[Case], options: list[str]) -> list[str]:
    """Return the mpirun command line that measures the cases of `job`.

    Raises
    ------
    UsageError
        When there is no mpirun.
    """
    job = list(job)
    names = ",".join(":".join(filter(None, (one.row.table, one.row.scheme, one.row.like)))
                     for one in job)
    try:
        return launcher.mpirun_command(
            job[0].row.gpus, sys.executable, "-m", "bench", "run", f"--rows={names}", *options)
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error
