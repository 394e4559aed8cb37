"""The jobs under a real Slurm: four nodes with four GPUs each, which are one machine's."""
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from bench.cases import combined
from bench.records import journal, run_file
from jobs.__main__ import main
from records import computed_step
from slurm_cluster import running
from slurm_user import ENDLESS, ON_SLURM, PATIENCE, User, check_run
from support import ROOT

pytestmark = ON_SLURM


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
    user.cancel()


def test_training_steps_on_meshes_that_have_no_result(cluster, tmp_path):
    """All but two are there already; these are predicted, verified and measured."""
    user = User(cluster, tmp_path, rows=("--table", "combined", "--ranks", "8"))
    cases = [replace(one, preset="tiny") for one in combined.list_cases() if one.ranks == 8]
    journal.check_folder(user.out)
    for number, one in enumerate(cases, start=1):
        if number not in (3, 6):
            run_file.write_run(computed_step(number), user.out, one.name)
    jobs = user.submit("--machine", "longhorn")
    assert len(jobs) == 2 and user.submit() == []
    assert user.quiet(), user.logs()
    log = user.logs()
    assert log.count("predicted before: ") == 2 and "11 of 11 rows done" in log, log
    new = [run for run in user.runs() if run.configuration["predicted_by"] == "longhorn"]
    assert sorted(run.configuration["mesh"] for run in new) == sorted(
        str(cases[number].config.division) for number in (2, 5))
    for run in new:
        assert run.environment["node_of_rank"] == "0 0 1 1 2 2 3 3"
        assert run.checks and all(check.passed for check in run.checks)
        assert run.values("predicted").sum() > 0 < run.values("samples").min()
    tables = (user.out / "tables.txt").read_text()
    assert "4 nodes; computed on numpy" in tables and "cannot tell: no machine given" in tables


def test_tasks_without_an_mpi_say_what_is_wrong_once(cluster):
    done = cluster.command("srun", "--mpi=none", "--nodes=2", "--ntasks-per-node=2",
                           sys.executable, "-m", "bench", "measure", "layer", cwd=ROOT)
    assert done.returncode == 2 and done.stderr.count("error: the launcher started 2 ranks") == 1


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


def test_a_full_queue(tmp_path, monkeypatch, capsys):
    with running(tmp_path / "full", nodes=1, most_jobs=3) as full:
        user = User(full, tmp_path, ("--table", "all", "--ranks", "8"), ranks=8, gpus=0)
        for name, value in full.environment().items():
            monkeypatch.setenv(name, value)
        full.command("scontrol", "update", "PartitionName=all", "State=DOWN")
        assert main(user.argv("submit")) == 1
        said = capsys.readouterr()
        assert len(re.findall(r"^job \S+: ", said.out, re.M)) == 2
        assert "the queue took 2 of 4 rows: sbatch did not end within 60 seconds" in said.err
        assert "temporarily unable to accept job" in said.err
        # Whatever else the user asks of squeue, who is not shown these jobs.
        monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
        monkeypatch.setenv("SQUEUE_FORMAT2", "UserName")
        assert full.command("squeue", "--noheader", SQUEUE_STATES="RUNNING").stdout == ""
        assert main(user.argv("status")) == 0
        out = capsys.readouterr().out
        assert out.count(": waiting, job ") == 2 and out.count(": not submitted") == 2


@pytest.mark.parametrize("site, nodes, cpus, gpus, partition", [
    ("cpu", 4, 64, 0, "compute"), ("gpu4", 16, 32, 4, "v100"), ("gpu8", 8, 64, 8, "gpu"),
    ("local", 4, 16, 4, "all")])
def test_slurm_takes_the_scripts_of_each_site(tmp_path, site, nodes, cpus, gpus, partition):
    with running(tmp_path / "slurm", nodes, cpus, gpus, partition) as cluster:
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
