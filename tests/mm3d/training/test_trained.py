"""Each element of a model is counted on exactly one rank, whatever is divided or replicated."""
import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from mm3d.model.parameters import Parameter
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


@pytest.mark.ranks(4)
def test_of_copies_the_first_is_counted(comm):
    scheme = mm3d.scheme("3d", comm.Split(comm.rank % 2), grid=(2, 1, 1))
    model = mm3d.Transformer(scheme, layers=1, hidden=8, heads=2, batch=2, seq=2)
    for p in model.trained:
        p.first_copy = comm.rank % 2 == 0
    model.comm = comm
    assert all((times == 1).all() for times in coverage(model).values())


@pytest.fixture
def model():
    """A Transformer on this rank alone, with the gradients of a step that is over."""
    scheme = mm3d.scheme("serial", MPI.COMM_SELF)
    model = mm3d.Transformer(scheme, layers=1, hidden=8, heads=2, batch=2, seq=2)
    model.backward(model.random("dy"), model.forward(model.random("x"))[1])
    return model


def test_a_gradient_without_a_term_is_zero(model):
    """Also after a failure, when no later term may take the place of what is there."""
    used = model.parameters[0]
    with pytest.raises(KeyboardInterrupt), model.new_gradients():
        used.accumulate(np.ones_like(used.grad))
        raise KeyboardInterrupt
    for p in model.parameters:
        assert (p.grad == (p is used)).all(), p.name
        p.accumulate(np.ones_like(p.grad))
        p.accumulate(None)
        assert (p.grad == 1 + (p is used)).all(), p.name


def test_terms_may_have_the_memory_of_the_gradient(model):
    """The first alone, which may be changed further; no gradient is lost without a word."""
    p = model.parameters[0]
    given = p.grad.shape, p.grad.dtype
    assert p.empty_gradient(*given) is not p.grad
    with model.new_gradients():
        others = [p.empty_gradient(given[0][::-1] + (1,), given[1]),
                  p.empty_gradient(given[0], "float64")]
        first, second = (p.empty_gradient(*given) for _ in range(2))
        assert first is p.grad and not any(np.shares_memory(a, first) for a in (*others, second))
        first[...], second[...] = 1, 2
        p.accumulate(first)
        p.accumulate(second)
    assert (p.grad == 3).all()
    for change in (lambda a: 5 * a, lambda a: a.reshape(1, *a.shape)[0]):
        with model.new_gradients():
            term = p.empty_gradient(*given)
            term[...] = 2
            expected = change(term.copy())
            p.accumulate(change(term))
        assert np.array_equal(p.grad, expected)
    with model.new_gradients(), pytest.raises(ValueError, match=f"{p.name}: another term"):
        first = p.empty_gradient(*given)
        p.accumulate(second)
        p.accumulate(first)


def test_products_write_the_first_gradient_where_it_stays(model, monkeypatch):
    """All matrices, without a copy; a second micro-batch has memory of its own."""
    seen, accumulate = [], Parameter.accumulate

    def look(self, gradient):
        seen.append((self.name.rpartition(".")[2], gradient is self.grad))
        accumulate(self, gradient)
    monkeypatch.setattr(Parameter, "accumulate", look)
    with model.new_gradients():
        for in_place in (True, False):
            seen.clear()
            model.backward(model.random("dy"), model.forward(model.random("x"))[1])
            matrices = [there for name, there in seen if name == "weight"]
            assert matrices.count(in_place) >= 4 and len(seen) == len(model.parameters)
            assert sum(there for _, there in seen) == 4 * in_place
