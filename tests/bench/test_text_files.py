"""Files that users write, names of files and terminals, in every locale and of every kind."""
import os
import re
import subprocess
import sys

import pytest

from bench import text_files
from bench.__main__ import main, parser
from bench.errors import UsageError
from bench.prediction import machine_model
from bench.prediction.pipelines import schedule_costs
from bench.records import atomic, run_file
from jobs import site
from records import matmul_record
from support import ROOT

SITE = (ROOT / "jobs" / "sites" / "cpu.toml").read_bytes()
MACHINE = (ROOT / "bench" / "prediction" / "machines" / "cpu.toml").read_bytes()
SCHEDULE = b"F0 F1 B0 W0 B1 W1\n"
READERS = {"site": (site.load_site, SITE),
           "machine": (machine_model.load_machine, MACHINE),
           "schedule": (schedule_costs.read_schedule, SCHEDULE)}
PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}    # names are ASCII


@pytest.fixture(params=sorted(READERS))
def reader(request, tmp_path):
    read, content = READERS[request.param]
    return read, content, tmp_path / "mine.toml"


def test_a_mark_and_ends_of_lines_of_other_systems_are_no_fault(reader):
    read, content, path = reader
    path.write_bytes(content)
    plain = read(str(path))
    path.write_bytes(b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n"))
    assert read(str(path)) == plain


@pytest.mark.parametrize("change, message", [
    (lambda content: content.decode().encode("utf-16"),
     "is no text in UTF-8, as its byte 0 shows"),
    (lambda content: content + b"# caf\xe9\n", "is no text in UTF-8, as its byte"),
    (None, "cannot be read (Is a directory)")])
def test_what_is_no_such_text_is_refused_in_one_line(reader, change, message):
    read, content, path = reader
    path.write_bytes(change(content)) if change else path.mkdir()
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        read(str(path))
    assert "\n" not in str(caught.value) and "would do" in str(caught.value)


def test_lists_in_lists_without_end_are_no_toml():
    with pytest.raises(ValueError, match="too many lists or tables in each other"):
        text_files.read_toml("a = " + "[" * 5000)


def test_files_are_read_alike_in_every_locale(tmp_path):
    """UTF-8, also where the locale knows ASCII alone."""
    path = tmp_path / "mine.toml"
    path.write_bytes(SITE + "# ré\n".encode())
    done = subprocess.run(
        [sys.executable, "-m", "jobs", "render", "--site", path, "--ranks", "8", "--scheme", "3d",
         "--table", "weak", "--preset", "tiny", "--out", os.fsencode(tmp_path) + b"/r\xc3\xa9s"],
        env=os.environ | PLAIN, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    scripts = [path.read_bytes() for path in (tmp_path / "rés" / "jobs").glob("*.sh")]
    assert len(scripts) == 2    # the names of folders as they are on the disk
    for script in scripts:
        assert b"r\xc3\xa9s/jobs" in script and b"udcc3" not in script


def test_text_keeps_the_bytes_of_names(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    atomic.replace(tmp_path / name, f"é {name}")
    assert (tmp_path / name).read_bytes() == b"\xc3\xa9 caf\xe9"


@pytest.mark.parametrize("columns", ["0", "1", "-5", "nonsense", "1000000"])
def test_help_fits_any_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    top = parser()
    assert "reproduce" in top.format_help()
    for verb in top._subparsers._group_actions[0].choices.values():
        assert verb.format_help()


@pytest.fixture
def loops(tmp_path):
    """A folder with a file of results, a loop of links, and a link to nothing."""
    folder = tmp_path / "results"
    folder.mkdir()
    run_file.write_run(matmul_record(), folder, "matmul")    # of which no figure is drawn
    (folder / "loop.h5").symlink_to("loop.h5")
    (folder / "nothing.h5").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    return folder


@pytest.mark.parametrize("words, status", [
    (["report", "."], 1), (["report", "loop"], 2), (["report", ".", "--page"], 1),
    (["report", "loop", "--page"], 2),
    (["report", ".", "--page", "--out", "loop"], 2), (["validate", "."], 1), (["validate", "loop"],
                                                                              1),
    (["merge", "loop", "."], 2), (["merge", "all.h5", "loop.h5"], 2),
    (["report", "loop", "--figures"], 2),
    (["compare", ".", "loop"], 2), (["predict", "--results", "loop"], 2),
    (["cube", "--out", "loop"], 2),
    (["schedule", "--file", "loop"], 2),
    (["plan", "--ranks", "8", "--hidden", "64", "--machine", "loop.toml"], 2)])
def test_loops_of_links_end_nothing(loops, words, status, monkeypatch, capsys):
    monkeypatch.chdir(loops)
    assert main(words) == status
    assert "Traceback" not in capsys.readouterr().err
    assert (loops / "loop").is_symlink()
