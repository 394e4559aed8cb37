"""Files that other programs hold, that may not be read, or that are no files; permissions."""
import os
import stat
import subprocess
import sys
from argparse import Namespace

import h5py
import numpy as np
import pytest

from bench.__main__ import main
from bench.cases.case import make_case
from bench.cases.selection import select_rows
from bench.cases.variants import Variant
from bench.errors import Unreadable
from bench.experiments.rows import resume
from bench.records import atomic, journal, merged, run_file
from bench.records.folder import read_runs
from bench.verbs import validate
from jobs import scripts, site, standings
from jobs.__main__ import main as jobs_main
from records import draw_only, made_up

ROW = make_case(select_rows("weak", "3d")[0], "laptop")
HOLD = """
import fcntl, h5py, sys
how, path = sys.argv[1:]
if how == "flock":
    file = open(path, "rb")
    fcntl.flock(file, fcntl.LOCK_EX)
else:
    file = h5py.File(path, "r+")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def finished(tmp_path):
    """A finished row."""
    return run_file.write_run(made_up(ROW.row), tmp_path, ROW.name)


@pytest.mark.parametrize("how", ["flock", "written"])
def test_a_file_that_another_program_has_open_is_read(tmp_path, finished, how, monkeypatch):
    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", "TRUE")
    with subprocess.Popen([sys.executable, "-c", HOLD, how, finished], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == "held\n"
        run = run_file.read_run(finished)
        work = scripts.JobSettings(site.load_site("cpu"), "cpu", tmp_path)
        found, = standings.list_standings(work, [ROW], {})
        holder.communicate("")
    np.testing.assert_array_equal(run.samples["forward"], made_up(ROW.row).samples["forward"])
    assert found.state == standings.DONE


def as_nobody(call):
    """What `call` returns or raises for a user who may not read what others may not."""
    if os.geteuid():
        return call()
    os.seteuid(65534)
    try:
        return call()
    finally:
        os.seteuid(0)


def test_what_may_not_be_read_is_neither_missing_nor_damaged(tmp_path, finished, capsys):
    """It is not submitted or measured again, and its verdict is none."""
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == os.getuid() and len(folder.parts) > 2:
            folder.chmod(0o755)
    main(["validate", str(finished)])    # all of it is imported, while it can be read
    capsys.readouterr()
    finished.chmod(0)
    work = scripts.JobSettings(site.load_site("cpu"), "cpu", tmp_path)
    begun = journal.Reproduction(7, "2029-01-01T00:00:00+00:00", {
        "seed": 0, "warmup": 2, "repetitions": 3, **vars(Variant())}, (ROW.name,))
    with pytest.raises(Unreadable, match=r"cannot be read \(Permission denied\)"):
        as_nobody(lambda: run_file.read_run(finished))
    found, = as_nobody(lambda: standings.list_standings(work, [ROW], {}))
    assert found.state == standings.UNCLEAR and "Permission denied" in found.reason
    with pytest.raises(Unreadable, match="nobody can tell whether .* is measured: make it"):
        as_nobody(lambda: resume.is_measured(ROW.name, begun, tmp_path))
    assert as_nobody(lambda: resume.missing_rows(begun, tmp_path)) == [ROW.name]
    assert as_nobody(lambda: validate.run(Namespace(sources=[str(finished)]))) == 1
    assert capsys.readouterr() == (
        "", f"left out: {finished} cannot be read (Permission denied)\n")
    tmp_path.chmod(0)
    with pytest.raises(Unreadable, match="cannot be listed"):
        as_nobody(lambda: run_file.list_files(tmp_path))
    tmp_path.chmod(0o755)


def test_what_is_no_file_of_results_leaves_itself_out(tmp_path, finished):
    os.mkfifo(tmp_path / "pipe.h5")
    (tmp_path / "folder.h5").mkdir()
    (tmp_path / "link.h5").symlink_to("nothing")
    (tmp_path / "loop.h5").symlink_to("loop.h5")
    (tmp_path / "empty.h5").touch()
    (tmp_path / "text.h5").write_text("forward 1 s")
    runs, problems = read_runs(tmp_path)
    assert len(runs) == 1 and len(problems) == 6
    for name, reason in (("pipe", "no file of results, but a device or a pipe"),
                         ("folder", "no file of results, but a folder"),
                         ("link", "is a link to nothing"), ("loop", "cannot be read"),
                         ("empty", "is truncated, damaged, or no HDF5 file"),
                         ("text", "is truncated, damaged, or no HDF5 file")):
        assert any(f"{name}.h5" in line and reason in line for line in problems), name


def test_an_error_of_the_caller_is_not_one_of_the_file(finished):
    for kind in (KeyError, ValueError, TypeError, AttributeError, OSError, RuntimeError):
        with pytest.raises(kind, match="of the caller"):
            with run_file.open_file(finished):
                raise kind("of the caller")


def test_one_bad_run_leaves_itself_out_of_a_merged_file(tmp_path, capsys):
    for number in range(3):
        run_file.write_run(made_up(ROW.row, created=f"2030-01-0{number + 1}T00:00:00+00:00"),
                           tmp_path, f"n{number}")
    target = tmp_path / "out" / "all.h5"
    target.parent.mkdir()
    assert main(["merge", str(target), str(tmp_path)]) == 0
    with h5py.File(target, "r+") as file:
        first, second, _ = file["runs"]
        file[f"runs/{first}"].attrs["schema_version"] = np.inf
        del file["runs"][second]
        file["runs"][second] = h5py.SoftLink("/nowhere")
    runs, problems = merged.runs_in_file(target)
    assert len(runs) == 1 and len(problems) == 2
    assert "schema_version is inf" in problems[0] and "is no group" in problems[1]
    again = tmp_path / "again.h5"
    capsys.readouterr()
    assert main(["merge", str(again), str(target)]) == 1    # the others are not lost
    said = capsys.readouterr()
    assert "1 run of 1 file\n" in said.out and said.err.count("left out: ") == 2
    assert main(["validate", str(target)]) == 1


@pytest.mark.slow_but_first
@pytest.mark.parametrize("mask", [0o002, 0o027, 0o077])
def test_who_goes_on_with_a_file_is_for_the_umask_to_say(tmp_path, monkeypatch, mask):
    draw_only(monkeypatch, "average-step-time")
    folder, before = tmp_path / "results", os.umask(mask)
    try:
        journal.check_folder(folder)
        path = run_file.write_run(made_up(ROW.row), folder, ROW.name)
        journal.Journal(folder).close()
        atomic.replace(folder / "machine.toml", "")
        for verb in (["report", str(folder), "--figures", "average"],
                     ["report", str(folder), "--page"],
                     ["merge", str(folder / "all.h5"), str(path)]):
            assert main(verb) == 0
        assert jobs_main(["render", "--site", "cpu", "--preset", "tiny", "--scheme", "3d",
                          "--out", str(folder)]) == 0
        work = scripts.JobSettings(site.load_site("cpu"), "cpu", folder)
        with standings.locked(work):
            standings.record_job(work, "row", ROW.name, ROW.title, "7")
    finally:
        os.umask(before)
    found = [folder, *folder.rglob("*")]
    assert len(found) > 10
    for one in found:
        whole = 0o777 if one.is_dir() or one.suffix == ".sh" else 0o666
        assert stat.S_IMODE(one.stat().st_mode) == whole & ~mask, one
