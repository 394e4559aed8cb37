"""The commit that a run records is that of its source, or unknown."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cases.selection import select_rows
from bench.instruments import host
from bench.validation.files import list_warnings
from records import made_up
from support import ROOT

GIT = ("git", "-c", "user.name=somebody", "-c", "user.email=somebody")


def git(folder: Path, *words: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    return subprocess.run([*GIT, "-C", str(folder), *words], check=True, text=True,
                          capture_output=True, env=environment).stdout.strip()


def write_source(folder: Path) -> Path:
    """Write into a folder what tells that it holds the source."""
    for name in ("mm3d", "bench"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
    return folder


@pytest.fixture
def source(tmp_path) -> Path:
    """A repository whose top level is the source."""
    if not shutil.which("git"):
        pytest.skip("there is no git")
    folder = write_source(tmp_path / "source")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "source")
    return folder


def test_a_run_records_the_commit_of_its_source():
    found = host.describe_host("numpy", 1, "MPI", "")
    assert (found["git_commit"], found["git_clean"]) == host.source_version(ROOT)


CHANGING = """
import argparse, subprocess, sys
from bench.__main__ import run_on_all_ranks
from bench.instruments import host

def run(arguments, comm):
    subprocess.run(sys.argv[1:], check=True)
    found = host.describe_host("numpy", 1, "MPI", "")
    print(found["git_commit"], found["git_clean"])
    return 0

run_on_all_ranks(run, argparse.Namespace())
"""


def test_a_run_records_the_commit_at_its_start_and_that_it_changed_meanwhile(tmp_path):
    for folder in ("mm3d", "bench"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / ".gitignore").write_text("__pycache__")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "source")
    commit = git(tmp_path, "rev-parse", "HEAD")
    for change, clean in ((["true"], True),
                          ([*GIT, "commit", "-q", "--allow-empty", "-m", "new"], False)):
        done = subprocess.run([sys.executable, "-c", CHANGING, *change], text=True, cwd=tmp_path,
                              env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=True,
                              stdout=subprocess.PIPE)
        assert done.stdout.split() == [commit, str(clean)]


def test_the_commit_of_the_source_whatever_the_environment_names(source, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    git(other, "commit", "-q", "--allow-empty", "-m", "another")
    commit, tree = git(source, "rev-parse", "HEAD"), tmp_path / "tree"
    git(source, "worktree", "add", "-q", str(tree))
    assert host.source_version(source) == host.source_version(tree) == (commit, True)
    for name, value in (("DIR", other / ".git"), ("WORK_TREE", other),
                        ("INDEX_FILE", tmp_path / "index")):
        monkeypatch.setenv(f"GIT_{name}", str(value))
    assert host.source_version(source) == (commit, True)
    (tree / "bench" / "more.py").write_text("")
    assert host.source_version(tree) == (commit, False)
    (source / "results").mkdir()
    for new in ("results/new", "multiply.py"):    # what was measured, and a user's program
        (source / new).touch()
    assert host.source_version(source) == (commit, True)


def test_a_repository_around_the_source_says_nothing_of_it(source):
    inside = write_source(source / "lib" / "site-packages")
    git(source, "add", ".")
    git(source, "commit", "-qm", "everything")
    assert host.source_version(inside) == (host.UNKNOWN, False)


def test_where_git_refuses_or_is_missing_the_commit_is_unknown(source, tmp_path, monkeypatch):
    unknown = host.UNKNOWN, False
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert host.source_version(source) == unknown
    with monkeypatch.context() as patch:    # git refuses to begin
        for name, value in (("COUNT", "1"), ("KEY_0", "core.bare"), ("VALUE_0", "nonsense")):
            patch.setenv(f"GIT_CONFIG_{name}", value)
        assert host.source_version(source) == unknown
    if os.geteuid() == 0:    # of another owner: "dubious ownership", and git tells nothing
        other = tmp_path / "other"
        shutil.copytree(source, other)
        for one in (other, other / ".git"):
            os.chown(one, 65534, 65534)
        with monkeypatch.context() as patch:
            patch.setenv("HOME", str(tmp_path))
            assert host.source_version(other) == unknown
    (source / ".git" / "index").write_bytes(b"nonsense")
    assert host.source_version(source) == unknown


def test_an_unknown_commit_is_not_called_changed():
    run = made_up(select_rows("weak", "3d")[0])
    run.environment.update(git_commit=host.UNKNOWN, git_clean=False)
    said = " ".join(list_warnings(run))
    assert "commit of the source is unknown" in said and "not committed" not in said
