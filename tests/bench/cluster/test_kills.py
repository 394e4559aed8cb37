"""Clusters that are killed at random moments leave nothing behind."""
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from open_mpi import python_with
from support import ROOT, clean_environment

STARTS = int(os.environ.get("MM3D_TEST_KILLS", 16))
LONGEST = 5.0    # seconds after which a cluster is killed


def marked(mark: str) -> dict[int, str]:
    """The living processes that have `mark` in their environment, and their command lines."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes():
                words = (path / "cmdline").read_bytes().split(b"\0")
                if re.search(r"^State:\s+[^ZX]", (path / "status").read_text(), re.M):
                    found[int(path.name)] = b" ".join(words).decode(errors="replace")
        except (OSError, ProcessLookupError):
            continue
    return found


def processes_before(moment: float) -> list[int]:
    """The processes that began before a moment of the clock since the machine's start.

    The kernel gives the number of a namespace that is gone to the next one, which another test may
    make at any time: only these processes can hold the namespaces of an earlier cluster.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            ticks = int((path / "stat").read_text().rpartition(")")[2].split()[19])
        except OSError:
            continue
        if ticks / os.sysconf("SC_CLK_TCK") < moment:
            found.append(int(path.name))
    return found


def namespaces(processes) -> set[str]:
    """The namespaces of some processes."""
    found = set()
    for path in (Path("/proc", str(one)) for one in processes):
        try:
            found |= {os.readlink(path / "ns" / name) for name in os.listdir(path / "ns")}
        except OSError:
            continue
    return found


def temporary_files(processes) -> set[str]:
    """Files in places for temporary files that processes of this mount namespace have mapped.

    Others in the same places belong to other tests; those of the hosts inside are not seen here.
    """
    found, here = set(), os.readlink("/proc/self/ns/mnt")
    for path in (Path("/proc", str(one)) for one in processes):
        try:
            if os.readlink(path / "ns/mnt") == here:
                found |= {line.split(maxsplit=5)[5] for line in (path / "maps").read_text()
                          .splitlines() if len(line.split()) > 5}
        except OSError:
            continue
    return {name for name in found if not name.startswith(sys.prefix)
            and name.startswith(("/dev/shm/", tempfile.gettempdir() + "/"))}


def surroundings():
    """Devices, mounts, and files in places for temporary files, of this test's own namespace.

    Those in the folder of temporary files name the hosts inside: Open MPI's by their names, those
    of MPICH's daemons, which are always in /tmp, in their texts.
    """
    host = re.compile(r"\b(head|node-\d\d)\b")
    devices = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return ({line.split(":")[0] for line in devices}, mounts,
            {path.name for path in Path("/dev/shm").glob("mm3d*")},
            {path.name for path in Path(tempfile.gettempdir()).glob("*mpi.*")
             if host.search(path.name)},
            {path.name for path in Path("/tmp").glob("hydra_*") if host.search(read_text(path))})


def read_text(path: Path) -> str:
    """The text of a file; "" if it is another user's, or has just gone."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.slow
@pytest.mark.limit(1800)
def test_nothing_is_left_of_killed_clusters():
    kill_clusters(STARTS, sys.executable)


@pytest.mark.slow
@pytest.mark.limit(600)
def test_nothing_is_left_of_killed_clusters_with_open_mpi(tmp_path):
    python, variables = python_with("Open MPI", tmp_path)
    kill_clusters(max(2, STARTS // 5), python, **variables)


def kill_clusters(starts: int, python: str, **variables: str) -> None:
    """Kill one cluster after the other, and look for what is left."""
    before, moments = surroundings(), random.Random(18)
    mine = namespaces([os.getpid()])
    killed = {}
    for start in range(starts):
        mark = f"MARK_OF_A_TEST={secrets.token_hex(8)}"
        name, _, value = mark.partition("=")
        command = [python, "-m", "bench", "cluster", "3x2:1Gbit",
                   "--", "mpirun", python, "-c",
                   "import time; from mpi4py import MPI; time.sleep(600)"]
        process = subprocess.Popen(command, env=clean_environment(**variables | {name: value}),
                                   cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                   text=True)
        time.sleep(moments.uniform(0, LONGEST))
        alive = marked(mark)
        own = namespaces(alive) - mine
        files = temporary_files(alive)
        if process.poll() is not None and "error: this kernel" in process.stderr.read():
            pytest.skip("this kernel refuses emulated clusters")
        assert process.poll() is None, process.stderr.read()    # it was there to be killed
        alive = alive or {process.pid: "bench cluster"}    # where the first is becoming another
        # Every other time the process that a user sees; else any.
        victim = process.pid if start % 2 else moments.choice(sorted(alive))
        what = alive.get(victim, "")
        kind = next((name for name in ("cluster.head", "bench cluster", "hydra", "prted",
                                       "orted", "mpirun", "time.sleep") if name in what), "other")
        killed[kind] = killed.get(kind, 0) + 1
        moment = time.clock_gettime(time.CLOCK_BOOTTIME)
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if victim != process.pid:
            # A rank or the holder of a node may be lost: its user ends a job that goes on.
            process.terminate()
        end = time.monotonic() + 60
        while marked(mark) and time.monotonic() < end:
            time.sleep(0.05)
        process.wait(60)    # threads of a killed process may wait for a core
        process.stderr.close()
        assert not marked(mark), f"after the death of {what}"
        assert not own & namespaces(processes_before(moment)), f"after the death of {what}"
        assert surroundings() == before
        assert not [name for name in files if os.path.exists(name)], f"after the death of {what}"
    print(f"killed: {killed}")
