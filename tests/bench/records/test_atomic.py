"""Files are there as a whole or not at all: full disks, killed writers, several writers."""

import errno
import os
import resource
import signal
import subprocess
import sys

import pytest

from bench.experiments.rows import resume
from bench.records import atomic

# Writes a file and says so when a part of it is on the disk, before the rest.
WRITER = """
import os, sys
from pathlib import Path
from bench.records import atomic
fsync = os.fsync
def pause(descriptor):
    print("part", flush=True)
    sys.stdin.read()
    fsync(descriptor)
os.fsync = pause
getattr(atomic, sys.argv[1])(Path(sys.argv[2]), b"new")
"""


@pytest.fixture
def writer(tmp_path):
    """Starts a writer that stops in the middle; it goes on when its input ends."""
    begun = []

    def start(call: str, name: str) -> subprocess.Popen:
        begun.append(subprocess.Popen(
            [sys.executable, "-c", WRITER, call, str(tmp_path / name)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True))
        assert begun[-1].stdout.readline() == "part\n"
        return begun[-1]

    yield start
    for one in begun:
        one.kill()
        one.communicate()


def names(folder) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_file_is_replaced_and_another_never(tmp_path):
    path = tmp_path / "a.toml"
    atomic.replace(path, "old")
    atomic.replace(path, b"new")
    assert path.read_bytes() == b"new"
    with pytest.raises(FileExistsError):
        atomic.create_file(path, b"other")
    assert path.read_bytes() == b"new" and names(tmp_path) == ["a.toml"]


def test_a_pipe_or_a_device_is_written_to_and_stays_one(tmp_path):
    os.mkfifo(path := tmp_path / "pipe")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    atomic.replace(path, "text")
    assert os.read(reader, 9) == b"text" and path.is_fifo() and names(tmp_path) == ["pipe"]
    os.close(reader)


@pytest.mark.parametrize("write", [atomic.create_file, atomic.replace])
def test_what_finds_no_room_leaves_nothing(tmp_path, write):
    path = tmp_path / "a.h5"
    if write is atomic.replace:
        atomic.replace(path, "old")
    before, limits = names(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            write(path, bytes(1 << 17))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno == errno.EFBIG and names(tmp_path) == before
    assert write is atomic.create_file or path.read_text() == "old"


def test_a_killed_writer_leaves_the_old_file_and_its_part_is_tidied_away(tmp_path, writer):
    (tmp_path / "a.txt").write_text("old")
    (tmp_path / "mine.part").write_text("of somebody else")
    (tmp_path / "mine-0123abcd.part").mkdir()    # which cannot be opened
    killed, alive = writer("replace", "a.txt"), writer("replace", "b.txt")
    killed.kill()
    killed.wait()
    assert (tmp_path / "a.txt").read_text() == "old" and len(names(tmp_path)) == 5
    resume.remove_parts_of_files(tmp_path)
    assert [name.partition("-")[0] for name in names(tmp_path)] == [
        "a.txt", "b", "mine", "mine.part"]
    alive.communicate("")
    assert alive.returncode == 0 and (tmp_path / "b.txt").read_text() == "new"
    assert names(tmp_path) == ["a.txt", "b.txt", "mine-0123abcd.part", "mine.part"]


def test_the_last_of_two_writers_has_the_file(tmp_path, writer):
    first = writer("replace", "a.txt")
    atomic.replace(tmp_path / "a.txt", "second")
    first.communicate("")
    assert (tmp_path / "a.txt").read_text() == "new" and names(tmp_path) == ["a.txt"]


def test_a_second_writer_of_a_new_file_is_refused(tmp_path, writer):
    first = writer("create_file", "a.h5")
    with pytest.raises(FileExistsError):
        atomic.create_file(tmp_path / "a.h5", b"second")
    first.communicate("")
    assert (tmp_path / "a.h5").read_text() == "new" and names(tmp_path) == ["a.h5"]
