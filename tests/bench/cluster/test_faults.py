"""Links that are cut or slow and nodes that die, in the middle of a run across nodes."""
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bench.__main__ import main
from bench.experiments.rows import reproduction
from bench.instruments import slow_links
from bench.records import run_file
from mm3d.child_process import start_child
from open_mpi import python_with
from support import ROOT, run_in_cluster

BREAK = str(Path(__file__).parent / "break_cluster.py")
STALL = 15
pytestmark = pytest.mark.limit(600)


def broken(fault, node, line, size, *command, shape="2x2", **options):
    """Run a command that is broken in the middle; what it printed, errors, and how it ended."""
    done = run_in_cluster(f"{shape}:100Mbit", sys.executable, BREAK, str(node), fault, line,
                          str(size), *command, timeout=400, cwd=ROOT, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    *printed, last = done.stdout.splitlines()
    return "\n".join(printed), done.stderr, json.loads(last)


def reproduce(out, *words):
    return (sys.executable, "-m", "bench", "reproduce", "--preset=tiny", "--scheme=1d-sp",
            "--ranks=4", "--repetitions=2", "--max-repetitions=2", f"--stall={STALL}",
            "--order=1", f"--out={out}", *words)


@pytest.mark.slow
@pytest.mark.parametrize("fault, mpi", [("cut+restore", "own"), ("kill", "own"),
                                        ("cut+restore", "Open MPI")])
def test_what_is_lost_is_named_and_what_is_done_stays(fault, mpi, tmp_path):
    """The first of two rows is done; the second is under way when node 1 is lost, where a daemon
    of Open MPI may be left."""
    python, variables = python_with(mpi, tmp_path / "environment")
    out, err, how = broken(fault, 1, "done: ", 100_000, *reproduce(tmp_path), python=python,
                           **variables)
    assert how["status"] == 1 and how["broken"], out + err
    # The watchdog ends the job, and mpirun has 20 s and 10 s to end.
    assert how["ended"] - how["broken"][0] < STALL + 150
    assert "[ 1/2 " in out and "1 of 2 rows failed" in err
    failed = next(line for line in err.splitlines() if line.startswith("  failed: "))
    assert "1-D, sequence 4 ranks: " in failed and "mpirun ended with status" in failed
    if fault.startswith("cut"):
        assert "no progress for 15 s, nothing is heard of rank" in failed
        assert "on another node" in err
    run, = [run_file.read_run(path) for path in tmp_path.glob("*.h5")]
    assert mpi == "own" or run.environment["mpi"].startswith(mpi)
    assert run.checks and all(check.passed for check in run.checks)
    assert main(["validate", str(tmp_path)]) == 0


@pytest.mark.slow
def test_a_slow_node_is_named(tmp_path):
    """The job ends as it should, and names the one of four nodes that has a tenth of the rate."""
    out, err, how = broken("slow:10Mbit", 2, "starting", 50_000,
                           *reproduce(tmp_path, "--table=weak"), shape="4x1")
    assert how["status"] == 0 and how["broken"], out + err
    named = [line for line in out.splitlines() if line.startswith("slow: ")]
    assert len(named) == 1 and named[0].startswith("slow: node 2 (node-02) exchanges "), out
    assert len(list(tmp_path.glob("*.h5"))) == 1


@pytest.mark.parametrize("rates, slow", [
    ([10, 10, 10, 1], [3]), ([10, 9, 11], []), ([1, 10, 10], [0]), ([10, 4, 10, 10], []),
    ([1, 10, 10, 1, 10], [0, 3])])
def test_slow_nodes_of_rates(rates, slow):
    assert slow_links.slow_nodes(np.array(rates, float)) == slow


def test_a_job_that_leaves_its_output_open():
    """As Open MPI's daemon does on a node that is lost: all lines come, and the job has ended."""
    begun, left = time.monotonic(), "setsid sleep 60 & echo $!; sleep 1.5; echo last; exit 3"
    with start_child(["sh", "-c", left], stderr=-3) as child:
        process, *more = reproduction.job_lines(child, 0.5)
        assert more == ["last\n"] and child.wait() == 3
    try:
        assert time.monotonic() - begun < 50
    finally:
        os.kill(int(process), signal.SIGKILL)


def test_a_job_that_goes_on_after_its_watchdog(capsys):
    """As mpirun does that does not reach a node."""
    says = "watchdog: no progress for 9 s, nothing is heard of rank 3; the job ends"
    with start_child(["sh", "-c", f"echo before >&2; echo '{says}' >&2; exec sleep 100"],
                     stderr=-1) as child, reproduction.JobErrors(child, 0.1) as errors:
        assert child.wait(60) == -15
        assert errors.finish() == "no progress for 9 s, nothing is heard of rank 3; "
    assert child.stderr.closed
    assert capsys.readouterr().err == f"before\n{says}\n"


def test_a_job_that_is_stopped_is_not_ended_again():
    """Its number may be another process's by then."""
    ended = []
    with pytest.raises(KeyboardInterrupt):
        with start_child(["sh", "-c", "echo 'watchdog: no progress;' >&2; exec sleep 100"],
                         stderr=-1) as child, reproduction.JobErrors(
                             child, 100, ended.append) as errors:
            while not errors._reason:
                time.sleep(0.01)
            raise KeyboardInterrupt
    errors._thread.join(60)
    assert child.stderr.closed
    errors._timer.join(60)
    assert not errors._timer.is_alive() and not ended
