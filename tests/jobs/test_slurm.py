"""The jobs under a real Slurm: four nodes with four GPUs each, which are one machine's."""
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from mpi4py import MPI

import slurm_cluster
from bench.cases.case import make_case
from bench.cases.selection import select_rows
from bench.reports.paper_tables import words_agree
from jobs import slurm
from jobs.__main__ import main
from slurm_cluster import Cluster
from slurm_user import ENDLESS, PATIENCE, User
from support import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.limit(800), pytest.mark.skipif(
    MPI.COMM_WORLD.size > 1, reason="Slurm starts its own ranks: run without mpirun")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    lacking = slurm_cluster.missing()
    if lacking:
        pytest.skip(lacking)
    running = Cluster(tmp_path_factory.mktemp("slurm")).start()
    yield running
    running.stop()
    assert all(daemon.poll() is not None for daemon in running.daemons)


@pytest.fixture(scope="module")
def limited(cluster, tmp_path_factory):
    """Jobs of a minute, the least that Slurm knows, which end while other tests go on."""
    heeding, hanging = (tmp_path_factory.mktemp(name) for name in ("heeds", "hangs"))
    python = hanging / "python"
    python.write_text("#!/bin/bash\ntrap '' TERM USR1\nsleep 100 & wait; wait; wait\n")
    python.chmod(0o755)
    # Warned early, it leaves the cores to the others.
    heeds = User(cluster, heeding, options=ENDLESS, time="0:01:00", warning=30, gpus=0)
    hangs = User(cluster, hanging, python=python, time="0:01:00", gpus=0)
    for user in (heeds, hangs):
        user.submit()
        cluster.command("scancel", user.submitted[-1])    # nothing to collect
    return heeds, hangs


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


@pytest.mark.usefixtures("limited")    # so that its minute begins now
def test_rows_from_submission_to_tables_and_only_what_is_missing(cluster, tmp_path):
    user = User(cluster, tmp_path, rows=("--table", "strong", "--ranks", "8"))
    assert "nothing is submitted" in user.jobs("render")[1]
    assert user.jobs("status")[1].count(": not submitted") == 2
    jobs = user.submit()
    assert len(jobs) == 2
    # Somebody who submits again while they are under way submits nothing.
    assert user.submit() == []
    assert user.quiet(), user.logs()
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
    assert user.quiet() and len(user.runs()) == 2, user.logs()


def test_two_who_submit_at_once(cluster, tmp_path):
    user = User(cluster, tmp_path, rows=("--table", "all", "--ranks", "8"))
    both = [subprocess.Popen([sys.executable, "-m", "jobs", *user.argv("submit")], cwd=ROOT,
                             env=cluster.environment(), stdout=subprocess.PIPE, text=True)
            for _ in range(2)]
    out = "".join(process.communicate(timeout=PATIENCE)[0] for process in both)
    user.submitted = re.findall(r"^job (\S+)(?:: | collects)", out, re.M)
    user.cancel()
    assert [process.returncode for process in both] == [0, 0]
    assert len(re.findall(r"^job \S+: ", out, re.M)) == 4 and "4 under way, 0 to submit" in out


def test_an_array_that_is_cancelled(cluster, tmp_path):
    user = User(cluster, tmp_path, options=ENDLESS, rows=("--table", "all", "--scheme", "3d,1d",
                                                          "--ranks", "8"))
    jobs = user.submit("--array")
    assert [job.partition("_")[2] for job in jobs] == ["0", "1", "2", "3"]
    assert len({job.partition("_")[0] for job in jobs}) == 1
    user.wait_for(user.measuring)
    cluster.command("scancel", jobs[0].partition("_")[0])
    assert user.quiet(), user.logs()
    status, out, _ = user.jobs("status")
    assert status == 0 and out.count("failed, job ") == 4 and out.count(": CANCELLED") == 4, out
    assert not user.measuring()
    # All of them are due again, and this time they may finish; one stands for all.
    user.write_site()
    user.rows = ("--table", "weak", "--scheme", "3d", "--ranks", "8")
    assert len(user.submit("--array")) == 1
    assert user.quiet(), user.logs()
    check_run(*user.runs())


