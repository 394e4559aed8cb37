"""What many ranks cost before they compute."""
import os
import sys
from argparse import Namespace

import pytest

from bench.errors import UsageError
from bench.experiments import startup
from bench.verbs.measure import start as verb
from mm3d import launcher
from support import run_python

ALONE = "MPI_LOCALNRANKS", "1"    # as on a node without a launcher


@pytest.mark.slow
def test_many_ranks_are_started_and_timed():
    done = run_python("-m", "bench", "measure", "start", "--ranks", "1,8", MM3D_TRANSPORT="shared")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert [row[:2] for row in rows[:2]] == [["1", "mpi"], ["8", "shared"]]
    assert all(float(cell) >= 0 for row in rows[:2] for cell in row[2:])
    assert [row[-3] for row in rows[2:]] == 2 * ["Python", "NumPy", "MPI", "mm3d", "grid", "steps"]
    assert all(0 < float(row[-1]) <= float(row[-2]) for row in rows[2:])


def test_ranks_are_started_as_root_and_beyond_the_cores_too(tmp_path, monkeypatch, capsys):
    """Open MPI does so when it is told; what the user has set stays."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))    # mpirun is beside it
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\nenv > {tmp_path}/env\necho no ranks >&2; exit 1")
    (tmp_path / "mpirun").chmod(0o755)
    for name in launcher.PERMISSIONS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "0")
    monkeypatch.setenv(*ALONE)
    assert verb.run(Namespace(ranks=[1])) == 1
    assert capsys.readouterr() == ("", "failed: 1 ranks:\nno ranks\n")
    given = {*(tmp_path / "env").read_text().splitlines()}
    wanted = os.environ | launcher.PERMISSIONS | {"OMPI_ALLOW_RUN_AS_ROOT": "0"}
    assert {f"{name}={wanted[name]}" for name in (*launcher.PERMISSIONS, "HOME")} <= given


def test_each_job_has_a_row(monkeypatch):
    """Also of two with the same number of ranks; the ratio is the median of those of rounds."""
    maps = "a-b rw-p 0 [rollup]\nRss: 2000 kB\nPrivate_Clean: 100 kB\nPrivate_Dirty: 900 kB\n"
    memory = {"Python": startup.resident_bytes(maps), "MPI": startup.resident_bytes("")}
    told = dict.fromkeys((*startup.STAGES, "call"), 3.0) | {"transport": "mpi", "memory": memory}
    plain = [{"all ranks run": seconds, "memory": memory} for seconds in (1.0, 6.0, 1.5)]
    shown, rounds = [], iter(3 * plain)
    monkeypatch.setattr(verb, "measure_start", lambda ranks: (next(rounds), told))
    monkeypatch.setenv(*ALONE)
    assert verb.run(Namespace(ranks=[8, 1, 8], show=shown.extend)) == 0
    assert [row[0] for row in shown[0].rows] == [8, 1, 8]
    assert all(row[2:4] + row[-2:-1] == ["1.50", "3.00", "2.00"] for row in shown[0].rows)
    assert shown[1].rows[:2] == [[8, "NumPy, mpi4py", "Python", "2.0", "1.0"],
                                 [8, "NumPy, mpi4py", "MPI", "nan", "nan"]]


def test_a_number_of_ranks_that_is_no_cube_is_refused(monkeypatch):
    monkeypatch.setenv(*ALONE)
    with pytest.raises(UsageError, match="^--ranks 9: give cubes, such as 8,27,64, of at most "
                                         "4096 ranks$"):
        verb.run(Namespace(ranks=[8, 9]))
