"""Jobs under a real Slurm whose time is nearly over: rows are kept, and trainings go on."""
import re
import sys

import pytest

from slurm_user import ENDLESS, ON_SLURM, User, check_run
from support import ROOT

pytestmark = ON_SLURM


@pytest.fixture(scope="module")
def limited(cluster, tmp_path_factory):
    """Jobs of a minute, the least that Slurm knows, which end while other tests go on."""
    heeding, hanging = (tmp_path_factory.mktemp(name) for name in ("heeds", "hangs"))
    python = hanging / "python"
    python.write_text("#!/bin/bash\ntrap '' TERM USR1\nsleep 100 & wait; wait; wait\n")
    python.chmod(0o755)
    # Warned early, it leaves the cores to the others.
    heeds = User(cluster, heeding, options=ENDLESS, time="0:01:00", warning=29, gpus=0)
    hangs = User(cluster, hanging, python=python, time="0:01:00", gpus=0)
    for user in (heeds, hangs):
        user.submit()
        cluster.command("scancel", user.submitted[-1])    # nothing to collect
    return heeds, hangs


@pytest.mark.usefixtures("limited")    # so that its minute begins now
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
