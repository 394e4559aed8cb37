"""The installation: found from any folder, and with the oldest of everything that it allows."""
import configparser
import os
import re
import shutil
import subprocess
import sys

import pytest

from support import ROOT

PACKAGES = ("bench", "jobs", "mm3d")
EXTRAS = ("mpi",)    # beside what is always installed: all that needs no GPU


def outside(folder, *command, **more):
    """Run a command as a user does, in a folder outside the source."""
    environ = {name: value for name, value in os.environ.items()
               if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run(command, cwd=folder, env=environ | more, capture_output=True, text=True,
                          timeout=600)
    return done


@pytest.fixture
def parent(tmp_path):
    """A folder with folders of the packages' names, such as one that holds a clone."""
    for name in PACKAGES:
        (tmp_path / name / "runs").mkdir(parents=True)
    return tmp_path


def check_packages(python, folder, **more):
    """Start each package in a folder, where the source itself is not."""
    for name in ("bench", "jobs"):
        done = outside(folder, python, "-m", name, "--help", **more)
        assert done.returncode == 0 and "VERB" in done.stdout, done.stderr
    done = outside(folder, python, "-c", "import mm3d; print(mm3d.scheme.__name__)", **more)
    assert done.stdout == "scheme\n", done.stderr


@pytest.mark.slow_but_first
@pytest.mark.parametrize("more", [{}, {"PYTHONSAFEPATH": "1"}, {"PYTHONPATH": "."}])
def test_a_folder_of_the_same_name_hides_no_package(parent, more):
    """It fails, too, where the installation is older than the source: pip install -e '.[test]'"""
    check_packages(sys.executable, parent, **more)


def requirements() -> dict[str, list[str]]:
    """What is installed always ("") and for each extra."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    found = {"": config["options"]["install_requires"], **config["options.extras_require"]}
    return {name: [line for line in text.splitlines() if line and line[0] != "#"]
            for name, text in found.items()}


def oldest() -> list[str]:
    """The oldest of everything that is allowed, as pip's constraints."""
    lines = sum((requirements()[name] for name in ("", *EXTRAS)), [])
    return [re.sub(r"(\[.*?\])?>=", "==", line) for line in lines]


def test_every_file_that_is_no_module_is_installed():
    """Each matches a pattern: one in each line, as setuptools splits a list of several lines."""
    read = configparser.ConfigParser()
    read.read(ROOT / "setup.cfg", encoding="utf-8")
    patterns = read["options.package_data"]["*"].strip().splitlines()
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()
             and path.suffix != ".py" and path.name != "README.rst"
             and path.parent.name != "__pycache__"]    # of Python, and of Numba
    left = [str(path) for path in files if not any(path.match(pattern) for pattern in patterns)]
    assert len(files) > 50 and not left


def test_every_requirement_has_one_lower_bound():
    """Or is exact, so that the oldest of everything is what `oldest` lists."""
    lines = [line for name, found in requirements().items() if name != "all" for line in found]
    assert len(lines) > 12
    for line in lines:
        assert re.fullmatch(r"[\w-]+(\[ctk\])?[>=]=\d+(\.\d+)+(; sys_platform == \"linux\")?",
                            line), line
    assert "numpy==2.1" in oldest() and not any(">" in line for line in oldest())


@pytest.mark.slow
@pytest.mark.limit(1500)
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="the oldest have no wheels for it")
def test_the_oldest_of_everything_works_together(parent):
    """Installed from a copy, not editable, and started outside of it."""
    copy, python = parent / "source", str(parent / "oldest" / "bin" / "python")
    shutil.copytree(ROOT, copy, ignore=lambda folder, names: [
        name for name in names if name.startswith(".") or name.endswith(".egg-info")
        or name in ("results", "tests", "build", "__pycache__")])
    (parent / "constraints").write_text("\n".join(oldest()))

    def run(*words):
        done = outside(parent, python, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert outside(parent, sys.executable, "-m", "venv", "oldest").returncode == 0
    run("-m", "pip", "install", "-q", "-c", "constraints", f"{copy}[{','.join(EXTRAS)}]")
    listed = run("-m", "pip", "freeze")
    for line in oldest():
        name, _, version = line.partition(";")[0].partition("==")
        assert re.search(rf"^{re.sub('[-_]', '[-_]', name)}=={version}(\.0)*$", listed,
                         re.MULTILINE | re.IGNORECASE), line
    check_packages(python, parent)
    run("-m", "bench", "doctor", "--ranks", "2", "--out", "out")
    run("-m", "bench", "reproduce", "--preset", "tiny", "--scheme", "3d", "--table", "weak",
        "--ranks", "8", "--out", "out")
    assert "3-D" in run("-m", "bench", "report", "out")
    run("-m", "bench", "validate", "out")
    run("-m", "bench", "report", "out", "--page")
    mpirun = str(parent / "oldest" / "bin" / "mpirun")
    trained = outside(parent, mpirun, "-n", "2", python, "-m", "bench", "train", "--scheme", "1d",
                      "--steps", "3", "--out", "out")
    assert trained.returncode == 0, trained.stderr
