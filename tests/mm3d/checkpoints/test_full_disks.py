"""A save on a disk that is full, at any size and any call, says so and leaves what was there."""
import errno
import os
import sys

import pytest

import mm3d
from checkpoint_models import Calls, transformer
from support import run_command, run_ranks

# Saves with every number of free pages and then of free files, up to one at which a save fits.
SWEEP = """
import os, sys
from pathlib import Path
import mm3d
from mpi4py import MPI

comm, disk = MPI.COMM_WORLD, Path(sys.argv[1])
mesh = mm3d.Mesh(comm, 1, "1d", (comm.size,))
model = mm3d.GPT(mesh, layers=1, hidden=8, heads=4, vocab=5, batch=4, seq=2)
optimizer = mm3d.AdamW(model, 0.1)

def on_root(act, *given):
    comm.Barrier()
    if comm.rank == 0:
        act(*given)
    comm.Barrier()

def leave_bytes(left):
    free = os.statvfs(disk)
    (disk / "filling").write_bytes(bytes(max(0, free.f_bavail * free.f_bsize - left)))

def leave_files(left):
    for number in range(os.statvfs(disk).f_favail - left):
        (disk / f"empty-{number}").touch()

def clean():
    for path in [*disk.glob("filling"), *disk.glob("empty-*"), *disk.glob("run/step-*/*")]:
        path.unlink()
    for path in [*disk.glob("run/step-*"), *disk.glob("run")]:
        path.rmdir()

for leave, unit in ((leave_bytes, 4096), (leave_files, 1)):
    failed = 0
    for left in range(0, 60 * unit, unit):
        on_root(leave, left)
        try:
            mm3d.save(disk / "run", model, optimizer, step=1)
        except OSError as error:
            failed += 1
            assert "No space left on device" in str(error) and "step 1" in str(error), error
            if comm.rank == 0 and (disk / "run").exists():
                assert os.listdir(disk / "run") == []
        else:
            on_root(clean)
            break
        on_root(clean)
    if comm.rank == 0:
        print("failed", failed, "then saved", flush=True)
    assert 2 <= failed < 59
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a disk")
@pytest.mark.limit(300)
@pytest.mark.parametrize("ranks", [
    2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_every_size_of_a_disk_and_every_number_of_files(tmp_path, ranks):
    """In a process of its own: HDF5 on a full disk ends in a segmentation fault."""
    disk, script = tmp_path / "disk", tmp_path / "sweep.py"
    disk.mkdir()
    script.write_text(SWEEP)
    if run_command(["mount", "-t", "tmpfs", "-o", "size=400k,nr_inodes=90", "none",
                    str(disk)]).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        if ranks == 1:
            done = run_command([sys.executable, str(script), str(disk)])
        else:
            done = run_ranks(ranks, str(script), str(disk))
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("then saved") == 2
    finally:
        run_command(["umount", str(disk)])


@pytest.mark.limit(300)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, *(
    pytest.param(n, marks=pytest.mark.slow) for n in (errno.EIO, errno.EDQUOT))])
def test_an_error_of_any_call_of_the_system(tmp_path, monkeypatch, number):
    """One call after another fails: a save says so and the one before is the newest, or it is
    whole; the next save removes what is left."""
    model = transformer()
    model.trained = model.trained[:2]    # a hundred saves are enough to wait for
    newest, outcomes = 0, []

    def fail():
        raise OSError(number, os.strerror(number))
    mm3d.save(tmp_path, model, step=0)
    for failing in range(1, 200):
        model.trained[0].master[...] = failing
        with monkeypatch.context() as patch:
            calls = Calls(patch, failing, fail)
            try:
                mm3d.save(tmp_path, model, step=failing, keep=1)
            except OSError as error:
                line = str(error)
                assert os.strerror(number) in line and "\n" not in line
            else:
                line = ""
        if not line or "is written" in line:
            newest = failing
        outcomes.append(bool(line))
        assert mm3d.restore(tmp_path, model).step == newest
        assert (model.trained[0].master == newest).all()
        if calls.count < failing:
            break
    assert not line and True in outcomes and outcomes.count(False) > 1
    assert os.listdir(tmp_path) == [f"step-{newest:08d}"]
