"""Starting programs, under mpirun or not, from inside a test."""
import functools
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator

import pytest

from bench.instruments.leftover_memory import SEGMENT_FOLDER, abandoned_segments, remove_segments
from mm3d import launcher
from mm3d.arrays import backend
from mm3d.arrays.backend import Backend

ROOT = Path(__file__).parents[2]
LIMIT = float(os.environ.get("MM3D_TEST_TIMEOUT", 120))    # seconds that a test may take


@functools.cache
def gpu_problem() -> str:
    """Why tests that need a GPU cannot run; empty when they can."""
    try:
        import cupy
    except ImportError:
        return "cupy is not installed"
    return "" if cupy.is_available() else "no GPU"


@contextmanager
def use_only(*backends: Backend) -> Iterator[None]:
    """Use only these backends within the block, and others only after `get` makes them.

    An array belongs to the first of them that owns it.  After the block the earlier backends are
    in use again.
    """
    before = dict(backend._backends)
    backend._backends.clear()
    backend._owners.clear()
    try:
        for one in backends:
            backend.get(one)
        yield
    finally:
        backend._backends.clear()
        backend._backends.update(before)
        backend._owners.clear()


_running: set[subprocess.Popen] = set()


def clean_environment(**more: str) -> dict[str, str]:
    """This process' environment plus `more`, fit for starting a launcher: without any trace of
    the one that started this process, and of what mm3d has set on its account."""
    defaults = {*launcher.BLAS_THREAD_VARIABLES, *launcher.YIELD_SETTINGS}
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(launcher.LAUNCHER_PREFIXES) and name not in defaults}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    return env | launcher.mpirun_settings(env) | more


def run_ranks(ranks: int, *argv: str, timeout: float = 0.8 * LIMIT, cwd: str | Path | None = None,
              **env: str) -> subprocess.CompletedProcess:
    """Run `python *argv` on a number of ranks of its own, as `run_python` does.

    To be called by one rank: from a test without the marker `ranks`, whose body only rank 0
    runs while the others sleep.
    """
    return run_command(launcher.mpirun_command(ranks, sys.executable, *argv), timeout, cwd, **env)


def run_python(*argv: str, timeout: float = 0.8 * LIMIT, cwd: str | Path | None = None,
               **env: str) -> subprocess.CompletedProcess:
    """Run `python *argv` in a clean environment with these variables more: its status and output.

    After `timeout` seconds it and all that it started are killed: its status is then not 0, and
    its `stderr` says so.
    """
    return run_command([sys.executable, *argv], timeout, cwd, **env)


def unless_refused(done: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    """What ran in an emulated cluster; the test is skipped where the kernel refuses clusters."""
    if done.returncode == 2 and "error: this kernel" in done.stderr:
        pytest.skip(done.stderr.strip())
    return done


def run_in_cluster(cluster: str, *words: str, python: str = sys.executable,
                   **more) -> subprocess.CompletedProcess:
    """Run a command in an emulated cluster as `run_python` does; see `unless_refused`."""
    return unless_refused(run_command([python, "-m", "bench", "cluster", cluster, "--", *words],
                                      **more))


def kill_running() -> None:
    """Kill whatever `run_ranks` and `run_python` have running: this process is about to end."""
    for process in tuple(_running):
        _kill(process)


def run_command(command: list[str], timeout: float = 0.8 * LIMIT,
                cwd: str | Path | None = None, **env: str) -> subprocess.CompletedProcess:
    """Run any command in a clean environment, as `run_python` does."""
    process = subprocess.Popen(command, cwd=cwd, env=clean_environment(**env), text=True,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, start_new_session=True)
    _running.add(process)
    others, late = {*SEGMENT_FOLDER.glob("mpich_sh*")}, ""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill(process)
        out, err = process.communicate()
        late = f"\nkilled: did not end within {timeout:g} s: {' '.join(command)}\n"
    finally:
        _kill(process)
        _running.discard(process)
    if process.returncode:    # ranks that are killed leave theirs, and a container has 64 MB
        remove_segments([one for one in abandoned_segments() if one.path not in others])
    code = process.returncode or (1 if late else 0)
    return subprocess.CompletedProcess(command, code, out, err + late)


def status_of(main: Callable[[list[str]], int], words: list[str]) -> int:
    """The status with which a command line ends, whether it returns or exits."""
    try:
        return main(words)
    except SystemExit as ended:
        return int(ended.code or 0)


def runs(pid: int | str) -> bool:
    """Whether a process runs; one that has ended may wait for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):    # the second where it ends meanwhile
        return False


def processes_of(wanted: Callable[[list[str]], bool]) -> list[int]:
    """The living processes of this interpreter whose command line is `wanted`, by number."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = os.fsdecode(path.read_bytes()).split("\0")
        except OSError:    # it has just ended
            continue
        if words[0] == sys.executable and wanted(words):
            found.append(int(path.parent.name))
    return sorted(found)


def _kill(process: subprocess.Popen, grace: float = 3.0) -> None:
    """End a program and what it started.

    A terminated mpirun ends its ranks, which are not in its process group; what ignores
    that is killed.
    """
    for sign in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + grace
        try:
            os.killpg(process.pid, sign)
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.02)
        except ProcessLookupError:    # nothing is left of the group
            return
