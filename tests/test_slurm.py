"""The jobs under a real Slurm: four nodes with four GPUs each, which are one machine's."""
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mpi4py import MPI

import slurm_cluster
from bench.cases import case, select
from bench.tables import words_agree
from jobs import slurm
from jobs.__main__ import main
from mm3d import store
from slurm_cluster import Cluster
from support import ROOT

pytestmark = [pytest.mark.limit(400), pytest.mark.skipif(
    MPI.COMM_WORLD.size > 1, reason="Slurm starts its own ranks: run without mpirun")]

# Two ranks a node, so that eight are on all four nodes, and a GPU for each.
SITE = """
about = "one machine that plays four nodes with four GPUs each"
[slurm]
partition = "all"
exclusive = false
time = "{time}"
warning = 1
[node]
ranks = 2
gpus = 2
[software]
python = "{python}"
[launch]
mpi = "pmi2"
gpu_binding = "task"
[run]
options = [{options}]
[environment]
MPIR_CVAR_POLLS_BEFORE_YIELD = "1"
MPIR_CVAR_ENABLE_HEAVY_YIELD = "1"
"""
QUICK = '"--repetitions=2", "--max-repetitions=2"'
ENDLESS = '"--repetitions=1000000", "--max-repetitions=1000000"'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    lacking = slurm_cluster.missing()
    if lacking:
        pytest.skip(lacking)
    running = Cluster(tmp_path_factory.mktemp("slurm")).start()
    yield running
    running.stop()
    assert all(daemon.poll() is not None for daemon in running.daemons)


