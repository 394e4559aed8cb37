"""The model where ranks share memory: on several nodes, step after step, whoever is late."""
import os
import random
import time

import numpy as np
import pytest

import mm3d
from models import SIZES, data, differences, random_state, serial, train

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"),
                                reason="this system has no memfd_create")
EVEN = SIZES["even"]


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    monkeypatch.setenv("MM3D_TRANSPORT", "shared")


@pytest.mark.ranks(8)
@pytest.mark.parametrize("node_size", [3, *(pytest.param(n, marks=pytest.mark.slow)
                                            for n in (2, 4))])
@pytest.mark.parametrize("grid, options", [
    ((2, 2, 2), {}), *(pytest.param(*one, marks=pytest.mark.slow) for one in (
        ((2, 2, 2), {"overlap": True}), ((4, 2, 1), {"keep": "both"}),
        ((1, 4, 2), {"rows": "positions"})))])
def test_a_step_on_several_nodes_equals_serial(comm, monkeypatch, node_size, grid, options):
    """Some lines share memory and some go by MPI, of one direction or of several."""
    monkeypatch.setenv("MM3D_NODE_SIZE", str(node_size))
    scheme = mm3d.scheme("3d", comm, grid, "numpy", **options)
    names = {axis.transport.name for axis in scheme.grid.axes.values() if axis.size > 1}
    assert set.union(*comm.allgather(names)) == {"mpi", "shared"}
    model = mm3d.Transformer(scheme, **SIZES["uneven"], dtype="float64", causal=True)
    results = train(model, *data(**SIZES["uneven"]), steps=1)
    assert not differences(model, results, serial("uneven", True, 1), 1e-12, 1e-11)


@pytest.mark.ranks(8)
@pytest.mark.parametrize("options", [{"keep": "both", "rows": "positions"},
                                     pytest.param({}, marks=pytest.mark.slow)])
def test_steps_after_the_second_make_no_new_region(comm, options):
    """What was given back in one is taken again in the next."""
    scheme = mm3d.scheme("3d", comm, backend="numpy", **options)
    model = mm3d.Transformer(scheme, **EVEN)
    x, dy = model.random("x"), model.random("dy")
    memories = [axis.transport.memory for axis in scheme.grid.axes.values()]
    regions = []
    for _ in range(5):
        model.backward(dy, model.forward(x)[1])
        regions.append([len(memory.regions) for memory in memories])
    assert min(regions[1]) > 0 and regions[1:] == regions[1:2] * 4


def trained(comm, monkeypatch, grid: tuple[int, int, int], backward: bool,
            late: bool) -> list[np.ndarray]:
    """Outputs and gradients of a model whose weights change in place after each pass.

    Its products are `late` at random, differently on each rank, or else all ranks wait for each
    other before and after each change.
    """
    scheme, chance, found = mm3d.scheme("3d", comm, grid, "numpy"), random.Random(comm.rank), []
    model = mm3d.Transformer(scheme, **EVEN, dtype="float64")
    x, dy, state = model.random("x"), model.random("dy"), random_state(EVEN["layers"],
                                                                       EVEN["hidden"])

    def gemm(*arrays, multiply=scheme.grid.backend.gemm):
        if late and chance.random() < 0.3:
            time.sleep(chance.random() / 100)
        return multiply(*arrays)

    with monkeypatch.context() as patch:
        patch.setattr(scheme.grid.backend, "gemm", gemm, raising=False)
        for step in range(8):
            y, saved = model.forward(x)
            found.append(y.copy())
            if backward:
                found.append(model.backward(dy, saved).copy())
            late or comm.Barrier()
            if backward:
                for p in model.parameters:
                    p.value -= 0.01 * p.grad
            else:
                model.load({name: (step + 2) * a for name, a in state.items()})
            late or comm.Barrier()
    found += [p.grad.copy() for p in model.parameters]
    return found


@pytest.mark.ranks(8)
@pytest.mark.parametrize("grid", [(2, 2, 2), pytest.param((8, 1, 1), marks=pytest.mark.slow)])
@pytest.mark.parametrize("backward", [True, False])
def test_no_weight_changes_before_all_have_read_it(comm, monkeypatch, grid, backward):
    """A rank that is done changes its blocks, which others multiply with where they lie: the same
    bits whoever is late.

    After forward alone, the ranks that read a weight meet when others are loaded.
    """
    expected = trained(comm, monkeypatch, grid, backward, late=False)
    found = trained(comm, monkeypatch, grid, backward, late=True)
    assert all(map(np.array_equal, found, expected))
