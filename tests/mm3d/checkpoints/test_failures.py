"""Whatever goes wrong is one line on every rank, and the last complete checkpoint stays."""
import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from mm3d.checkpoints.folder import checkpoints
from mm3d.checkpoints.index_file import read_index
from checkpoint_models import transformer


# --- Killed ----------------------------------------------------------------------------------

def test_what_is_there_at_any_moment_is_complete(tmp_path, monkeypatch):
    """A copy of the folder at each call of the system is what a kill there would leave.

    The newest checkpoint of each is whole: that before, until the new one has its name.
    """
    folder, copies, calls = tmp_path / "run", [], []
    model = transformer(MPI.COMM_SELF)

    def fill(step):
        for t in model.trained:
            t.master[...] = step

    def watch(owner, name):
        original = getattr(owner, name)

        def call(*given, **options):
            calls.append(name)
            if calls.count(name) % 5 == 1:
                copies.append(shutil.copytree(folder, tmp_path / f"copy{len(copies)}"))
            return original(*given, **options)
        monkeypatch.setattr(owner, name, call)

    for step in (1, 2):
        fill(step)
        mm3d.save(folder, model, step=step, keep=2)
    with monkeypatch.context() as monkeypatch:
        for name in ("pwrite", "fsync", "open", "rename", "unlink"):
            watch(os, name)
        fill(3)
        mm3d.save(folder, model, step=3, keep=2)
    found = []
    for copy in copies:
        other = transformer(MPI.COMM_SELF, seed=1)
        found.append(mm3d.restore(copy, other).step)
        assert all((t.master == found[-1]).all() for t in other.trained)
        fill(4)
        mm3d.save(copy, model, step=4, keep=2)     # what was left unfinished is no obstacle
        assert [p.name for p in sorted(copy.iterdir())] == [
            f"step-{found[-1] if found[-1] == 3 else 2:08d}", "step-00000004"]
    assert found == sorted(found) and {2, 3} == set(found) and len(found) > 5
    monkeypatch.undo()


# --- Errors ----------------------------------------------------------------------------------

def lines(comm, act, kind=OSError) -> str:
    """The one line that all ranks raise."""
    with pytest.raises(kind) as caught:
        act()
    text = comm.allgather(str(caught.value))
    assert len(set(text)) == 1 and "\n" not in text[0]
    return text[0]


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("place, error, words", [
    ("saving.index_bytes", TypeError("no such type"), "TypeError: no such type"),
    ("folder.checkpoints", PermissionError(errno.EACCES, "Permission denied"), "cannot be read")])
def test_what_fails_on_rank_0_is_one_line_on_all(comm, shared_tmp_path, monkeypatch, place, error,
                                                 words):
    """Whatever kind of error it is: the other ranks wait for rank 0."""
    model = transformer(comm)

    def fail(*given):
        raise error
    monkeypatch.setattr(f"mm3d.checkpoints.{place}", fail)
    act = mm3d.save if place.startswith("saving") else mm3d.restore
    assert words in lines(comm, lambda: act(shared_tmp_path, model))


def damage(path: Path, how: str, byte: int) -> None:
    """Damage a file, at `byte` or from there on."""
    if how == "missing":
        path.unlink()
    elif how == "torn":
        os.truncate(path, byte)
    else:
        data = bytearray(path.read_bytes())
        data[byte] ^= 4
        path.write_bytes(data)


@pytest.mark.ranks(1, 4)
def test_a_damaged_checkpoint_changes_nothing(comm, shared_tmp_path):
    before = transformer(comm)
    for step in (1, 2):
        mm3d.save(shared_tmp_path, before, step=step)
    path = shared_tmp_path / "step-00000002"
    last, index = f"blocks-{comm.size - 1:05d}.h5", read_index(path)
    byte = {last: next(b.offset for b in index.blocks if b.file == last) + 9,
            "index.h5": (path / "index.h5").read_bytes().find(b"checksums") + 20}
    for name, how, words in (
            (last, "flipped", "checksum"), (last, "torn", "too short"),
            (last, "missing", "No such file"), ("index.h5", "flipped", "damaged"),
            ("index.h5", "torn", "damaged"), ("index.h5", "missing", "missing")):
        kept = comm.bcast((path / name).read_bytes() if comm.rank == 0 else None)
        comm.Barrier()
        if comm.rank == 0:
            damage(path / name, how, byte[name])
        comm.Barrier()
        model = transformer(comm, seed=1)
        state = model.state()
        line = lines(comm, lambda: mm3d.restore(shared_tmp_path, model))
        assert words in line and name in line and str(path) in line, line
        assert name == "index.h5" or "step=1 is there too" in line
        assert all(np.array_equal(a, state[key]) for key, a in model.state().items())
        assert mm3d.restore(shared_tmp_path, model, step=1).step == 1
        comm.Barrier()
        if comm.rank == 0:
            (path / name).write_bytes(kept)


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("options, words", [
    (dict(layers=2), "parameters/layers.1.ln1.weight is missing"),
    (dict(hidden=8), "has the shape"), (dict(dtype="float64"), "is in float32, not float64")])
def test_another_model_is_named(comm, shared_tmp_path, options, words):
    mm3d.save(shared_tmp_path, transformer(comm), step=1)
    other = transformer(comm, **options)
    line = lines(comm, lambda: mm3d.restore(shared_tmp_path, other), ValueError)
    assert "another model" in line and words in line, line


def test_a_model_of_fewer_layers_another_optimizer_and_no_checkpoint(tmp_path):
    comm, model = MPI.COMM_SELF, transformer(MPI.COMM_SELF, layers=2)
    assert "none yet" in lines(comm, lambda: mm3d.restore(tmp_path, model), FileNotFoundError)
    mm3d.save(tmp_path, model, mm3d.SGD(model, 1.0), step=1)
    for act, words in (
            (lambda: mm3d.restore(tmp_path, transformer(comm)), "not in the model"),
            (lambda: mm3d.restore(tmp_path, model, mm3d.AdamW(model, 1)), "SGD, not AdamW")):
        assert words in lines(comm, act, ValueError)
    other = mm3d.SGD(transformer(comm, layers=2), 1.0)
    for act in (lambda: mm3d.save(tmp_path, model, other), lambda: mm3d.restore(
            tmp_path, model, other)):
        assert "this SGD changes the parameters of another model" in lines(comm, act, ValueError)
    assert "steps 1 are" in lines(comm, lambda: mm3d.restore(tmp_path, model, step=7),
                                  FileNotFoundError)


def test_the_newest_are_kept_and_a_step_may_come_twice(tmp_path):
    model = transformer(MPI.COMM_SELF)
    for step in (8, 9, 9, 10, 100000000):
        model.trained[0].master[...] = step
        mm3d.save(tmp_path, model, step=step, keep=3)
    assert [p.name for p in checkpoints(tmp_path)] == [
        "step-00000009", "step-00000009.1", "step-00000010", "step-100000000"]
    mm3d.save(tmp_path, model, step=5, keep=1)     # what was written last is never removed
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000005", "step-100000000"]