class User:
    """Somebody with an account on a cluster, a site file and a folder of results."""

    def __init__(self, cluster, folder, options=QUICK, python=sys.executable, hours="0:10:00",
                 rows=("--table", "strong", "--scheme", "3d", "--ranks", "8")):
        self.cluster, self.out = cluster, folder / "my results"
        self.site = folder / "mine.toml"
        self.site.write_text(SITE.format(options=options, python=python, time=hours))
        self.rows = rows

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
        return re.findall(r"^job (\S+): ", out, re.M)

    def runs(self):
        """The collected results."""
        return [store.read(path) for path in sorted(self.out.glob("*.h5"))]

    def logs(self):
        return "\n".join(f"{path.name}: {path.read_text()}"
                         for path in sorted((self.out / "jobs" / "logs").glob("*")))

    def wait_for(self, condition, seconds=90):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.jobs("status")[1] + self.logs()
            time.sleep(0.2)

    def measuring(self):
        """The processes of ranks that measure a row (not srun, which has the same words)."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode().split("\0")
            except OSError:    # it has just ended
                continue
            if words[0] == sys.executable and words[2:4] == ["bench", "run"] and any(
                    str(self.out) in word for word in words):
                found.append(int(path.parent.name))
        return found

    def worked(self):
        """Processor seconds of the rank that has used least; what a rank needs to start is 2."""
        ranks = self.measuring()
        used = [0.0] * (len(ranks) < 8)
        for rank in ranks:
            times = Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[11:13]
            used.append(sum(map(int, times)) / os.sysconf("SC_CLK_TCK"))
        return min(used)


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    """Jobs of a minute, which end while other tests go on: on a cluster of their own."""
    lacking = slurm_cluster.missing()
    if lacking:
        pytest.skip(lacking)
    heeding, hanging = (tmp_path_factory.mktemp(name) for name in ("heeds", "hangs"))
    python = hanging / "python"
    python.write_text("#!/bin/bash\ntrap '' TERM USR1\nsleep 100 & wait; wait; wait\n")
    python.chmod(0o755)
    running = Cluster(tmp_path_factory.mktemp("limits")).start()
    try:
        heeds = User(running, heeding, options=ENDLESS, hours="0:01:00")
        hangs = User(running, hanging, python=python, hours="0:01:00")
        # It leaves the cores to the others early.
        heeds.site.write_text(heeds.site.read_text().replace("warning = 1", "warning = 30"))
        for user in (heeds, hangs):
            user.submit()
        running.command("scancel", "--name=mm3d-collect")
        yield running, heeds, hangs
    finally:
        running.stop()


def check_run(run):
    """What ``mpirun`` guarantees of a result holds of one that Slurm started."""
    one = case(select(run.configuration["table"], run.configuration["scheme"])[0], "tiny")
    assert run.configuration["layers"] == one.sizes.layers
    assert run.checks and all(check.passed for check in run.checks)
    assert max(check.error for check in run.checks) < 1e-4
    assert words_agree(run) and run.traffic["words"].sum() > 0
    assert run.samples["forward"].shape[1] == run.ranks
    assert "srun" not in run.environment["command"] and run.environment["ranks"] == run.ranks


@pytest.mark.usefixtures("limited")    # so that its minute begins now
def test_rows_from_submission_to_tables_and_only_what_is_missing(cluster, tmp_path):
    user = User(cluster, tmp_path, rows=("--table", "strong", "--ranks", "8"))
    assert "nothing is submitted" in user.jobs("render")[1]
    assert user.jobs("status")[1].count(": not submitted") == 2
    jobs = user.submit()
    assert len(jobs) == 2
    # Somebody who submits again while they are under way submits nothing.
    assert user.submit() == []
    assert cluster.quiet(150), user.logs()
    # The last job has collected, printed and drawn.
    assert {path.suffix for path in user.out.iterdir()} >= {".h5", ".txt", ".png", ".html"}, (
        user.logs())
    runs = user.runs()
    assert sorted(run.configuration["scheme"] for run in runs) == ["1d", "3d"]
    for run in runs:
        check_run(run)
        assert run.configuration["nodes"] == 4
    by_scheme = {run.configuration["scheme"]: run.configuration for run in runs}
    # The busiest direction is the fastest, and lines of two fit into nodes of two.
    assert by_scheme["3d"]["within_nodes"] == by_scheme["3d"]["placement"][-1]
    assert by_scheme["1d"]["within_nodes"] == ""
    log = user.logs()
    assert log.count("one world of 8 ranks") == 2
    assert "8 GPUs for 8 ranks, as CUDA_VISIBLE_DEVICES says" in log
    assert "2 of 2 rows done" in log
    assert user.jobs("status")[1].count(": done, job ") == 2
    # A row that is lost is the only one that is run again.
    for path in [*user.out.rglob("strong-1d-*.h5")]:
        path.unlink()
    status, out, _ = user.jobs("collect")
    assert status == 1 and "missing: strong 1-D 8 ranks: failed" in out
    assert len(user.submit()) == 1
    assert cluster.quiet(90) and len(user.runs()) == 2


def test_two_who_submit_at_once(cluster, tmp_path):
    user = User(cluster, tmp_path, rows=("--table", "all", "--ranks", "8"))
    both = [subprocess.Popen([sys.executable, "-m", "jobs", *user.argv("submit")], cwd=ROOT,
                             env=cluster.environment(), stdout=subprocess.PIPE, text=True)
            for _ in range(2)]
    out = "".join(process.communicate(timeout=60)[0] for process in both)
    cluster.command("scancel", "--user=root")
    assert [process.returncode for process in both] == [0, 0]
    assert len(re.findall(r"^job \S+: ", out, re.M)) == 4 and "4 under way, 0 to submit" in out
    assert cluster.quiet(30)


def test_an_array_that_is_cancelled(cluster, tmp_path):
    user = User(cluster, tmp_path, options=ENDLESS, rows=("--table", "all", "--scheme", "3d,1d",
                                                          "--ranks", "8"))
    jobs = user.submit("--array")
    assert [job.partition("_")[2] for job in jobs] == ["0", "1", "2", "3"]
    assert len({job.partition("_")[0] for job in jobs}) == 1
    user.wait_for(user.measuring)
    cluster.command("scancel", jobs[0].partition("_")[0])
    assert cluster.quiet(60), user.logs()
    status, out, _ = user.jobs("status")
    assert status == 0 and out.count("failed, job ") == 4 and out.count(": CANCELLED") == 4, out
    assert not user.measuring()
    # All of them are due again, and this time they may finish; one stands for all.
    user.site.write_text(SITE.format(options=QUICK, python=sys.executable, time="0:10:00"))
    user.rows = ("--table", "weak", "--scheme", "3d", "--ranks", "8")
    assert len(user.submit("--array")) == 1
    assert cluster.quiet(90), user.logs()
    check_run(*user.runs())


def test_a_task_that_is_killed(cluster, tmp_path):
    user = User(cluster, tmp_path, options=ENDLESS)
    job, = user.submit()
    user.wait_for(lambda: len(user.measuring()) == 8)
    time.sleep(1)
    os.kill(user.measuring()[3], signal.SIGKILL)
    assert cluster.quiet(60), user.logs()
    out = user.jobs("status")[1]
    assert re.search(rf"strong 3-D 8 ranks: failed, job {job}: FAILED; bench run ended with "
                     r"status \d+", out), out + user.logs()
    assert not user.runs() and not user.measuring()


def test_a_job_that_is_told_that_its_time_is_nearly_over(cluster, tmp_path):
    """As Slurm tells it, but now."""
    user = User(cluster, tmp_path, options=ENDLESS)
    job, = user.submit()
    user.wait_for(lambda: user.worked() > 4)
    cluster.command("scancel", "--signal=USR1", "--batch", job)
    assert cluster.quiet(60), user.logs()
    run, = user.runs()
    check_run(run)
    assert run.ended_by == "stopped" and len(run.samples["forward"]) >= 1, user.logs()
    assert "strong 3-D 8 ranks: stopped early, job" in user.jobs("status")[1]
    assert len(user.submit()) == 1    # such a row is due again
    cluster.command("scancel", "--user=root")
    assert cluster.quiet(30)


def test_jobs_at_their_limit(limited):
    """Slurm's clock, a minute at the least: one job heeds the warning, one is killed."""
    running, heeds, hangs = limited
    assert running.quiet(200), heeds.logs()
    # With what it has; on a busy machine the warning may come before the first repetition.
    assert re.search("stopped early, job|stopped near the time limit", heeds.jobs("status")[1])
    assert "TIMEOUT" not in heeds.jobs("status")[1]
    assert ": failed, job" in (out := hangs.jobs("status")[1]) and ": TIMEOUT" in out


