"""A new parallelism is one new file: nothing else has to know of it."""
import re
import shutil
from pathlib import Path

import pytest

from mm3d import store
from support import ROOT, run_python, run_ranks

# The paper's algorithms on a grid of columns: a scheme that is right, and that nobody knows.
COLUMNS = '''
"""A throw-away scheme."""

from mm3d.schemes.cube import Cube


class Columns(Cube):
    """2 x P/2 x 1."""

    name = "columns"
    title = "Columns"

    @classmethod
    def default_grid(cls, ranks):
        if ranks % 2:
            raise ValueError(f"{ranks} ranks are odd: start {ranks + 1}")
        return (2, ranks // 2, 1)
'''
# And one that is not: its weights' gradients are those of half the rows.
WRONG = COLUMNS + '''
    def product(self, *arguments):
        product = super().product(*arguments)
        backward = product.backward
        product.backward = lambda dC, B, saved: (backward(dC, B, saved)[0],
                                                 backward(dC, B, saved)[1] / 2)
        return product
'''


def copy_with(source: str, folder: Path) -> Path:
    """A copy of this project with one file more."""
    for name in ("mm3d", "bench", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", folder)
    (folder / "mm3d" / "schemes" / "columns.py").write_text(source)
    return folder


def model_tests(folder: Path):
    """Those of the copy's tests that compare the schemes with the serial model, on 4 ranks."""
    return run_ranks(4, "-m", "pytest", "-q", "-x", "tests/test_transformer.py", "-k",
                     "(test_equals_serial or stored_once) and 4ranks and mpi", cwd=folder,
                     timeout=90)


def bench(folder: Path, ranks: int, *options: str):
    """``bench run`` of the new scheme in the copy."""
    return run_ranks(ranks, "-m", "bench", "run", "--scheme", "columns", "--table", "strong",
                     "--preset", "tiny", "--repetitions", "2", "--max-repetitions", "2",
                     "--out", "results/here", *options, cwd=folder)


@pytest.mark.limit(240)
def test_a_new_scheme_is_tested_measured_and_shown(tmp_path):
    folder = copy_with(COLUMNS, tmp_path / "copy")
    done = model_tests(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    done = bench(folder, 4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("done: strong Columns 4 ranks: forward")
    path, = (folder / "results" / "here").glob("*.h5")
    assert store.read(path).configuration["grid"] == "2 x 2 x 1"
    done = run_python("-m", "bench", "table", "results/here", cwd=folder)
    assert any(line.split()[:2] == ["Columns", "4"] for line in done.stdout.splitlines())
    done = run_python("-m", "bench", "plot", "results/here", cwd=folder)
    assert done.returncode == 0 and "average-step-time-tiny.png" in done.stdout, done.stderr
    done = bench(folder, 3)
    assert done.returncode == 1 and "3 ranks are odd: start 4" in done.stdout


@pytest.mark.limit(240)
def test_a_new_scheme_that_is_wrong_is_found(tmp_path):
    folder = copy_with(WRONG, tmp_path / "copy")
    done = model_tests(folder)
    assert done.returncode != 0
    assert re.search(r"columns *: \['layers.0.attention.proj.weight: \d", done.stdout), done.stdout
    done = bench(folder, 4)
    assert done.returncode == 1 and "differs from the serial scheme" in done.stdout
    assert not list((folder / "results" / "here").glob("*.h5"))
