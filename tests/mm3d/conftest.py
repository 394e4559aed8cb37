"""A CuPy whose kernels are compiled for this processor."""
import shutil
import sys

import pytest

import fakelibs


@pytest.fixture
def compiled_cupy(monkeypatch, no_backends):
    """Put the stand-in in CuPy's place, with kernels that g++ compiles; skip without g++."""
    if not shutil.which("g++"):
        pytest.skip("no g++ to compile kernels")
    for name, module in fakelibs.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
