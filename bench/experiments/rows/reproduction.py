"""Measure many rows, one mpirun for each rank count."""

import ctypes
import os
import signal
import subprocess
import sys
from typing import Any, Iterable, Protocol

from bench.cases.case import Case
from bench.errors import UsageError
from mm3d import launcher

OUTCOMES = ("done", "failed", "left out")    # with which a line that ends a row begins
PATIENCE = 15    # seconds that a job has to end when it is told to


class Stopped(Exception):
    """A signal that asks for an end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


class Progress(Protocol):
    """Shows a user how far it has come."""

    def say(self, line: str) -> None:
        """Show a line of a job."""

    def row(self, line: str) -> None:
        """Show a line that ends a row; it begins with one of `OUTCOMES`."""


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
                               env=launcher.for_launcher(command))
    try:
        for line in process.stdout:
            reported = [one for one in pending if line.startswith(
                tuple(f"{outcome}: {one.title}:" for outcome in OUTCOMES))]
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
        return launcher.mpirun_command(
            job[0].row.gpus, sys.executable, "-m", "bench", "run", f"--rows={names}", *options)
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error
