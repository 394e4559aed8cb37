"""Which GPU each rank of a node has, on a CuPy that needs none."""
import math
from contextlib import nullcontext

import numpy as np
import pytest
from mpi4py import MPI

import fakelibs
import mm3d
from mm3d import launcher
from mm3d.arrays import backend, cupy_backend


def test_one_rank_a_gpu_by_local_rank(monkeypatch):
    """And several on one where there are fewer GPUs."""
    for rank, gpus, expected in ((0, 4, 0), (3, 4, 3), (5, 4, 1), (7, 1, 0)):
        fakelibs.replace_cupy(monkeypatch, gpus)
        monkeypatch.setenv("MPI_LOCALRANKID", str(rank))
        assert cupy_backend.CupyBackend().gpu == expected


def placed(monkeypatch, gpus, **variables):
    """A node with so many GPUs, and a launcher that says this alone of ranks on nodes."""
    fakelibs.replace_cupy(monkeypatch, gpus)
    monkeypatch.setenv("MM3D_TRANSPORT", "staged")
    for name in launcher.LOCAL_RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("variables", [{}, {"MM3D_GPU_ORDER": "3,1,0,2"}])
def test_a_gpu_each_whatever_the_launcher_says(comm, monkeypatch, no_backends, variables):
    """MPI knows who shares a node's memory: with a grid of all ranks, and with a mesh of parts."""
    placed(monkeypatch, 4, **variables)
    order = [int(gpu) for gpu in variables.get("MM3D_GPU_ORDER", "0,1,2,3").split(",")]
    assert backend.get("cupy").gpu == order[0]    # nobody has told it
    mesh = mm3d.Mesh(comm, data=2, scheme="1d", backend="cupy")
    assert mesh.scheme.grid.backend is backend.get("cupy")
    assert comm.allgather(backend.get("cupy").gpu) == order
    grid = mm3d.Grid(comm, "cupy", x=4)
    assert comm.allgather(grid.backend.gpu) == order
    term = grid.backend.asarray(np.full(3, comm.rank, "float32"))
    assert grid.backend.to_host(grid.x.all_reduce(term)).tolist() == [6] * 3
    with pytest.raises(ValueError, match="has arrays on GPU") if comm.rank else nullcontext():
        grid.backend.choose_device(0, math.inf)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("make", [lambda comm: mm3d.Grid(comm, "cupy", x=4),
                                  lambda comm: mm3d.Mesh(comm, scheme="1d", backend="cupy")])
def test_arrays_on_another_gpu_are_refused_on_every_rank(comm, monkeypatch, no_backends, make):
    """Also where the GPU is the right one: else that rank would wait for the others."""
    placed(monkeypatch, 4)
    kept = backend.get("cupy").asarray(np.ones(9, "float32"))
    with pytest.raises(ValueError, match="^rank 1: this rank is number 1 of its "
                                         "node, so that its GPU is 1, and it has arrays"):
        make(comm)
    assert kept.shape == (9,)


@pytest.mark.ranks(4)
def test_an_order_that_one_rank_alone_cannot_use(comm, monkeypatch, no_backends):
    placed(monkeypatch, 4, MM3D_GPU_ORDER="0,1" if comm.rank == 2 else "3,2,1,0")
    with pytest.raises(ValueError, match="Mesh: refused on rank 2: MM3D_GPU_ORDER='0,1': give"):
        mm3d.Mesh(comm, scheme="1d", backend="cupy")


@pytest.mark.ranks(4)
def test_what_a_launcher_says_yields_to_mpi_in_the_world_alone(comm, monkeypatch, no_backends):
    """A launcher that tells every rank that it is the first."""
    placed(monkeypatch, 4, PALS_LOCAL_RANKID="0")
    grid = mm3d.Grid(comm, "cupy", x=4)
    whole = comm.size == MPI.COMM_WORLD.size
    assert comm.allgather(grid.backend.gpu) == ([0, 1, 2, 3] if whole else [0] * 4)


@pytest.mark.parametrize("order", ["0,1", "0,1,2,2", "0,1,2,4", "a", "0,1,2,-1", "3,2,1,0,", ","])
def test_an_order_that_does_not_name_each_gpu_once(monkeypatch, no_backends, order):
    placed(monkeypatch, 4, MM3D_GPU_ORDER=order)
    with pytest.raises(ValueError, match=f"MM3D_GPU_ORDER='{order}': give the numbers of the 4"):
        backend.get("cupy")
