"""The compiled kernels, by Numba where it is installed, and as written: interpreted by Python."""
import importlib
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest


def load_compiled(how: str, monkeypatch):
    """Import `mm3d.arrays.compiled` "by numba", or skip; or "as written", without it."""
    if how == "by numba":
        pytest.importorskip("numba")
        return importlib.import_module("mm3d.arrays.compiled")
    monkeypatch.setitem(sys.modules, "numba", SimpleNamespace(
        float32=MagicMock(), float64=MagicMock(), void=MagicMock(),
        njit=lambda *given, **options: lambda function: function))
    monkeypatch.setitem(sys.modules, "numba.extending", SimpleNamespace(
        overload=lambda function, **options: lambda other: other))
    # What is set has gone after the test, so that no later one finds the module of this one.
    monkeypatch.setattr("mm3d.arrays.compiled", None, raising=False)
    monkeypatch.setitem(sys.modules, "mm3d.arrays.compiled", None)
    del sys.modules["mm3d.arrays.compiled"]
    return importlib.import_module("mm3d.arrays.compiled")
