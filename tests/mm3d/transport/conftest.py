"""A CuPy over host memory, for the transports of device arrays."""
import sys
from types import SimpleNamespace

import pytest

import fakelibs
import fakenccl
from mm3d.arrays import backend


@pytest.fixture
def cupy(monkeypatch, no_backends):
    """The backend "cupy" over host memory, with NCCL, and as many GPUs as ranks."""
    fakelibs.replace_cupy(monkeypatch, gpus=8)
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nccl=fakenccl))
    return backend.get("cupy")
