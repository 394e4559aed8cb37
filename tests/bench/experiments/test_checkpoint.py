"""``bench checkpoint`` verifies, measures in turns, and writes a record that can be checked."""
import errno
import fcntl
import os
import zlib

import numpy as np
import pytest
from mpi4py import MPI

from bench.errors import UsageError, WrongResult
from bench.experiments import checkpoint
from bench.experiments.checkpoint import SavedModel
from bench.instruments.timing import Limits
from mm3d import ModelSizes
from records import only_record
from refused import done

SMALL = ("--layers", "1", "--hidden", "8", "--heads", "2", "--repetitions", "2",
         "--max-repetitions", "2")


def test_checkpoints_are_measured_beside_the_disk(tmp_path):
    said = done(MPI.COMM_SELF, "measure", "checkpoint", *SMALL, "--out", str(tmp_path))
    run = only_record(tmp_path)
    assert run.kind == "checkpoint" and [check.passed for check in run.checks] == [True]
    assert run.variables["samples"].values.shape == (4, 2)
    assert run.variables["bytes"].values == 3 * 4 * (12 * 64 + 13 * 8)
    assert "restore" in said
    assert not list(tmp_path.glob("checkpoint-files*"))


def measure(comm, folder, subject=SavedModel, repetitions=1):
    """Measure a small model, in the way of `subject`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "SavedModel", subject)
        return checkpoint.measure_checkpoint(comm, folder, ModelSizes(1, 8, 2, comm.size, 1),
                                             "float32", Limits(repetitions, repetitions, 1.0))


class Off(SavedModel):
    """Restores parameters that are off by one."""

    def restore(self):
        super().restore()
        for trained in self.model.trained:
            trained.master += 1


class Turned(SavedModel):
    """Restores moments in the reverse order."""

    def restore(self):
        super().restore()
        for moments in self.optimizer.state.values():
            for a in moments:
                a[...] = np.flip(a).copy()


@pytest.mark.parametrize("subject, count", [(Off, 1), (Turned, 2)])
def test_a_wrong_checkpoint_is_not_timed(tmp_path, subject, count):
    """Moments are at first all zero: numbers that are equal could be exchanged unseen."""
    with pytest.raises(WrongResult, match=f"^{count * (12 * 64 + 13 * 8)} elements of parameters "
                                          "and moments that differ"):
        measure(MPI.COMM_SELF, tmp_path, subject)
    assert not os.listdir(tmp_path)


def test_a_save_has_nothing_to_remove_and_the_disk_nothing_to_compress(tmp_path):
    there = []

    class Watched(SavedModel):
        def save(self):
            there.append(len(list(self.checkpoints.glob("step-*"))))
            super().save()

        def read_plain(self):
            assert len(zlib.compress(self.plain.read_bytes())) > self.own
    measure(MPI.COMM_SELF, tmp_path, Watched, 2)
    assert there == [0, 0, 0]    # verified, and timed twice


def test_files_of_others_are_neither_read_nor_removed(tmp_path):
    """But for those of a killed run; one whose lock is held measures there, too."""
    for name in ("killed", "running"):
        (tmp_path / f"checkpoint-files-{name}" / "saved" / "step-00000099").mkdir(parents=True)
        lock = open(tmp_path / f"checkpoint-files-{name}" / "lock", "wb")
        fcntl.flock(lock, fcntl.LOCK_EX)    # that of "killed" is closed at the next
    found = measure(MPI.COMM_SELF, tmp_path)
    assert found.variables["samples"].values.shape == (4, 1)
    assert os.listdir(tmp_path) == ["checkpoint-files-running"]
    lock.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--disk .*file"):
        measure(MPI.COMM_SELF, tmp_path / "file")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["write_plain", "drop_from_cache"])
def test_a_disk_that_fails_on_one_rank_is_said_by_all(comm, shared_tmp_path, name):
    def fail(subject):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(subject.plain))
    subject = type("Failing", (SavedModel,), {name: fail} if comm.rank == 1 else {})
    with pytest.raises(UsageError, match="--disk .*Input/output error: .*plain-1"):
        measure(comm, shared_tmp_path, subject)
    comm.Barrier()
    assert not os.listdir(shared_tmp_path)
