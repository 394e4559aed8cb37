"""Somebody who uses the Slurm of `slurm_cluster`, for the tests."""
import os
import re
import sys
import time
from pathlib import Path

import pytest
from mpi4py import MPI

from bench.cases.case import make_case
from bench.cases.selection import select_rows
from bench.records import run_file
from bench.reports.paper_tables import words_agree
from sites import site_file
from support import ROOT, processes_of

# Of tests that start a Slurm.
ON_SLURM = [pytest.mark.slow, pytest.mark.limit(800), pytest.mark.skipif(
    MPI.COMM_WORLD.size > 1, reason="Slurm starts its own ranks: run without mpirun")]
PATIENCE = 300    # seconds that jobs may take on a busy machine; on an idle one it is a tenth

QUICK, ENDLESS = ([f"--{most}repetitions={count}" for most in ("", "max-")]
                  for count in (2, 1000000))


def check_run(run):
    """What ``mpirun`` guarantees of a result holds of one that Slurm started."""
    row, *_ = select_rows(run.configuration["table"], run.configuration["scheme"])
    one = make_case(row, "tiny")
    assert run.configuration["layers"] == one.sizes.layers
    assert run.checks and all(check.passed for check in run.checks)
    assert max(check.error for check in run.checks) < 1e-4
    assert words_agree(run) and run.traffic["words"].sum() > 0
    assert run.samples["forward"].shape[1] == run.ranks
    assert "srun" not in run.environment["command"] and run.environment["ranks"] == run.ranks


class User:
    """Somebody with an account on a cluster, a site file and a folder of results."""

    def __init__(self, cluster, folder, rows=("--table", "strong", "--scheme", "3d",
                                              "--ranks", "8"), **site):
        self.cluster, self.out, self.rows = cluster, folder / "my results", rows
        self.site = folder / "mine.toml"
        self.write_site(**site)
        self.submitted = []

    def write_site(self, options=QUICK, python=sys.executable, time="0:10:00", warning=1,
                   ranks=2, gpus=2, cores=1, exclusive=False, slurm={}, environment={},
                   launch={"mpi": "pmi2"}):
        """By default two ranks a node, so that eight are on all four, and a GPU for each."""
        site_file(self.site.parent, slurm={
            "partition": "all", "exclusive": exclusive, "time": time, "warning": warning} | slurm,
            node={"ranks": ranks, "cores_per_rank": cores, "gpus": gpus},
            software={"python": str(python)}, run={"options": options},
            launch=launch | {"gpu_binding": "task" if gpus else "none"}, environment={
                "MPIR_CVAR_POLLS_BEFORE_YIELD": "1", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
                "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"} | environment)

    def argv(self, verb, *more):
        return (verb, "--site", str(self.site), "--preset", "tiny", "--out", str(self.out),
                *self.rows, *more)

    def jobs(self, verb, *more):
        """``python -m jobs``: exit status, output, errors."""
        done = self.cluster.command(sys.executable, "-m", "jobs", *self.argv(verb, *more),
                                    cwd=ROOT)
        return done.returncode, done.stdout, done.stderr

    def submit(self, *more):
        """Submit; the numbers of the rows' jobs."""
        status, out, err = self.jobs("submit", *more)
        assert status == 0, out + err
        self.submitted += re.findall(r"^job (\S+)(?:: | collects)", out, re.M)
        return re.findall(r"^job (\S+): ", out, re.M)

    def quiet(self):
        """Wait until all that was submitted has ended; whether it has."""
        return self.cluster.quiet(PATIENCE, self.submitted)

    def cancel(self):
        """Cancel what was submitted, and wait."""
        self.cluster.command("scancel", *self.submitted)
        assert self.quiet(), self.logs()

    def runs(self):
        """The collected results."""
        return [run_file.read_run(path) for path in sorted(self.out.glob("*.h5"))]

    def logs(self):
        return "\n".join(f"{path.name}: {path.read_text()}"
                         for path in sorted((self.out / "jobs" / "logs").glob("*")))

    def wait_for(self, condition):
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, self.jobs("status")[1] + self.logs()
            time.sleep(0.2)

    def measuring(self):
        """The processes of ranks that measure a row (not srun, which has the same words)."""
        return processes_of(lambda words: words[2:4] == ["bench", "run"] and any(
            str(self.out) in word for word in words))

    def worked(self):
        """Processor seconds of the rank that has used least; what a rank needs to start is 2."""
        ranks = self.measuring()
        used = [0.0] * (len(ranks) < 8)
        for rank in ranks:
            times = Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[11:13]
            used.append(sum(map(int, times)) / os.sysconf("SC_CLK_TCK"))
        return min(used)
