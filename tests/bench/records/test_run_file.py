"""Files: complete or not there, on full disks too, readable by others, and never lost."""

import errno
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace

import h5py
import numpy as np
import pytest

from bench.cases.selection import select_rows
from bench.errors import StoreError
from bench.experiments.rows import resume
from bench.records import atomic, journal, run_file
from bench.records.measurements import Measurements, Variable
from records import format_tables, made_up
from support import ROOT

ROW = select_rows("weak", "3d")[0]


def test_read_returns_what_was_written(tmp_path):
    """Signs that nothing prints or encodes, as in names of folders, are escaped."""
    run = made_up(ROW)
    run.environment["command"] = "--out a\tb\udcff\nc"
    path = run_file.write_run(run, tmp_path, "weak-3d")
    assert path.name == "weak-3d-20300102T030405Z.h5"
    found = run_file.read_run(path)
    run.environment["command"] = r"--out a\tb\udcff" "\nc"
    for name in ("configuration", "environment", "published", "checks", "created"):
        assert getattr(found, name) == getattr(run, name)
    for name in ("samples", "traffic"):
        for key, values in getattr(run, name).items():
            np.testing.assert_array_equal(getattr(found, name)[key], values)
    np.testing.assert_array_equal(found.expected_words, run.expected_words)


def test_kinds_of_a_family_that_has_no_schema_of_theirs_are_read(tmp_path):
    """Of a later version, say: what was measured is there, and nothing follows from it."""
    samples = Variable(np.ones((1, 2)), "s", ("part", "repetition"))
    path = run_file.write_run(Measurements("gpu-other", {}, {}, {
        "part": ["a"], "repetition": range(2)}, {"samples": samples}, []), tmp_path, "a")
    assert run_file.read_run(path).variables.keys() == {"samples"}


def test_many_labels_are_compressed(tmp_path):
    """Texts of one length, in UTF-8; few are stored as they are."""
    run = made_up(ROW)
    run = replace(run, checks=[replace(run.checks[0], quantity=f"\u00b5 {n}") for n in range(50)])
    path = run_file.write_run(run, tmp_path, "a")
    assert run_file.read_run(path).checks == run.checks
    with h5py.File(path) as file:
        stored = file["verification/quantity"]
        assert stored.compression == "gzip" and stored.asstr()[49] == "\u00b5 49"
        assert file["samples/repetition"].compression is None


def test_the_page_s_lines_open_results_with_xarray_and_pandas(tmp_path, monkeypatch):
    """Of `bench/records/README.rst`, as they stand; the median is that of the tables."""
    for name in ("xarray", "h5netcdf", "pandas"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    page = (ROOT / "bench/records/README.rst").read_text("utf-8")
    lines = re.search(r":name: open-results\n\n((?:   .*\n|\n)+)", page)[1]
    run = made_up(ROW)
    run_file.write_run(run, tmp_path, "a").rename(tmp_path / "run.h5")
    (tmp_path / "tables.csv").write_text(format_tables(tmp_path, "csv"))
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(re.sub("^   ", "", lines, flags=re.MULTILINE), found)
    assert found["forward"] == np.median(run.samples["forward"].max(axis=1))
    assert found["rows"]["table"].nunique() > 1 and len(found["frame"]) == run.samples[
        "forward"].size


FORK = multiprocessing.get_context("fork")    # a process in a moment, without starting MPI


def keep_writing(folder, count: int, pipe) -> None:
    """Write `count` runs, of the same second and name, and tell the name of each."""
    for _ in range(count):
        pipe.send(run_file.write_run(made_up(ROW), folder, "a").name)


def start_writing(*arguments):
    """A process that runs `keep_writing`, and the names that it tells."""
    names, pipe = FORK.Pipe(duplex=False)
    process = FORK.Process(target=keep_writing, args=(*arguments, pipe))
    process.start()
    pipe.close()
    return process, names


def received(names) -> list[str]:
    """All names that were told before the pipe was closed."""
    found = []
    try:
        while True:
            found.append(names.recv())
    except EOFError:
        return found


def test_two_writers_in_one_folder_lose_nothing(tmp_path):
    writers = [start_writing(tmp_path, 8) for _ in range(2)]
    names = [name for _, told in writers for name in received(told)]
    assert len(names) == 16 == len(set(names))
    assert {p.name for p in tmp_path.iterdir()} == set(names)
    for name in names:
        run_file.read_run(tmp_path / name)


def test_a_kill_at_any_moment_loses_nothing_finished(tmp_path):
    delays = random.Random(1)
    finished = []
    for _ in range(8):
        process, names = start_writing(tmp_path, 10 ** 6)
        finished.append(names.recv())
        time.sleep(delays.uniform(0.0, 0.05))
        process.kill()
        process.join()
        finished += received(names)
    assert len(finished) == len(set(finished))
    # A file may be there that was killed before it could be told: it is complete too.
    assert {p.name for p in tmp_path.glob("*.h5")} >= set(finished)
    for path in tmp_path.glob("*.h5"):
        run_file.read_run(path)


def test_folders_are_made_and_must_be_writable(tmp_path):
    made = journal.check_folder(tmp_path / "a" / "b")
    assert made.is_dir() and not list(made.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written .Not a directory.*--out"):
        journal.check_folder(tmp_path / "file" / "results")


def test_a_file_that_cannot_be_is_refused_and_a_device_is_not(tmp_path):
    journal.check_output("/dev/null", "--trace")
    for name, why in ((tmp_path, "is a folder"),
                      (tmp_path / ("a" * 300), "cannot be written .File name too long")):
        with pytest.raises(StoreError, match=f"--trace .* {why}"):
            journal.check_output(name, "--trace")


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