def test_a_task_that_is_killed(cluster, tmp_path):
    user = User(cluster, tmp_path, options=ENDLESS)
    job, = user.submit()
    user.wait_for(lambda: len(user.measuring()) == 8)
    time.sleep(1)
    os.kill(user.measuring()[3], signal.SIGKILL)
    assert user.quiet(), user.logs()
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
    assert user.quiet(), user.logs()
    run, = user.runs()
    check_run(run)
    assert run.ended_by == "stopped" and len(run.samples["forward"]) >= 1, user.logs()
    assert "strong 3-D 8 ranks: stopped early, job" in user.jobs("status")[1]
    assert len(user.submit()) == 1    # such a row is due again
    user.cancel()


def test_a_training_whose_time_is_nearly_over_goes_on_in_its_next_job(cluster, tmp_path):
    """Three are submitted at once, and run one after the other; the last has nothing to do."""
    user = User(cluster, tmp_path, gpus=0)
    saved, steps = user.out / "train" / "whale", 800
    words = ("--", "--layers", "1", "--hidden", "8", "--heads", "2", "--batch", "4", "--seq", "8",
             "--steps", str(steps), "--scheme", "1d", "--data", "2", "--dropout", "0.1")

    def train(*more):
        done = cluster.command(
            sys.executable, "-m", "jobs", "train", "--site", str(user.site), "--out",
            str(user.out), "--ranks", "4", "--name", "whale", *more, *words, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        user.submitted += re.findall(r"^job (\d+)$", done.stdout, re.M)
        return done.stdout

    def losses():
        file = saved / "history.jsonl"
        return re.findall(r'"step": (\d+), "loss"', file.read_text()) if file.exists() else []
    assert "whale: no checkpoint yet" in train("--submit", "--jobs", "3")
    user.wait_for(lambda: len(losses()) > 3)
    cluster.command("scancel", "--signal=USR1", "--batch", user.submitted[0])
    assert user.quiet(), user.logs()
    ended = [(user.out / "jobs" / "runs" / "whale" / f"ended-{job}").read_text().strip()
             for job in user.submitted]
    assert ended == ["stopped near the time limit, status 0", "done", "done"], user.logs()
    assert "whale: complete; its last job: done" in train()
    assert losses() == [str(step) for step in range(steps)]    # each once, none lost
    assert "all steps are done" in user.logs() and "STOPPED EARLY (stop_file)" in user.logs()


def test_jobs_at_their_limit(limited):
    """Slurm's clock, a minute at the least: one job heeds the warning, one is killed."""
    heeds, hangs = limited
    assert heeds.quiet() and hangs.quiet(), heeds.logs() + hangs.logs()
    # With what it has; on a busy machine the warning may come before the first repetition.
    assert re.search("stopped early, job|stopped near the time limit", heeds.jobs("status")[1])
    assert "TIMEOUT" not in heeds.jobs("status")[1]
    assert ": failed, job" in (out := hangs.jobs("status")[1]) and ": TIMEOUT" in out


def test_a_full_queue(tmp_path, monkeypatch, capsys):
    if slurm_cluster.missing():
        pytest.skip(slurm_cluster.missing())
    folder = tmp_path / "full"
    folder.mkdir()
    full = Cluster(folder, nodes=1, most_jobs=3).start()
    try:
        user = User(full, tmp_path, ("--table", "all", "--ranks", "8"), ranks=8, gpus=0)
        for name, value in full.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(slurm, "LIMIT", 10)
        full.command("scontrol", "update", "PartitionName=all", "State=DOWN")
        assert main(user.argv("submit")) == 1
        said = capsys.readouterr()
        assert len(re.findall(r"^job \S+: ", said.out, re.M)) == 2
        assert "the queue took 2 of 4 rows: sbatch did not end within 10 seconds" in said.err
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
    "takes many minutes on a few cores: set MM3D_SLURM_TABLE to weak, strong or all, and give "
    "pytest -o faulthandler_timeout=7200"))
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
        user = User(wide, tmp_path, ("--table", table, "--ranks", ranks), time="2:00:00",
                    ranks=slots, gpus=0,
                    options='"--repetitions=1", "--max-repetitions=1", "--traced=0"')
        jobs = user.submit()
        assert wide.quiet(7000), user.logs()
    finally:
        wide.stop()
    runs = user.runs()
    for run in runs:
        check_run(run)
    expected = sorted((row.table, row.scheme, row.gpus) for row in select_rows(table)
                      if str(row.gpus) in ranks.split(","))
    assert len(jobs) == len(expected) and expected == sorted(
        (run.configuration["table"], run.configuration["scheme"], run.ranks)
        for run in runs), user.logs()
