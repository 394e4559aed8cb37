"""``bench checkpoint`` verifies, measures in turns, and writes a record that can be checked."""
import errno
import os
import zlib

import numpy as np
import pytest
from mpi4py import MPI

from bench.errors import UsageError, WrongResult
from bench.experiments import checkpoint
from bench.instruments.timing import Limits
from bench.records import run_file
from mm3d import ModelSizes
from mm3d.checkpoints import restoring
from support import run_python

SMALL = ("--layers", "1", "--hidden", "8", "--heads", "2", "--repetitions", "2",
         "--max-repetitions", "2")


def test_checkpoints_are_measured_beside_the_disk(tmp_path):
    done = run_python("-m", "bench", "measure", "checkpoint", *SMALL, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    path, = tmp_path.glob("*.h5")
    run = run_file.read_run(path)
    assert run.kind == "checkpoint" and [check.passed for check in run.checks] == [True]
    assert run.variables["samples"].values.shape == (4, 2)
    assert run.variables["bytes"].values == 3 * 4 * (12 * 64 + 13 * 8)
    assert "restore" in done.stdout and not list(tmp_path.glob("checkpoint-files*"))
    checked = run_python("-m", "bench", "validate", str(path))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def measure(comm, folder, repetitions=1):
    """Measure a small model."""
    return checkpoint.measure_checkpoint(comm, folder, ModelSizes(1, 8, 2, comm.size, 1),
                                         "float32", Limits(repetitions, repetitions, 1.0))


def test_a_wrong_checkpoint_is_not_timed(tmp_path, monkeypatch):
    read = restoring._read
    monkeypatch.setattr(restoring, "_read", lambda *given: read(*given) + 1)
    with pytest.raises(WrongResult, match="elements of parameters and moments that differ"):
        measure(MPI.COMM_SELF, tmp_path)
    assert not os.listdir(tmp_path)


def test_elements_in_the_wrong_place_are_seen(tmp_path, monkeypatch):
    """Moments are at first all zero: numbers that are equal could be exchanged unseen."""
    read = restoring._read

    def turned(path, stored, blocks):
        found = read(path, stored, blocks)
        return np.flip(found).copy() if stored.path.startswith("optimizer/") else found
    monkeypatch.setattr(restoring, "_read", turned)
    with pytest.raises(WrongResult, match=f"^{2 * (12 * 64 + 13 * 8)} elements"):
        measure(MPI.COMM_SELF, tmp_path)


def test_a_save_has_nothing_to_remove_and_the_disk_nothing_to_compress(tmp_path, monkeypatch):
    there = []

    def save(subject, save=checkpoint._Subject.save):
        there.append(len(list(subject.checkpoints.glob("step-*"))))
        save(subject)

    def read(subject):
        assert len(zlib.compress(subject.plain.read_bytes())) > subject.own
    monkeypatch.setattr(checkpoint._Subject, "save", save)
    monkeypatch.setattr(checkpoint._Subject, "read_plain", read)
    measure(MPI.COMM_SELF, tmp_path, 2)
    assert there == [0, 0, 0]    # verified, and timed twice


def test_files_of_others_are_neither_read_nor_removed(tmp_path):
    """A killed run has left a checkpoint of a later step, where the next run measures."""
    left = tmp_path / "checkpoint-files" / "saved" / "step-00000099"
    left.mkdir(parents=True)
    found = measure(MPI.COMM_SELF, tmp_path)
    assert found.variables["samples"].values.shape == (4, 1)
    assert left.is_dir() and os.listdir(tmp_path) == ["checkpoint-files"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--disk .*file"):
        measure(MPI.COMM_SELF, tmp_path / "file")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["write_plain", "drop_from_cache"])
def test_a_disk_that_fails_on_one_rank_is_said_by_all(comm, shared_tmp_path, monkeypatch, name):
    def fail(subject):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(subject.plain))
    if comm.rank == 1:
        monkeypatch.setattr(checkpoint._Subject, name, fail)
    with pytest.raises(UsageError, match="--disk .*Input/output error: .*plain-1"):
        measure(comm, shared_tmp_path)
    comm.Barrier()
    assert not os.listdir(shared_tmp_path)
