"""Jobs under a real Slurm whose nodes have networks of their own."""
import json
import os
import sys
from pathlib import Path

import pytest

import slurm_cluster
from support import ROOT, run_in_cluster

HOSTS = str(Path(__file__).parent / "slurm_hosts.py")
TOOLS = str(ROOT / "tests" / "tools")


@pytest.mark.slow
@pytest.mark.limit(900)
def test_a_row_on_two_hosts_by_each_launcher(tmp_path):
    """From submission to the result: pre-flight, placement, and the checks of the row."""
    if slurm_cluster.missing():
        pytest.skip(slurm_cluster.missing())
    done = run_in_cluster("2x4:1Gbit", sys.executable, HOSTS, str(tmp_path), "srun", "mpirun",
                          timeout=800, cwd=ROOT, PYTHONPATH=os.pathsep.join((str(ROOT), TOOLS)))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for launcher in ("srun", "mpirun"):
        job = found[launcher]
        assert job["ended"] and job.get("ranks") == 8, job["log"] + job["status"]
        assert job["nodes"] == 2 and all(job["checks"])
        # The two busiest directions are inside a node.
        assert set(job["within_nodes"]) == set(job["placement"][-2:])
        assert "one world of 8 ranks" in job["log"]
