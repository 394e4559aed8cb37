"""Another function makes the products of a backend for a while."""

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from bench.experiments.products.fortran_blas import use_gemm
from mm3d.arrays import backend
from mm3d.arrays.numpy_backend import NumpyBackend
from mm3d.tracing.events import Gemm, Observer
from mm3d.tracing.observe import observed
from used_backends import use_only


class Products(Observer):
    """Counts products."""

    kinds = (Gemm,)
    count = 0

    def enter(self, event, meet=None):
        self.count += 1


@pytest.fixture
def library():
    with use_only(NumpyBackend()):
        yield backend.get("numpy")


def test_observers_outlive_it(library):
    grid, observer = mm3d.Grid(MPI.COMM_SELF, library, x=1), Products()
    a, out = np.ones((2, 2)), np.empty((2, 2))
    with observed(grid, observer):
        with use_gemm(library, lambda a, b, out: out.fill(7)):
            library.gemm(a, a, out)
            assert (out == 7).all()
        library.gemm(a, a, out)
        assert (out == 2).all() and observer.count == 1
    assert "gemm" not in vars(library)
    with use_gemm(library, lambda a, b, out: out.fill(7)):
        with observed(grid, observer):
            library.gemm(a, a, out)
        assert (out == 7).all() and observer.count == 2
    assert "gemm" not in vars(library)