def test_a_full_queue(tmp_path, monkeypatch, capsys, cluster):
    folder = tmp_path / "full"
    folder.mkdir()
    full = Cluster(folder, nodes=1, most_jobs=3).start()
    try:
        user = User(full, tmp_path, rows=("--table", "all", "--ranks", "8"))
        user.site.write_text(user.site.read_text().replace("ranks = 2\ngpus = 2", "ranks = 8")
                             .replace('gpu_binding = "task"', ""))
        for name, value in full.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(slurm, "LIMIT", 6)
        full.command("scontrol", "update", "PartitionName=all", "State=DOWN")
        assert main(user.argv("submit")) == 1
        said = capsys.readouterr()
        assert len(re.findall(r"^job \S+: ", said.out, re.M)) == 2
        assert "error: the queue took 2 of 4 rows: sbatch did not end within 6 seconds" in said.err
        assert "temporarily unable to accept job" in said.err
        assert main(user.argv("status")) == 0
        out = capsys.readouterr().out
        assert out.count(": waiting, job ") == 2 and out.count(": not submitted") == 2
    finally:
        full.stop()


@pytest.mark.parametrize("site, nodes, cpus, gpus, partition", [
    ("cpu", 4, 64, 0, "compute"), ("gpu4", 16, 32, 4, "v100"), ("gpu8", 8, 64, 8, "gpu"),
    ("local", 4, 16, 4, "all")])
def test_slurm_takes_the_scripts_of_each_site(tmp_path, site, nodes, cpus, gpus, partition):
    if slurm_cluster.missing():
        pytest.skip(slurm_cluster.missing())
    folder = tmp_path / "slurm"
    folder.mkdir()
    cluster = Cluster(folder, nodes, cpus, gpus, partition).start()
    try:
        done = cluster.command(sys.executable, "-m", "jobs", "submit", "--test-only", "--site",
                               site, "--out", str(tmp_path / "out"), cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        assert len(lines) == 19 and all(f"in partition {partition}" in line for line in lines)
        for line in lines[:-1]:
            ranks = int(re.match(r"\w+-\w+-p(\d+)-paper.sh: ", line)[1])
            assert int(re.search(r"using (\d+) processors", line)[1]) >= ranks
        # A cluster without them refuses, and its words are passed on.
        cluster.command("scontrol", "update", f"PartitionName={partition}", "MaxNodes=1")
        done = cluster.command(sys.executable, "-m", "jobs", "submit", "--test-only", "--site",
                               site, "--scheme", "3d", "--ranks", "64", "--table", "weak",
                               "--out", str(tmp_path / "out"), cwd=ROOT)
        assert done.returncode == 1 and "weak-3d-p064-paper.sh: refused: " in done.stdout
    finally:
        cluster.stop()


@pytest.mark.skipif("MM3D_SLURM_TABLE" not in os.environ, reason=(
    "takes many minutes on a few cores: set MM3D_SLURM_TABLE to weak, strong or all"))
@pytest.mark.limit(7200)
@pytest.mark.parametrize("ranks, nodes, slots", [
    # Between nodes that are none MPI waits longer, so the wide rows have one that is wide enough.
    ("8,16", 4, 4), ("36,64", 1, 64)])
def test_every_row_of_a_table(tmp_path, ranks, nodes, slots):
    """8 to 64 tasks, all schemes, as under mpirun."""
    if slurm_cluster.missing():
        pytest.skip(slurm_cluster.missing())
    table = os.environ["MM3D_SLURM_TABLE"]
    folder = tmp_path / "slurm"
    folder.mkdir()
    wide = Cluster(folder, nodes, cpus=slots, gpus=0).start()
    try:
        user = User(wide, tmp_path, rows=("--table", table, "--ranks", ranks), hours="2:00:00",
                    options='"--repetitions=1", "--max-repetitions=1"')
        user.site.write_text(user.site.read_text().replace(
            "ranks = 2\ngpus = 2", f"ranks = {slots}").replace('gpu_binding = "task"', ""))
        jobs = user.submit()
        assert wide.quiet(7000), user.logs()
    finally:
        wide.stop()
    runs = user.runs()
    for run in runs:
        check_run(run)
    expected = sorted((row.table, row.scheme, row.gpus) for row in select(table)
                      if str(row.gpus) in ranks.split(","))
    assert len(jobs) == len(expected) and expected == sorted(
        (run.configuration["table"], run.configuration["scheme"], run.ranks)
        for run in runs), user.logs()
