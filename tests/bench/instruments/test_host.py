"""The commit that a run records is that of its source, or unknown."""
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bench.cases.selection import select_rows
from bench.instruments import host
from bench.validation.files import list_warnings
from records import made_up
from support import ROOT


def git(folder: Path, *words: str) -> str:
    names = [word for name in ("name", "email") for word in ("-c", f"user.{name}=somebody")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    return subprocess.run(["git", *names, "-C", str(folder), *words], check=True, text=True,
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
