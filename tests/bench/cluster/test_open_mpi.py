"""Emulated clusters with Open MPI, where it and the kernel allow them."""
import json
import sys
from pathlib import Path

import pytest

from bench.records import run_file
from open_mpi import python_with_open_mpi
from support import ROOT, run_command, unless_refused

RANKS_OF_NODES = str(Path(__file__).parent / "ranks_of_nodes.py")
BREAK = str(Path(__file__).parent / "break_cluster.py")
SHARE = 2 ** 20


@pytest.fixture
def bench(tmp_path):
    """Returns what runs ``python -m bench`` with Open MPI; the test is skipped without."""
    python, variables = python_with_open_mpi(tmp_path / "environment")

    def run(*words):
        return unless_refused(run_command([python, "-m", "bench", *words], cwd=ROOT,
                                          **variables))
    return run


@pytest.mark.slow
def test_ranks_and_links(bench):
    """Ranks share the memory of their node alone; between nodes every byte takes the link."""
    done = bench("cluster", "2x2:100Mbit", "--", "sh", "-c",
                 f"on-node 1 touch /dev/shm/mine-1; mpirun {sys.executable} {RANKS_OF_NODES} "
                 f"{SHARE}; exit 7")
    assert done.returncode == 7, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert [(one["host"], one["ranks"], one["memory"]) for one in found["seen"]] == \
        2 * [("node-00", 2, [])] + 2 * [("node-01", 2, ["mine-1"])]
    assert found["nodes"] == [0, 0, 1, 1]
    assert SHARE <= found["sent"][0] <= 1.1 * SHARE
    assert SHARE <= found["received"][1] <= 1.1 * SHARE
    assert found["sent"][1] < 0.1 * SHARE > found["received"][0]
    assert found["seconds"] >= 0.9 * SHARE / (1e8 / 8)


@pytest.mark.slow
def test_a_product(bench, tmp_path):
    """Verified, counted, and no faster than the link lets its words pass."""
    done = bench("measure", "matmul", "--shape=512", "--grid=2x2x1", "--repetitions=3",
                 "--max-repetitions=3", "--cluster=2x2:200Mbit", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    run = run_file.read_run(next(tmp_path.glob("*.h5")))
    assert run.environment["mpi"].startswith("Open MPI")
    assert run.environment["ranks_on_this_node"] == 2 and run.environment["ranks"] == 4
    # Each rank gathers half of its rows of A and half of its columns of B; one of the two from
    # the other node, as does the other rank of its node.
    assert run.variables["words"].values.tolist() == [4 * [2 * 256 * 256]]
    least = 2 * 256 * 256 * 4 / (200e6 / 8)
    assert (run.variables["seconds"].values[0, 0, :3] >= 0.9 * least).all()
    assert bench("validate", str(tmp_path)).returncode == 0


@pytest.mark.slow
@pytest.mark.limit(600)
def test_a_link_that_is_cut(bench, tmp_path):
    """The first of two rows is done; the second is under way, and the job ends with the reason,
    though a daemon of Open MPI is left on the node."""
    done = bench("cluster", "2x2:100Mbit", "--",
                 sys.executable, BREAK, "1", "cut+restore", "done: ", "100000",
                 sys.executable, "-m", "bench", "reproduce", "--preset=tiny", "--scheme=1d-sp",
                 "--ranks=4", "--repetitions=2", "--max-repetitions=2", "--stall=15", "--order=1",
                 f"--out={tmp_path / 'results'}")
    assert done.returncode == 0, done.stdout + done.stderr
    how = json.loads(done.stdout.splitlines()[-1])
    assert how["status"] == 1 and how["broken"], done.stdout + done.stderr
    assert how["ended"] - how["broken"][0] < 165    # as in test_faults
    assert "[ 1/2 " in done.stdout and "1 of 2 rows failed" in done.stderr
    assert "no progress for 15 s, nothing is heard of rank" in done.stderr
    run, = [run_file.read_run(path) for path in (tmp_path / "results").glob("*.h5")]
    assert run.environment["mpi"].startswith("Open MPI")
    assert run.checks and all(check.passed for check in run.checks)
