"""Each element of a model is counted on exactly one rank, whatever is divided or replicated."""
import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from pipelines import M, SIZES

MESHES = [(2, "3d", (1, 2, 1)), (1, "2d", (2, 2)), (2, "1d", (2,)), (1, "1d-sp", (4,)),
          (4, "serial", None), (1, "3d", (1, 2, 2))]


def coverage(model) -> dict:
    """How often each element of the model is counted over all ranks, by name."""
    shapes = {name: shape for every in model.comm.allgather(
        {t.name: tuple(t.shape) for t in model.trained}) for name, shape in every.items()}
    found = {}
    for name, shape in sorted(shapes.items()):
        times = np.zeros(shape, int)
        for t in model.trained:
            if t.name == name and t.counted:
                times[t.layout.slices(t.grid, t.shape)] += 1
        model.comm.Allreduce(MPI.IN_PLACE, times)
        found[name] = times
    return found


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stages, scheme, grid", MESHES)
def test_each_element_is_counted_once(comm, stages, scheme, grid):
    """Guards against norms that count replicas twice or miss a stage (pytorch/torchtitan#596,
    pytorch/torchtune#2420)."""
    mesh = mm3d.Mesh(comm, stages, scheme, grid)
    model = mm3d.Pipeline(mesh, "1f1b", **SIZES, microbatches=M)
    found = coverage(model)
    assert len(found) == 12 * SIZES["layers"]
    assert all((times == 1).all() for times in found.values())
    model.free()
    mesh.free()


@pytest.mark.ranks(4)
def test_of_copies_the_first_is_counted(comm):
    scheme = mm3d.scheme("3d", comm.Split(comm.rank % 2), grid=(2, 1, 1))
    model = mm3d.Transformer(scheme, layers=1, hidden=8, heads=2, batch=2, seq=2)
    for p in model.trained:
        p.first_copy = comm.rank % 2 == 0
    model.comm = comm
    assert all((times == 1).all() for times in coverage(model).values())
