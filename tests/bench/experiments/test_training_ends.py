"""A training that is killed goes on to the bit, and one rank that fails ends it at once."""
import re
import time

import pytest

from mm3d.checkpoints.folder import checkpoints, step_of
from support import ROOT, run_ranks
from training_kills import OPTIONS, train_and_kill

# Rank 1 fails in its sixth step, after the checkpoint of step 3.
FAILS = """
import os, sys, time
from bench.__main__ import command
from bench.experiments.training.trainer import TrainingRun
right = TrainingRun.batch

def batch(training, number):
    if number == 5 and training.comm.rank == 1:
        print("fails at", time.time(), file=sys.stderr, flush=True)
        {how}
    return right(training, number)
TrainingRun.batch = batch
command()
"""


@pytest.mark.slow
@pytest.mark.limit(900)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_resumption_after_a_kill_is_on_the_curve(tmp_path, ranks):
    assert train_and_kill(tmp_path, 4, ranks=ranks) > 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise RuntimeError('no more')", "sys.exit(3)", "os._exit(4)",
                                 "os.kill(os.getpid(), 9)"])
def test_a_rank_that_fails_ends_the_job_within_10_seconds(tmp_path, how):
    """The checkpoint before it stays, and the same command goes on from there."""
    program, saved = tmp_path / "program.py", tmp_path / "saved"
    program.write_text(FAILS.format(how=how))
    options = (*OPTIONS, "--checkpoints", str(saved), "--out", str(tmp_path / "out"))
    done = run_ranks(2, str(program), "train", *options, cwd=ROOT)
    end, begin = time.time(), re.search(r"fails at (\S+)", done.stderr)
    assert done.returncode and begin and end - float(begin[1]) < 10, done.stderr
    assert "killed: did not end" not in done.stderr
    assert [step_of(path) for path in checkpoints(saved)] == [3]
    if "kill" in how:    # all of them have left the same checkpoint
        done = run_ranks(2, "-m", "bench", "train", *options, "--steps", "60", cwd=ROOT)
        assert done.returncode == 0 and "step 60 of 60" in done.stdout, done.stderr
