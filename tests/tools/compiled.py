"""The compiled kernels, by Numba where it is installed, and as written: interpreted by Python."""
import importlib
import sys
from types import SimpleNamespace

import pytest


class Type:
    """Stand in for a type of Numba, and for an array of it."""

    def __getitem__(self, dimensions):
        return self


def njit(work=None, **options):
    return work if callable(work) else lambda function: function


def load_compiled(how: str, monkeypatch):
    """Import `mm3d.arrays.compiled` "by numba", or skip; or "as written", without it."""
    if how == "by numba":
        pytest.importorskip("numba")
        return importlib.import_module("mm3d.arrays.compiled")
    monkeypatch.setitem(sys.modules, "numba", SimpleNamespace(
        float32=Type(), float64=Type(), njit=njit, void=lambda *kinds: None))
    monkeypatch.setitem(sys.modules, "numba.extending", SimpleNamespace(
        overload=lambda function, **options: lambda other: other))
    # What is set has gone after the test, so that no later one finds the module of this one.
    monkeypatch.setattr("mm3d.arrays.compiled", None, raising=False)
    monkeypatch.setitem(sys.modules, "mm3d.arrays.compiled", None)
    del sys.modules["mm3d.arrays.compiled"]
    return importlib.import_module("mm3d.arrays.compiled")
