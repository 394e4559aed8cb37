"""Links whose rate changes while ranks run."""
import argparse
import sys

import h5py
import pytest

from bench.__main__ import parser
from bench.cluster import rates
from bench.cluster.spec import Cluster
from bench.errors import UsageError
from bench.command_line import link_rates
from support import run_python

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
    assert [rates.rate_text(link) for link in (2e8, None)] == ["200Mbit", "unlimited"]
    for words, message in (([], "one rate"), (["fast"], "link 'fast'"),
                           (["1Gbit"], "inside an emulated cluster")):
        with pytest.raises(UsageError, match=message):
            rates.main(words)


def test_links_in_the_order_of_their_rates():
    assert link_rates.rates("1Gbit,unlimited,50Mbit,1Gbit") == [5e7, 1e9, None]
    with pytest.raises(argparse.ArgumentTypeError, match="a link of 1 bit/s"):
        link_rates.rates("50Mbit,1bit")


def test_options_of_single_rows_are_refused(monkeypatch):
    monkeypatch.setenv("MM3D_CLUSTER", Cluster.parse("4x2:50Mbit").to_environment())
    words = ["run", "--links=50Mbit,unlimited", "--preset=emulated"]
    settings = argparse.Namespace(waits=lambda case: None)
    link_rates.check_waits(parser().parse_args(words), settings)
    for more in (["--traced=1"], ["--equal-tokens"], ["--stop-file=stop", "--width=0.1"]):
        with pytest.raises(UsageError, match=more[-1].partition("=")[0]):
            link_rates.check_waits(parser().parse_args([*words, *more]), settings)


def in_cluster(*words):
    done = run_python(*words)
    if done.returncode == 2 and "error: this kernel" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_rate_is_changed_while_ranks_run():
    words = in_cluster("-m", "bench", "cluster", "2x1:1Gbit", "--",
                       "mpirun", sys.executable, "-c", MEASURE)
    fast, slow, free = map(float, words.split())
    assert slow >= 0.9 * 2 ** 23 / 2e7 > fast >= 0.9 * 2 ** 23 / 2e8 and free < slow / 4


@pytest.mark.slow
def test_a_sweep(tmp_path):
    text = in_cluster("-m", "bench", "run", "--preset=emulated-tiny", "--table=strong",
                      "--scheme=3d", "--cluster=4x2:50Mbit", "--links=10Mbit,unlimited",
                      "--inside=x,z", "--repetitions=1", "--grid=2x2x2", f"--out={tmp_path}")
    [path] = tmp_path.glob("links-strong-p008-*.h5")
    assert list(tmp_path.glob("where-each-is-fastest-*.png"))
    with h5py.File(path) as file:
        samples = file["measurements/samples"][...]
        labels = [label.decode() for label in file["measurements/plan"]]
    assert [label.split()[2][-1] for label in labels] == ["x", "z"]
    assert (samples[:, 0].sum(axis=1) > 1.5 * samples[:, 1].sum(axis=1)).all()
    assert "3-D 2 x 2 x 2, x inside, batch 24" in text
