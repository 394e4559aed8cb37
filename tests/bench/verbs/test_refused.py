"""A refused command leaves nothing behind: no folder, no journal."""
import fcntl
import json
import os

import pytest

from bench.__main__ import main
from bench.errors import StoreError
from bench.records import journal
from jobs.__main__ import main as jobs_main
from support import run_python, run_ranks

REFUSED = [
    ("measure", "matmul", "--shape", "64", "--grid", "2x2x3"),
    ("measure", "matmul", "--shape", "64", "--scheme", "3d,3d", "--trace", "{}/traces/a.json"),
    ("measure", "layer", "--hidden", "8", "--head-size", "8", "--grid", "2x2x3"),
    ("measure", "collectives", "--grid", "2x2x3"),
    ("measure", "experts", "--grid", "2x2x3"),
    ("measure", "checkpoint", "--hidden", "7", "--heads", "2"),
    ("measure", "step", "--grid", "2x2x3"),
    ("train", "--grid", "2x2x3", "--checkpoints", "none"),
    ("measure", "pipeline", "--stages", "2"),
    ("run", "--scheme", "1d-sp", "--preset", "tiny", "--grid", "2x2x3"),
    ("predict", "--machine", "cpu", "--layer", "8,3,1,1"),
    ("measure", "gpu", "--backend", "numpy", "--graph"),
    ("calibrate", "--samples", "{}/none.h5"),
    ("reproduce", "--scheme", "3d", "--preset", "paper", "--dtype", "float16"),
    ("run", "--scheme", "1d-sp", "--preset", "tiny", "--trace", "{}/a.json", "--traced", "0")]


RUN_ALL = """
import json, sys
from bench.__main__ import main
print([main(words) for words in json.loads(sys.argv[1])])
"""


def test_refused_verbs_leave_nothing(tmp_path):
    """Once the process has ended, which removes the folders that it has made."""
    commands = [[*(word.format(tmp_path / str(k)) for word in words), "--out",
                 str(tmp_path / str(k) / "results")] for k, words in enumerate(REFUSED)]
    done = run_python("-c", RUN_ALL, json.dumps(commands))
    assert done.stdout == f"{[2] * len(REFUSED)}\n", done.stderr
    assert done.stderr.count("error: ") == len(REFUSED)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_verb_of_ranks_leaves_a_folder_as_it_was(tmp_path):
    (tmp_path / "here.txt").touch()
    done = run_ranks(2, "-m", "bench", "measure", "matmul", "--shape", "64", "--grid", "2x2x3",
                     "--out", str(tmp_path))
    assert done.returncode == 2 and os.listdir(tmp_path) == ["here.txt"], done.stderr


def test_what_is_in_use_keeps_its_journal(tmp_path):
    """Another process may have made it a moment ago: who has no lock removes nothing."""
    path = tmp_path / journal.JOURNAL
    with open(path, "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main(["measure", "gemm", "--sizes", "8", "--out", str(tmp_path)]) == 2
        assert path.exists()
    late = journal.Journal(tmp_path)
    path.unlink()    # as by a process that ends, between opening and locking
    late.claim()
    assert path.exists()
    with pytest.raises(StoreError, match="in use"):
        journal.Journal(tmp_path).claim()
    late.close()


def test_a_measurement_leaves_its_file_alone(tmp_path):
    done = run_python("-m", "bench", "measure", "checkpoint", "--layers", "1", "--hidden", "8",
                      "--heads", "1", "--repetitions", "1", "--max-repetitions", "1", "--disk",
                      str(tmp_path / "new" / "disk"), "--out", str(tmp_path / "results"))
    assert done.returncode == 0, done.stderr
    assert [path.suffix for path in tmp_path.rglob("*")] == ["", ".h5"]


def test_refused_jobs_leave_nothing(tmp_path):
    for words in (["render", "--inside", "q"], ["render", "--ranks", "7"],
                  ["submit", "--table", "none"]):
        assert jobs_main([*words, "--site", "cpu", "--out", str(tmp_path / "out")]) == 2
    assert list(tmp_path.iterdir()) == []
