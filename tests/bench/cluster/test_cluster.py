"""Real emulated clusters, where the kernel allows them."""
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyroute2.netlink.exceptions import NetlinkError

from bench.cluster import links
from bench.cluster.spec import parse_rate
from bench.records import run_file
from open_mpi import EACH_MPI, python_with
from support import (ROOT, clean_environment, run_command, run_in_cluster, run_python,
                     unless_refused)

RANKS_OF_NODES = str(Path(__file__).parent / "ranks_of_nodes.py")
SHARE = 2 ** 20


@EACH_MPI
def test_ranks_on_nodes(mpi, tmp_path):
    """Each node has its own devices, memory and name; its link is limited and counted."""
    python, variables = python_with(mpi, tmp_path)
    script = (f"touch /dev/shm/mine-head; on-node 1 touch /dev/shm/mine-1; "
              f"mpirun {sys.executable} {RANKS_OF_NODES} {SHARE}; exit 7")
    done = run_in_cluster("2x2:100Mbit", "sh", "-c", script, python=python, cwd=ROOT, **variables)
    assert done.returncode == 7, done.stdout + done.stderr
    found = json.loads(done.stdout)
    for rank, seen in enumerate(found["seen"]):
        node = rank // 2
        assert seen["cluster"] == {"nodes": 2, "ranks": 2, "link": 1e8, "latency": 0.0,
                                   "node": node}
        assert seen["host"] == f"node-0{node}" and seen["ranks"] == 2
        assert seen["memory"] == ["mine-1"] * node
        assert seen["devices"] == ["eth0", "lo"]
        assert seen["tcp"] == ["reno", "0"]    # whatever this machine has chosen
        assert seen["oversubscribed"] == (4 > len(os.sched_getaffinity(0)))
    assert found["nodes"] == [0, 0, 1, 1]
    assert SHARE <= found["sent"][0] <= 1.1 * SHARE
    assert SHARE <= found["received"][1] <= 1.1 * SHARE
    assert found["sent"][1] < 0.1 * SHARE > found["received"][0]
    assert found["packets"][0] >= SHARE / 2 ** 16
    assert found["seconds"] >= 0.9 * SHARE / (1e8 / 8)
    assert not Path("/dev/shm/mine-head").exists() and not Path("/dev/shm/mine-1").exists()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("link", ["800Mbit", "100Mbit", "10Gbit"])
def test_links_take_no_packets_apart(link):
    """A packet of many frames costs the cores about as much as a frame; links send it whole."""
    done = run_in_cluster(f"2x1:{link}", "mpirun", sys.executable, RANKS_OF_NODES, str(8 * SHARE))
    found = json.loads(done.stdout)
    frames = links.burst_frames(parse_rate(link))
    assert found["packets"][0] <= 1.5 * 8 * SHARE / (frames * links.FRAME)


@pytest.mark.slow
@pytest.mark.parametrize("words, status, message", [
    (["no-such-program"], 2, "error: no-such-program cannot be started: No such file"),
    (["mpirun", "-n", "5", "true"], 2, "error: 5 ranks on 2 nodes of 2: at most 4 would do"),
    (["sh", "-c", "kill -9 $$"], 137, ""),
    (["sh", "-c", "kill -9 1; sleep 1; exit 5"], 5, ""),    # process 1 is out of reach inside
    ([sys.executable, "-m", "bench", "cluster", "1x1", "--", "true"], 2,
     "error: this is inside an emulated cluster already"),
    (["on-node", "2", "true"], 1, "error: there is no node '2': 0 to 1 would do")])
def test_failures_inside(words, status, message):
    done = run_in_cluster("2x2:100Mbit", *words)
    assert done.returncode == status, done.stderr
    assert message in done.stderr and done.stderr.count("\n") == bool(message)


@pytest.mark.slow
def test_latency_where_the_kernel_has_it():
    done = run_python("-m", "bench", "cluster", "2x1:unlimited,20ms", "--",
                      "mpirun", "-n", "2", sys.executable, RANKS_OF_NODES, "1")
    if done.returncode == 2:
        assert done.stderr.count("\n") == 1
        pytest.skip(done.stderr.strip())
    assert json.loads(done.stdout)["seconds"] >= 0.02


