"""Run a command in an emulated cluster."""
from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType

from bench.cluster.head import ROOT, SIGNALS, STARTED
from bench.cluster.mpirun import find_launcher
from bench.cluster.spec import Cluster
from bench.errors import UsageError, as_usage_error
from mm3d import launcher
from mm3d.child_process import CHILDREN_PRINT

GRACE = 20.0    # seconds that a command has to end after a signal; its job has 15
PROBE_SECONDS = 60    # that `mpi_refusal` waits for ranks


def run_inside(cluster: Cluster, command: Sequence[str], pass_signals: bool = True,
               **streams: int) -> int:
    """Run a command in a new emulated cluster, which is gone when this returns its exit status.

    The cluster also ends when this process is killed.  Signals that ask this process to end may be
    passed on to the command, which then has `GRACE` seconds, instead of ending it at once.
    `streams` are those of `subprocess.Popen`, by default this process'.  The status is 128 and its
    number when a signal has ended the command.

    Raises UsageError when this machine cannot, the command cannot be started, or this is inside a
    cluster already.
    """
    if sys.platform != "linux":
        raise UsageError("emulated clusters need Linux")
    if Cluster.from_environment():
        raise UsageError("this is inside an emulated cluster already: start one outside")
    ours, theirs = socket.socketpair()
    with ours, _start(cluster, command, theirs, streams) as head, \
            _pass_signals(head, SIGNALS if pass_signals else ()) as (started, received):
        theirs.close()
        answer = b""
        while answer != STARTED and (more := ours.recv(4096)):
            answer += more
        started.set()
        status = head.wait()
    if received and answer != STARTED:
        return 128 + received[0]
    if answer != STARTED and status >= 0:
        raise UsageError(answer.decode() or f"the emulated cluster ended with status {status} "
                                            f"before the command was started")
    return status if status >= 0 else 128 - status


def refusal(cluster: Cluster, command: Sequence[str] = ("true",)) -> str:
    """Try to run a command in a cluster; return why this machine cannot, "" if it can.

    A signal that asks this process to end does so at once: it says nothing about the machine.
    """
    if sys.platform != "linux":
        return "it needs Linux"
    with tempfile.TemporaryFile("w+", encoding=CHILDREN_PRINT, errors="replace") as said:
        try:
            status = run_inside(cluster, command, pass_signals=False, stdin=subprocess.DEVNULL,
                                stdout=said.fileno(), stderr=subprocess.STDOUT)
        except UsageError as error:
            return str(error)
        said.seek(0)
        last = said.read().strip().rpartition("\n")[2]
    return (f"{command[0]} in it ended with status {status}{f': {last}' if last else ''}"
            if status else "")


def mpi_refusal(cluster: Cluster) -> str:
    """Return why ranks of a cluster, one a node, cannot add numbers up; "" if they can."""
    add = "from mpi4py import MPI; MPI.COMM_WORLD.allreduce(1)"
    return refusal(cluster, ["timeout", "-k", "5", str(PROBE_SECONDS), "mpirun", "-n",
                             str(cluster.size), sys.executable, "-c", add])


def run_verb_inside(cluster: Cluster, words: Sequence[str], on_all_ranks: bool) -> int:
    """Run ``python -m bench WORDS`` in a new emulated cluster; return its exit status.

    ``--cluster`` is among the words: inside it is known to be fulfilled.  `on_all_ranks` is
    whether ``mpirun`` is to start the verb, on as many ranks as the cluster has room for.  Raises
    UsageError under ``mpirun``, and as `run_inside`.
    """
    refuse_launcher(f"--cluster {cluster}")
    command = [sys.executable, "-m", "bench", *words]
    return run_inside(cluster, ["mpirun", "-n", str(cluster.size), *command] if on_all_ranks
                      else command)


def refuse_launcher(what: str) -> None:
    """Raise a UsageError where ``mpirun`` has started this process."""
    if launcher.has_launched():
        raise UsageError(f"{what} starts mpirun itself, in the emulated cluster: leave out the "
                         f"mpirun before python")


def _start(cluster: Cluster, command: Sequence[str], reports: socket.socket,
           streams: dict[str, int]) -> subprocess.Popen:
    """Start the process that builds the cluster, in a session of its own."""
    words = [sys.executable, "-m", "bench.cluster.head", str(reports.fileno()), str(os.getpid()),
             cluster.to_environment(), *_find_mpirun(), *command]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        words, pass_fds=[reports.fileno()], start_new_session=True, **streams,
        env=launcher.mpirun_settings() | launcher.environment_without_launcher()
        | {"PYTHONPATH": os.pathsep.join(paths)})


def _find_mpirun() -> tuple[str, str]:
    """Return the path of the mpirun of this environment, and the name of its MPI library."""
    with as_usage_error(FileNotFoundError):
        mpirun = launcher.mpirun_command(1)[0]
    about = subprocess.run([mpirun, "--version"], capture_output=True,
                           encoding=CHILDREN_PRINT, errors="replace").stdout
    found = find_launcher(about)
    if found is None:
        raise UsageError(f"{mpirun} is neither MPICH's nor Open MPI's, which alone start ranks in "
                         f"an emulated cluster: pip install mpich mpi4py into this environment")
    return mpirun, found.name


@contextlib.contextmanager
def _pass_signals(head: subprocess.Popen,
                  signals: Iterable[int]) -> Iterator[tuple[threading.Event, list[int]]]:
    """Pass signals on to the command; before it has started they end the cluster.

    Yields an event to be set when the command has started, and the signals that came.
    """
    started, received = threading.Event(), []
    timers: list[threading.Timer] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        head.send_signal(number if started.is_set() else signal.SIGTERM)
        timers.append(threading.Timer(GRACE, head.kill))
        timers[-1].daemon = True
        timers[-1].start()
    old = {}
    if threading.current_thread() is threading.main_thread():
        old = {number: signal.signal(number, pass_on) for number in signals
               if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield started, received
    finally:
        head.kill()
        head.wait()
        for timer in timers:
            timer.cancel()
        for number, handler in old.items():
            signal.signal(number, handler)
