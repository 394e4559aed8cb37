"""One hook: several observers at once, each told of all of its events, and gone afterwards."""
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

import mm3d
from bench.checks.layer_residuals import LayerErrors
from bench.experiments.products.problem import LocalProducts, Problem, product_grid
from mm3d.tracing.events import Collective, Gemm, LayerEvent, Observer
from mm3d.tracing.observe import observed
from models import SIZES

GRIDS = {1: (1, 1, 1), 4: (1, 2, 2)}


class Noting(Observer):
    """Keeps its events, with the operands of collectives."""

    def __init__(self, *kinds, sizes=True):
        self.kinds, self.sizes, self.events, self.depth = kinds or Observer.kinds, sizes, [], 0

    def enter(self, event, barrier=None):
        self.events.append((event, self.operand if isinstance(event, Collective) else ""))
        self.depth += 1

    def leave(self):
        self.depth -= 1


@contextmanager
def made(comm, recompute="selective"):
    """A model on a grid, and a step of it: its output and gradients."""
    scheme = mm3d.scheme("3d", comm, GRIDS[comm.size], "numpy")
    model = mm3d.Transformer(scheme, **SIZES["few"], recompute=recompute)
    x, dy = model.random("input"), model.random("output gradient")

    def step():
        model.zero_gradients()
        y, saved = model.forward(x)
        dx = model.backward(dy, saved)
        return [a.copy() for a in (y, dx, *(p.grad for p in model.parameters))]
    yield model, step
    scheme.grid.free()


def places(model) -> list:
    """All that an observer puts something in front of."""
    grid, found = model.grid, []
    owners = [grid.backend, model, *grid.axes.values()]
    chains = [model.layers]
    for chain in chains:
        for layer in chain.layers:
            owners += [layer, *filter(None, [getattr(layer, "product", None)])]
            chains += [layer] if hasattr(layer, "layers") else []
    for owner in owners:
        found.append({name: id(value) for name, value in vars(owner).items()
                      if name not in ("pool", "traffic")})
    return found


@pytest.mark.ranks(*GRIDS, first=(4,))
@pytest.mark.parametrize("recompute", ["none", "full+selective"])
def test_observers_at_once_see_what_each_sees_alone(comm, recompute):
    with made(comm, recompute) as (model, step):
        def fresh():
            return [Noting(), Noting(Collective, LayerEvent, sizes=False), LayerErrors(model, 3),
                    Noting(Gemm)]
        plain, before, alone = step(), places(model), fresh()
        for observer in alone:
            with observed(model.grid, observer, model):
                assert all(map(np.array_equal, step(), plain))
            assert places(model) == before
        # An observer of arrays has the gradients of vectors summed layer by layer, not joined.
        everyone, noting = fresh(), [one for one in fresh() if isinstance(one, Noting)]
        for together in everyone, noting:
            with ExitStack() as stack:
                for observer in together:
                    stack.enter_context(observed(model.grid, observer, model))
                assert all(map(np.array_equal, step(), plain))
            assert places(model) == before
    (one,), (other,) = ([every for every in observers if isinstance(every, LayerErrors)]
                        for observers in (alone, everyone))
    assert one.errors == other.errors and len(one.errors) > 20
    for one, other in zip([one for one in alone if isinstance(one, Noting)], noting, strict=True):
        assert {type(event) for event, _ in one.events} <= {*one.kinds}
        assert one.depth == other.depth == 0 and len(one.events) == len(other.events) > 4
        for (mine, operand), (theirs, same) in zip(one.events, other.events):
            if isinstance(mine, Collective) and not one.sizes:    # another has asked for them
                theirs = theirs._replace(bytes=0, pieces=False)
            assert (mine, operand) == (theirs, same)


@pytest.mark.ranks(*GRIDS)
def test_observers_leave_in_any_order_and_after_a_failure(comm):
    with made(comm) as (model, step):
        before, first, second = places(model), Noting(), Noting()
        watching = [observed(model.grid, one, model) for one in (first, second)]
        for context in watching:
            context.__enter__()
        watching[0].__exit__(None, None, None)
        step()
        assert first.events == [] and second.events
        watching[1].__exit__(None, None, None)
        assert places(model) == before
        with pytest.raises(ZeroDivisionError), observed(model.grid, first, model):
            with observed(model.grid, second, model):
                step()
                1 / 0
        assert places(model) == before and first.depth == second.depth == 0


@pytest.mark.ranks(1)
def test_who_sees_arrays_of_a_forward_before_its_time(comm):
    """A backward whose forward was not observed goes on, and nothing is said of it."""
    with made(comm, "none") as (model, _):
        _, saved = model.forward(model.random("input"))
        look = LayerErrors(model, 3)
        with observed(model.grid, look, model):
            model.backward(model.random("output gradient"), saved)
        assert not any("dA" in name for name in look.errors)


@pytest.mark.ranks(1, 4)
def test_local_products_are_replayed_in_their_order(comm):
    """Those of the linear layers, and no stacks of attention's."""
    scheme = "2d" if comm.size == 4 else "3d"
    problem = Problem(scheme, "abt", product_grid(scheme, comm, backend="numpy"), (12, 20, 8),
                      "float32")
    noting, before = Noting(Gemm), vars(problem.grid.backend).copy()
    with observed(problem.grid, noting):
        replay = LocalProducts(problem.backward, problem.grid, "float32")
    assert vars(problem.grid.backend) == before
    assert [(a.shape[0], a.shape[1], b.shape[1]) for a, b, _ in replay.calls] == [
        (event.m, event.n, event.k) for event, _ in noting.events]
