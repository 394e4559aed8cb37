"""The examples of docstrings run, and print what they show."""

import doctest
import importlib
import pkgutil
from types import SimpleNamespace

import numpy as np
import pytest

import mm3d
from mm3d.transport.communicators import DryCommunicator

# Modules whose import starts something, or needs Numba.
LEFT_OUT = ("mm3d.selftest", "mm3d.examples", "mm3d.arrays.compiled")
# Examples whose results are those of 8 ranks; others take one of 8 ranks that do not exist.
ON_RANKS = {"mm3d", "mm3d.grid.grid.Grid", "mm3d.tracing.watchdog.Watchdog",
            "mm3d.training.gpt.GPT", "mm3d.training.mesh.Mesh"}
# What examples take for given.
GIVEN = {"X": np.zeros((8, 16, 48), np.float32), "dy": np.zeros((2, 16, 24), np.float32),
         "a": np.zeros((2, 3), np.float32), "tokens": np.zeros((16, 32), int),
         "targets": np.zeros((16, 32), int), "train": lambda model: None}


def examples() -> dict[str, doctest.DocTest]:
    """The examples of the library, by the name of what they are of."""
    found = {}
    for name in ["mm3d", *(one.name for one in pkgutil.walk_packages(mm3d.__path__, "mm3d."))]:
        if not name.startswith(LEFT_OUT):
            module = importlib.import_module(name)
            found |= {test.name: test for test in doctest.DocTestFinder().find(module, name)
                      if test.examples}
    return found


def failures(test: doctest.DocTest, **given) -> str:
    """What fails in the examples of a docstring."""
    report: list[str] = []
    runner = doctest.DocTestRunner()
    test.globs |= GIVEN | {"mm3d": mm3d} | given
    runner.run(test, out=report.append)
    return "".join(report) * bool(runner.failures)


@pytest.mark.ranks(1, 8)
def test_examples_print_what_they_show(comm):
    found = examples()
    assert found.keys() >= ON_RANKS and len(found) > 10
    given = {"comm": DryCommunicator(8)}
    if comm.size == 8:
        grid = mm3d.Grid(comm, x=2, y=2, z=2)
        chain = SimpleNamespace(layers=[])    # to be observed
        given = {"comm": comm, "model": SimpleNamespace(grid=grid, layers=chain)}
    for name, test in found.items():
        if (name in ON_RANKS) == (comm.size == 8):
            assert failures(test, **given) == "", name


def test_a_wrong_example_is_found():
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert "Got:\n    2" in failures(test)
