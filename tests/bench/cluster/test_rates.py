"""Links whose rate changes while ranks run."""
import argparse
import sys

import pytest

from bench.cluster import faults
from bench.cluster.spec import rate_text
from bench.command_line import measuring
from bench.errors import UsageError
from bench.records.folder import read_folder
from bench.records.at_rates import join_rates
from support import run_in_cluster, run_python, unless_refused

MEASURE = """
import time
import numpy as np
from mpi4py import MPI
from bench.cluster.rates import change_links
comm, found, data = MPI.COMM_WORLD, [], np.zeros(2 ** 20, np.uint8)
for link in (2e8, 2e7, None):
    comm.Barrier()
    if comm.rank == 0:
        change_links(link)
    comm.Barrier()
    start = time.perf_counter()
    comm.Sendrecv(data, 1 - comm.rank, recvbuf=np.empty_like(data))
    found.append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
if comm.rank == 0:
    print(*found)
"""


def test_rates_that_cannot_be(monkeypatch):
    monkeypatch.delenv("MM3D_CLUSTER", raising=False)
    assert [rate_text(link) for link in (2e8, None)] == ["200Mbit", "unlimited"]
    for rate, message in (("fast", "link 'fast'"), ("1Gbit", "inside an emulated cluster")):
        with pytest.raises(UsageError, match=message):
            faults.main(["slow", "all", rate])


def test_rates_of_links():
    assert measuring.rates("1Gbit,unlimited,50Mbit,1Gbit") == [1e9, None, 5e7]
    with pytest.raises(argparse.ArgumentTypeError, match="a link of 1 bit/s"):
        measuring.rates("50Mbit,1bit")


@pytest.mark.slow
def test_a_rate_is_changed_while_ranks_run():
    done = run_in_cluster("2x1:1Gbit", "mpirun", sys.executable, "-c", MEASURE)
    assert done.returncode == 0, done.stdout + done.stderr
    fast, slow, free = map(float, done.stdout.split())
    assert slow >= 0.9 * 2 ** 23 / 2e7 > fast >= 0.9 * 2 ** 23 / 2e8 and free < slow / 4


@pytest.mark.slow
def test_rows_at_two_rates(tmp_path):
    for inside in "xz":
        done = unless_refused(run_python(
            "-m", "bench", "run", "--preset=emulated-tiny", "--rows=strong:3d",
            "--cluster=4x2:50Mbit", "--links=10Mbit,unlimited", f"--inside={inside}",
            "--repetitions=2", "--max-repetitions=2", "--software-share=none", "--traced=0",
            f"--out={tmp_path}"))
        assert done.returncode == 0, done.stdout + done.stderr
    assert len([*tmp_path.glob("strong-3d-p008-*.h5")]) == 4
    assert list(tmp_path.glob("where-each-is-fastest-*.png"))
    [record] = join_rates(read_folder(tmp_path).rows)
    slow, free = record.values("samples").sum(axis=2).min(axis=-1).T
    assert (slow > 1.5 * free).all()
    assert {label.split()[2][-1] for label in record.scales["plan"]} == {"x", "z"}
    assert "3-D 2 x 2 x 2, x inside, batch 24" in done.stdout
