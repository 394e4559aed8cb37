"""``bench checkpoint`` verifies, measures in turns, and writes a record that can be checked."""
import os

import pytest

from bench.records import run_file
from mm3d.checkpoints import restoring
from support import run_python

SMALL = ("--layers", "1", "--hidden", "8", "--heads", "2", "--repetitions", "2",
         "--max-repetitions", "2")


def test_checkpoints_are_measured_beside_the_disk(tmp_path):
    done = run_python("-m", "bench", "checkpoint", *SMALL, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    path, = tmp_path.glob("*.h5")
    run = run_file.read_run(path)
    assert run.kind == "checkpoint" and [check.passed for check in run.checks] == [True]
    assert run.variables["samples"].values.shape == (4, 2)
    assert run.variables["bytes"].values == 3 * 4 * (12 * 64 + 13 * 8)
    assert "restore" in done.stdout and not (tmp_path / "checkpoint-files").exists()
    checked = run_python("-m", "bench", "validate", str(path))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_wrong_checkpoint_is_not_timed(tmp_path, monkeypatch):
    from bench.errors import WrongResult
    from bench.experiments.checkpoint import measure_checkpoint
    from bench.instruments.timing import Limits
    from mm3d import ModelSizes
    from mpi4py import MPI
    read = restoring._read
    monkeypatch.setattr(restoring, "_read", lambda *given: read(*given) + 1)
    with pytest.raises(WrongResult, match="elements of parameters and moments that differ"):
        measure_checkpoint(MPI.COMM_SELF, tmp_path, ModelSizes(1, 8, 2, 1, 1), "float32",
                           Limits(1, 1, 1.0))
    assert not os.listdir(tmp_path)