@pytest.mark.slow
def test_a_kernel_without_user_namespaces():
    """One in which none more may be made: a namespace of users with a limit of its own."""
    done = run_python("-c", (
        "import os, sys\n"
        "from bench.cluster import namespaces\n"
        "user = os.geteuid()\n"
        "namespaces.unshare(namespaces.USER)\n"
        "open('/proc/self/uid_map', 'w').write(f'0 {user} 1')\n"
        "open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
        "os.execv(sys.executable, [sys.executable, *'-m bench cluster 2x2 "
        "-- true'.split()])"))
    if "namespaces.unshare" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "this kernel does not let this user make namespaces" in done.stderr
    assert "sysctl user.max_user_namespaces" in done.stderr


@pytest.mark.parametrize("kind, message", [
    ("tbf", "limits the rate of a link (module sch_tbf): unlimited links would do"),
    ("netem", "delays what a link carries (module sch_netem): leave the latency out")])
def test_a_kernel_without_a_filter(kind, message):
    """As it says of a discipline that it does not know."""
    class Net:
        def tc(self, *words, **options):
            raise NetlinkError(errno.ENOENT)

    with pytest.raises(links.Refused) as refused:
        links.add_filter(Net(), kind, 1)
    assert str(refused.value) == f"this kernel has no {kind}, which {message}"


def started(*words):
    """A Python whose output is kept."""
    # What was started in the background of a shell ignores SIGINT, and so do its children.
    return subprocess.Popen([sys.executable, *words], env=clean_environment(), text=True, cwd=ROOT,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(number):
    script = "trap 'echo ended; exit 9' INT TERM; echo begun; while :; do sleep 0.1; done"
    with started("-m", "bench", "cluster", "1x1", "--", "sh", "-c", script) as process:
        if process.stdout.readline() != "begun\n":
            pytest.skip(process.stderr.read().strip())
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == ("ended\n", 9)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_no_refusal_of_the_machine(number, tmp_path):
    """Whoever tries a cluster ends at once, instead of doing without clusters."""
    begun = tmp_path / "begun"
    words = ["sh", "-c", f"trap 'exit 3' INT TERM; touch {begun}; while :; do sleep 0.1; done"]
    program = ("from bench.cluster.run import refusal; from bench.cluster.spec import Cluster; "
               f"print(refusal(Cluster(1, 1, 1e8), {words!r}), flush=True)")
    with started("-c", program) as process:
        end = time.monotonic() + 60
        while not begun.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        if process.poll() is None:
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
    if not begun.exists():
        pytest.skip(out + err)
    assert (out, process.returncode) == ("", -number), err


@pytest.mark.slow
def test_two_clusters_beside_each_other():
    begun = time.monotonic()
    both = [started("-m", "bench", "cluster", "2x1", "--", "mpirun", "sh", "-c",
                    "hostname; sleep 2") for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=100)
        if "error: this kernel" in err:
            pytest.skip(err.strip())
        assert process.returncode == 0 and sorted(out.split()) == ["node-00", "node-01"], err
    assert time.monotonic() - begun < 100


@pytest.mark.slow
@EACH_MPI
def test_a_product_and_its_file(mpi, tmp_path):
    """Verified, counted, and no faster than the link lets its words pass."""
    python, variables = python_with(mpi, tmp_path / "environment")
    done = unless_refused(run_command([
        python, "-m", "bench", "measure", "matmul", "--shape=512", "--repetitions=3",
        "--max-repetitions=3", "--cluster=2x2:200Mbit", "--grid=2x2x1", f"--out={tmp_path}"],
        cwd=ROOT, **variables))
    assert done.returncode == 0, done.stderr
    assert "emulated cluster, 2 nodes x 2 ranks, 200 Mbit/s" in " ".join(done.stdout.split())
    run = run_file.read_run(next(tmp_path.glob("*.h5")))
    assert mpi == "own" or run.environment["mpi"].startswith(mpi)
    assert run.environment["emulated_cluster"] == "2x2:200Mbit"
    assert run.environment["emulated_link_rate"] == 2e8
    assert run.environment["ranks_on_this_node"] == 2 and run.environment["ranks"] == 4
    assert "MM3D_CLUSTER" not in run.environment["tuning_variables"]
    # Each rank gathers half of its rows of A and half of its columns of B; one of the two from
    # the other node, as does the other rank of its node.
    assert run.variables["words"].values.tolist() == [4 * [2 * 256 * 256]]
    least = 2 * 256 * 256 * 4 / (200e6 / 8)
    assert (run.variables["seconds"].values[0, 0, :3] >= 0.9 * least).all()
    assert run_python("-m", "bench", "validate", str(tmp_path)).returncode == 0
