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
from support import ROOT, run_python

SHOW = ("from bench.instruments.host import describe_host as d; f = d('numpy', 1, 'MPI', '');"
        "print(f['git_commit'], f['git_clean'])")


def git(folder: Path, *words: str) -> str:
    names = [word for name in ("name", "email") for word in ("-c", f"user.{name}=somebody")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    return subprocess.run(["git", *names, "-C", str(folder), *words], check=True, text=True,
                          capture_output=True, env=environment).stdout.strip()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A repository whose top level is a copy of the source, and its commit."""
    if not shutil.which("git"):
        pytest.skip("there is no git")
    folder = tmp_path_factory.mktemp("source")
    for name in ("mm3d", "bench"):
        shutil.copytree(ROOT / name, folder / name,
                        ignore=shutil.ignore_patterns("__pycache__"))
    (folder / ".gitignore").write_text("__pycache__/\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "source")
    return folder


def recorded(folder: Path, **environment: str) -> list[str]:
    done = run_python("-c", SHOW, cwd=folder, PYTHONPATH=str(folder), **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_commit_of_the_source_whatever_the_environment_names(source, tmp_path):
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "another")
    commit = git(source, "rev-parse", "HEAD")
    assert recorded(source) == [commit, "True"]
    assert recorded(source, GIT_DIR=str(tmp_path / ".git"), GIT_WORK_TREE=str(tmp_path),
                    GIT_INDEX_FILE=str(tmp_path / "index")) == [commit, "True"]
    tree = tmp_path / "tree"
    git(source, "worktree", "add", "-q", str(tree))
    assert recorded(tree) == [commit, "True"]
    (tree / "bench" / "more.py").write_text("")
    assert recorded(tree) == [commit, "False"]


def test_a_repository_around_the_source_says_nothing_of_it(source, tmp_path):
    git(tmp_path, "init", "-q")
    inside = tmp_path / "lib" / "site-packages"
    for name in ("mm3d", "bench"):
        shutil.copytree(source / name, inside / name)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "everything")
    assert recorded(inside) == ["unknown", "False"]


def test_where_git_refuses_or_is_missing_the_commit_is_unknown(source, tmp_path):
    assert recorded(source, PATH=str(tmp_path)) == ["unknown", "False"]
    # As of another owner: git calls it "dubious ownership", and tells nothing.
    assert recorded(source, GIT_CONFIG_COUNT="1", GIT_CONFIG_KEY_0="core.bare",
                    GIT_CONFIG_VALUE_0="nonsense") == ["unknown", "False"]
    if os.geteuid() == 0:
        other = tmp_path / "other"
        shutil.copytree(source, other)
        for one in (other, other / ".git"):
            os.chown(one, 65534, 65534)
        assert recorded(other, HOME=str(tmp_path)) == ["unknown", "False"]
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    (broken / ".git" / "index").write_bytes(b"nonsense")
    assert recorded(broken) == ["unknown", "False"]


def test_an_unknown_commit_is_not_called_changed():
    run = made_up(select_rows("weak", "3d")[0])
    run.environment.update(git_commit=host.UNKNOWN, git_clean=False)
    said = " ".join(list_warnings(run))
    assert "commit of the source is unknown" in said and "not committed" not in said
