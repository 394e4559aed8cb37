"""Whatever goes wrong is one line on every rank, and the last complete checkpoint stays."""
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from mm3d.checkpoints.folder import checkpoints
from mm3d.checkpoints.index_file import read_index
from checkpoint_models import transformer
from support import LIMIT, clean_environment, run_ranks

# Saves for ever: in step n all elements are n.
ENDLESS = """
import sys, mm3d
from mpi4py import MPI
comm, (folder, hidden) = MPI.COMM_WORLD, sys.argv[1:]
scheme = mm3d.scheme("1d", comm, grid=(comm.size,))
model = mm3d.Transformer(scheme, layers=1, hidden=int(hidden), heads=2, batch=2, seq=2)
optimizer = mm3d.SGD(model, 0.1, momentum=0.5)
try:
    step = mm3d.restore(folder, model, optimizer).step
except FileNotFoundError:
    step = 0
while True:
    step += 1
    for index, t in enumerate(model.trained):
        t.master[...] = optimizer.state["momentum"][index][...] = step
    mm3d.save(folder, model, optimizer, step=step, keep=2)
    if comm.rank == 0:
        print(step, flush=True)
"""


def is_complete(folder: Path, hidden: int) -> int:
    """The step of the newest checkpoint, whose elements are all that step; 0 without one."""
    scheme = mm3d.scheme("serial", MPI.COMM_SELF)
    model = mm3d.Transformer(scheme, layers=1, hidden=hidden, heads=2, batch=2, seq=2)
    optimizer = mm3d.SGD(model, 0.1, momentum=0.5)
    if not checkpoints(folder):
        return 0
    step = mm3d.restore(folder, model, optimizer).step
    for index, t in enumerate(model.trained):
        assert (t.master == step).all() and (optimizer.state["momentum"][index] == step).all()
    return step


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


def kill_one(folder: Path, ranks: int, hidden: int, seconds: float) -> None:
    """Start a job that saves for ever, and kill all of it after its first checkpoint."""
    script = folder.with_suffix(".py")
    script.write_text(ENDLESS)
    argv = [sys.executable, str(script), str(folder), str(hidden)]
    command = mm3d.launcher.mpirun_command(ranks, *argv) if ranks > 1 else argv
    job = subprocess.Popen(command, stdout=subprocess.PIPE, env=clean_environment(),
                           start_new_session=True)
    try:
        assert job.stdout.readline()
        time.sleep(seconds)
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        job.stdout.close()


@pytest.mark.parametrize("ranks, kills, hidden", [
    (1, 2, 64), *(pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.limit(600)])
                  for case in ((1, 30, 256), (2, 20, 64)))])
def test_a_job_that_is_killed_goes_on_from_its_last_checkpoint(tmp_path, ranks, kills, hidden):
    random, last = np.random.default_rng(time.time_ns()), 0
    for _ in range(kills):
        kill_one(tmp_path / "run", ranks, hidden, random.uniform(0, 0.2))
        step = is_complete(tmp_path / "run", hidden)
        assert step > last and len(checkpoints(tmp_path / "run")) <= 3
        last = step


# --- Errors ----------------------------------------------------------------------------------

def lines(comm, act, kind=OSError) -> str:
    """The one line that all ranks raise."""
    with pytest.raises(kind) as caught:
        act()
    text = comm.allgather(str(caught.value))
    assert len(set(text)) == 1 and "\n" not in text[0]
    return text[0]


@pytest.mark.ranks(1, 4)
def test_a_full_disk_leaves_the_checkpoints_before(comm, shared_tmp_path, monkeypatch):
    """On the last rank alone, where ranks are several."""
    model = transformer(comm)
    mm3d.save(shared_tmp_path, model, step=1)

    def full(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(os, "pwrite", full)
    line = lines(comm, lambda: mm3d.save(shared_tmp_path, model, step=2))
    assert "step 2" in line and f"No space left on device (rank {comm.size - 1}" in line
    monkeypatch.undo()
    if comm.rank == 0:
        monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in lines(comm, lambda: mm3d.save(shared_tmp_path, model, step=2))
    monkeypatch.undo()
    comm.Barrier()
    assert os.listdir(shared_tmp_path) == ["step-00000001"]
    assert mm3d.restore(shared_tmp_path, model).step == 1


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


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_job(tmp_path):
    """Within the time of the guard; the checkpoint before it stays."""
    script = tmp_path / "job.py"
    script.write_text(ENDLESS.replace("    if comm.rank == 0:", """\
    if comm.rank == 1 and step == 3:
        import os
        os.kill(os.getpid(), 9)
    if comm.rank == 0:"""))
    done = run_ranks(2, str(script), str(tmp_path / "run"), "64", timeout=min(60, LIMIT))
    assert done.returncode and is_complete(tmp_path / "run", 64) >= 3
