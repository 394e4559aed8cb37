"""Measure many rows, one mpirun for each rank count."""

import queue
import signal
import subprocess
import sys
import threading
from typing import Any, Callable, Iterable, Iterator

from bench.cases.combined import AnyCase
from bench.errors import as_usage_error
from mm3d import launcher, shared_room
from mm3d.child_process import end_child, start_child
from mm3d.console import complain

OUTCOMES = ("done", "failed", "left out")    # the beginnings of lines that end a row
GRACE = 15    # seconds that a job has to end after a SIGTERM
WATCHDOG = "watchdog: "    # begins the line by which `mm3d.tracing.watchdog` ends a job
FLUSH_SECONDS = 5    # that the output of a job that has ended is waited for
ABORT_SECONDS = 20    # that a job has to end after the watchdog's line


class Stopped(Exception):
    """A signal that asks this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


def measure_cases(cases: list[AnyCase], options: list[str], progress: Any) -> Stopped | None:
    """Measure `cases`, a job for each rank count; return the signal that asked for an end, if any.

    Parameters
    ----------
    progress
        `say` is given every line of the jobs, but `row` those that end a row, see `OUTCOMES`; it
        is closed.
    """
    def stop(number: int, frame: Any) -> None:
        raise Stopped(number)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        try:
            for number in handlers:
                signal.signal(number, stop)
            for ranks in dict.fromkeys(one.ranks for one in cases):
                progress.say(f"starting {ranks} ranks")
                measure_in_jobs([one for one in cases if one.ranks == ranks], options, progress)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    except Stopped as stopped:    # the job that was running is over
        return stopped
    finally:
        progress.close()
    return None


def job_command(job: Iterable[AnyCase], options: list[str]) -> list[str]:
    """Return the mpirun command line that measures the cases of `job`.

    Raises UsageError when there is no mpirun.
    """
    job = list(job)
    names = ",".join(one.selector for one in job)
    with as_usage_error(FileNotFoundError):
        return launcher.mpirun_command(
            job[0].ranks, sys.executable, "-m", "bench", *job[0].verb, names, *options)


def measure_in_jobs(cases: list[AnyCase], options: list[str], progress: Any,
                    make_command: Callable[..., list[str]] = job_command) -> None:
    """Measure `cases`, all of one rank count, in one job if it survives.

    When the job dies, its current row has failed, and each of the remaining rows gets a job of
    its own. `make_command` makes the command line of a job, as `job_command` does.
    """
    pending = list(cases)
    jobs = [pending]
    while jobs:
        job = jobs.pop(0)
        reason = run_job(job, make_command(job, options), progress, pending)
        left = [one for one in job if one in pending]
        if left:
            pending.remove(left[0])
            progress.row(f"failed: {left[0].title}: {reason}")
            jobs = [[one] for one in left[1:]] + jobs


def run_job(job: list[AnyCase], command: list[str], progress: Any, pending: list[AnyCase]) -> str:
    """Measure the cases of `job` by `command`; return how it ended.

    Cases are removed from `pending` as the job reports them.
    """
    before = len(pending)
    with start_child(command, stderr=subprocess.PIPE, env=launcher.environment_to_start(command),
                     grace=GRACE, with_parent=True) as child, JobErrors(child) as errors:
        for line in job_lines(child):
            reported = [one for one in pending if line.startswith(
                tuple(f"{outcome}: {one.title}:" for outcome in OUTCOMES))]
            if not reported:
                progress.say(line.rstrip())
                continue
            pending.remove(reported[0])
            progress.row(line.rstrip())
        status = child.wait()
        room = shared_room.hint(job[0].ranks) if status and len(pending) == before else ""
        return "; ".join(filter(None, [f"{errors.finish()}mpirun ended with status {status}",
                                       room]))


def job_lines(child: subprocess.Popen, flush_seconds: float = FLUSH_SECONDS) -> Iterator[str]:
    """Iterate over the lines of a job until it has ended and printed nothing for `flush_seconds`.

    Its standard output may stay open: Open MPI leaves its daemon on a node that is lost.
    """
    # Closing a file waits for a read of it in another thread: one thread does both.
    output, child.stdout = child.stdout, None
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        with output:
            for line in output:
                lines.put(line)
        lines.put(None)
    threading.Thread(target=read, daemon=True).start()
    ended = False
    while True:
        try:
            line = lines.get(timeout=flush_seconds)
        except queue.Empty:
            if ended:
                return
            ended = child.poll() is not None
            continue
        if line is None:
            return
        yield line


class JobErrors:
    """Pass on a job's standard error, and end the job when its watchdog could not.

    An mpirun waits for ever for ranks of a node that it cannot reach.  Use it as a context: after
    the block no signal is sent.  Standard error is closed at its end.

    Parameters
    ----------
    child : Popen
        The job, whose standard error is a pipe.
    abort_seconds : float
        Seconds that the job has to end after its watchdog has spoken.
    """

    def __init__(self, child: subprocess.Popen, abort_seconds: float = ABORT_SECONDS,
                 end: Callable[[subprocess.Popen], object] = end_child) -> None:
        self._child, self._reason = child, ""
        self._timer = threading.Timer(abort_seconds, end, (child,))
        self._timer.daemon = True
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def __enter__(self) -> "JobErrors":
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()    # also one that is started later

    def finish(self) -> str:
        """Return what the watchdog has said, with a semicolon; "" if it has said nothing.

        The job has ended.
        """
        self._thread.join(FLUSH_SECONDS)    # until all of it is passed on
        self._timer.cancel()
        return self._reason

    def _pass_on(self) -> None:
        with self._child.stderr as lines:
            for line in lines:
                complain(line.removesuffix("\n"))
                if line.startswith(WATCHDOG) and not self._reason:
                    self._reason = f"{line.removeprefix(WATCHDOG).partition(';')[0]}; "
                    self._timer.start()
