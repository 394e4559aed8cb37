"""A CuPy over host memory, for the transports of device arrays."""
import pytest

import fakelibs
import fakenccl
from mm3d.arrays import backend, cupy_backend
from mm3d.transport import nccl, on_devices


class Nccl(nccl.NcclTransport):
    """Tells the fake which ranks make a group."""

    def __init__(self, comm, backend) -> None:
        fakenccl.line = comm
        super().__init__(comm, backend)


@pytest.fixture
def cupy(monkeypatch, no_backends):
    """The backend "cupy" over host memory, with NCCL."""
    fakelibs.replace_cupy(monkeypatch)
    monkeypatch.setattr(cupy_backend.CupyBackend, "nccl", fakenccl)
    monkeypatch.setattr(nccl, "NcclTransport", Nccl)
    monkeypatch.setattr(on_devices, "_nccl_problem", lambda places, installed: "")
    return backend.get("cupy")
