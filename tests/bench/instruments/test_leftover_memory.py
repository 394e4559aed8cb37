"""Shared memory that killed jobs leave is told from what is in use, and from what others own."""
import mmap
import os
import subprocess
import sys

import pytest

from bench.doctor import checks
from bench.doctor.child_jobs import Facts
from bench.instruments import leftover_memory


def segment(folder, name, size=4096):
    path = folder / name
    path.write_bytes(bytes(size))
    return path


def names(found):
    return [one.path.name for one in found]


def test_only_what_nobody_has_open(tmp_path):
    """Neither a file that is open, nor one that is mapped and closed, here or in a child."""
    for name in ("mpich_shm_1_0", "mpich_shm_2_0", "mpich_shm_a3_0", "mpich_shm_4_0"):
        segment(tmp_path, name)
    held = open(tmp_path / "mpich_shm_1_0")
    with open(tmp_path / "mpich_shm_2_0", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    child = subprocess.Popen([sys.executable, "-c", (
        "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); f.close();"
        "print('mapped', flush=True); sys.stdin.read()"), str(tmp_path / "mpich_shm_a3_0")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "mapped\n"
        assert names(leftover_memory.abandoned_segments(tmp_path)) == ["mpich_shm_4_0"]
    finally:
        child.communicate("")
    held.close()
    assert len(leftover_memory.abandoned_segments(tmp_path)) == 3    # the child has ended, too
    mapped.close()
    assert len(leftover_memory.abandoned_segments(tmp_path)) == 4


def test_only_names_that_mpich_gives(tmp_path):
    for name in ("mpich_shm_1f_0", "mpich_shar_tmpAbC123", "mpich_shm_notes", "psm_shm.1",
                 "sem.mine", "mpich_shm_1f_0.bak"):
        segment(tmp_path, name)
    (tmp_path / "mpich_shm_2_0").mkdir()
    (tmp_path / "mpich_shm_3_0").symlink_to("sem.mine")
    assert names(leftover_memory.abandoned_segments(tmp_path)) == [
        "mpich_shar_tmpAbC123", "mpich_shm_1f_0"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_only_those_of_this_user(tmp_path):
    os.chown(segment(tmp_path, "mpich_shm_1_0"), 65534, 65534)
    assert leftover_memory.abandoned_segments(tmp_path) == []


def test_nothing_is_known_where_a_process_of_this_user_is_hidden(tmp_path, monkeypatch):
    def hidden(folder):
        if folder.parent.name == str(os.getpid()):
            raise PermissionError
        return []

    segment(tmp_path, "mpich_shm_1_0")
    assert len(leftover_memory.abandoned_segments(tmp_path)) == 1
    monkeypatch.setattr(os, "listdir", hidden)
    assert leftover_memory.abandoned_segments(tmp_path) == []


def test_what_is_taken_into_use_meanwhile_stays(tmp_path):
    for name in ("mpich_shm_1_0", "mpich_shm_2_0"):
        segment(tmp_path, name)
    found = leftover_memory.abandoned_segments(tmp_path)
    with open(tmp_path / "mpich_shm_1_0"):
        assert names(leftover_memory.remove_segments(found)) == ["mpich_shm_2_0"]
    assert names(leftover_memory.abandoned_segments(tmp_path)) == ["mpich_shm_1_0"]


def test_the_doctor_says_how_much_and_removes_it_when_told(tmp_path):
    for number in range(3):
        segment(tmp_path, f"mpich_shm_{number}_0", 8_000_000)
    said = checks.leftovers(Facts(1, ["none"]), tmp_path)
    assert said.state == "warning" and said.text.startswith(
        f"3 segments of shared memory, 24 MB in {tmp_path}, left by jobs that were killed")
    assert "doctor --clean" in said.text and len(list(tmp_path.iterdir())) == 3
    said = checks.leftovers(Facts(1, ["none"], clean=True), tmp_path)
    assert said.state == "ok" and said.text == "removed: 3 segments of shared memory, 24 MB"
    assert list(tmp_path.iterdir()) == []
    assert checks.leftovers(Facts(1, ["none"]), tmp_path).state == "ok"
