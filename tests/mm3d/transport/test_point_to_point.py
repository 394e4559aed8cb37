"""Arrays from rank to rank: of hosts and of devices, early, late, and in any order."""
import numpy as np
import pytest

import fakecupy
from mm3d.arrays import backend
from mm3d.transport.point_to_point import PointToPoint

DTYPES = ("float64", "float32", "float16")


def exchange(comm, arrays, **how) -> PointToPoint:
    """Rank 0 sends arrays of each type, and rank 1 receives them in the opposite order."""
    messages = PointToPoint(comm, arrays, **how)
    for number, dtype in enumerate(DTYPES) if comm.rank == 0 else ():
        a = arrays.asarray(np.arange(24, dtype=dtype).reshape(4, 6) + number)
        messages.send(a[:, 1:4], 1, tag=number)    # which is not contiguous
        del a
        arrays.asarray(np.zeros((4, 3), dtype))    # takes its memory, if that were free
    for number, dtype in reversed([*enumerate(DTYPES)]) if comm.rank == 1 else ():
        found = messages.complete(messages.begin_receive((4, 3), dtype, 0, tag=number))
        assert arrays.owns(found)
        wanted = (np.arange(24, dtype=dtype).reshape(4, 6) + number)[:, 1:4]
        assert np.array_equal(arrays.to_host(found), wanted), dtype
    messages.finish()
    assert messages.bytes_sending == 0
    assert messages.peak_sending == (12 * (8 + 4 + 2) if comm.rank == 0 else 0)
    messages.free()
    return messages


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", [{}, {"synchronous": True}, {"synchronous": True, "asleep": True}],
                         ids=str)
def test_arrays_arrive(comm, how):
    assert exchange(comm, backend.get("numpy"), **how).in_place


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name, in_place", [("staged", False), ("nccl", False), ("device", True)])
def test_arrays_of_devices_arrive(comm, cupy, monkeypatch, name, in_place):
    """In place with a CUDA-aware MPI alone, else through host memory."""
    monkeypatch.setenv("MM3D_TRANSPORT", name)
    monkeypatch.setattr(fakecupy.Memory, "open", in_place)    # whether MPI can read it
    assert exchange(comm, cupy, synchronous=True).in_place == in_place
