"""The Transformer is one model, whatever scheme, grid and number of ranks it runs on."""
import math

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from llamas import plain_layers
from mm3d.model.architecture import PLAIN
from mm3d.model.chains import saved_arrays
from models import (EACH_ONCE, PARALLELISMS, SIZES, SOME, Parallelism, data, differences, serial,
                    train, wrong_slopes)
from reference import relative_error

pytestmark = pytest.mark.usefixtures("transport")

every_grid_once = pytest.mark.ranks(1, 4, 8, slow=(6,), first=(8,))    # of EACH_ONCE


@pytest.mark.parametrize("sizes, causal", [("even", False), ("uneven", True), ("few", False)])
def test_serial_model_is_the_definition(sizes, causal):
    """Forward against plain NumPy; every gradient against central differences of that."""
    size = SIZES[sizes]
    x, dy, state = data(**size)
    results = serial(sizes, causal)

    def plain(x, state):
        return plain_layers(x, state, size["layers"], size["heads"], PLAIN, causal)
    assert relative_error(results["y"], plain(x, state)) <= 1e-12
    assert not wrong_slopes(results, dy, plain, x, state)


@every_grid_once
@pytest.mark.parametrize("sizes, causal", [
    ("uneven", True), *(pytest.param(sizes, False, marks=pytest.mark.slow)
                        for sizes in ("even", "few"))])
def test_equals_serial(comm, sizes, causal):
    """Output, input gradient and parameter gradients, on every scheme and grid, before and after
    a step of SGD; and those of float32 beside float64."""
    for parallelism in EACH_ONCE[comm.size]:
        with parallelism.on(comm) as scheme:
            for dtype, steps, *limits in (("float64", 1, 1e-12, 1e-11),
                                          ("float32", 0, 1e-5, 5e-5)):
                model = mm3d.Transformer(scheme, **SIZES[sizes], dtype=dtype, causal=causal)
                results = train(model, *data(**SIZES[sizes]), steps)
                wrong = differences(model, results, serial(sizes, causal, steps), *limits)
                assert not wrong, f"{parallelism}, {dtype}: {wrong}"


@every_grid_once
def test_parameters_and_random_numbers_of_a_grid(comm):
    """The same numbers, to the bit, on every grid as on one rank.  Of each weight exactly 1/P lies
    on each rank where everything divides.  Other schemes store no more than their layouts say."""
    def drawn(scheme):
        model = mm3d.Transformer(scheme, **SIZES["uneven"], seed=5, dtype="float64")
        return model, {"y": model.random("output"), "dx": model.random("gradient"),
                       **{p.name: p.value for p in model.parameters}}

    with Parallelism("serial").on(MPI.COMM_SELF) as scheme:
        expected = drawn(scheme)[1]
    for parallelism in EACH_ONCE[comm.size]:
        with parallelism.on(comm) as scheme:
            assert not differences(*drawn(scheme), expected, 0, 0), parallelism
            model = mm3d.Transformer(scheme, layers=1, hidden=48, heads=24, batch=1, seq=1)
        for p in model.parameters:
            assert p.value.shape == p.grad.shape
            if len(p.public_shape) == 2:
                grid, faces, whole = scheme.grid, p.layout.faces, math.prod(p.public_shape)
                dealt = math.prod(grid.shape[c] for c in p.layout.letters if c not in faces)
                owns = not any(grid.coords[c] for c in faces)
                assert p.value.size * dealt == whole * owns, p.name
                assert dealt == comm.size or parallelism.name not in ("1d", "1d-sp", "2d", "3d")


def test_random_numbers_depend_on_seed_and_name():
    """Fresh numbers of N(0, 1) for every seed, name and row; weights of N(0, 1 / fan-in)."""
    with Parallelism("serial").on(MPI.COMM_SELF) as scheme:
        size = dict(layers=2, hidden=32, heads=2, batch=20, seq=10)
        models = [mm3d.Transformer(scheme, **size, seed=seed, dtype="float64") for seed in (0, 1)]
        draws = [model.random(name) for model in models for name in ("x", "y")]
        assert np.array_equal(draws[0], models[0].random("x"))
        state = {(n, name): a for n, model in enumerate(models)
                 for name, a in model.state().items()}
    for numbers in (draws, [a for a in state.values() if a.ndim == 2]):
        numbers = np.concatenate([a.ravel() for a in numbers])
        assert len(np.unique(numbers)) == len(numbers)
    assert abs(np.mean(draws)) < 0.02 and abs(np.std(draws) - 1) < 0.02
    for (_, name), a in state.items():
        if a.ndim == 2:
            assert abs(a.std() * a.shape[0] ** 0.5 - 1) < 0.1, name
        else:
            assert 0 < np.abs(a - name.endswith("weight")).max() < 0.5, name


@pytest.mark.parametrize("sizes, batch, rows", [
    ((2, 2, 2), 8, ("xy,", "xz,")), ((2, 2, 2), 6, ("x,y", "x,z")), ((1, 1, 1), 1, ("xy,", "xz,")),
    ((4, 2, 1), 4, ("x,y", "x,z")), ((1, 2, 4), 2, ("x,y", "x,z")), ((1, 2, 4), 4, ("xy,", "xz,")),
    ((4, 4, 4), 16, ("xy,", "xz,")), ((4, 4, 4), 24, ("x,y", "x,z"))])    # 24: Table 2
def test_rows_are_whole_sequences_where_the_batch_allows(sizes, batch, rows):
    """That is, where X Y and X Z divide it; else positions are divided, too."""
    outer, inner = mm3d.SCHEMES["3d"].layouts(dict(zip("xyz", sizes)), batch, 16)
    assert (outer[0], inner[0]) == rows


@pytest.mark.ranks(1, 4, slow=(8,))
def test_micro_batches_in_flight(comm):
    """Forward, forward, backward, backward gives to the bit what one after the other does, and
    gradients add up until they are set to zero.  x, dy and what forward saved are as before, so
    that backward can run again."""
    for parallelism in (SOME if comm.size > 1 else PARALLELISMS)[comm.size]:
        with parallelism.on(comm) as scheme:
            model = mm3d.Transformer(scheme, **SIZES["uneven"], dtype="float64", causal=True)
            x, dy = ([model.random(f"{name} {n}") for n in range(2)] for name in ("x", "dy"))
            apart, alone = [], []
            for a, da in zip(x, dy):
                model.zero_gradients()
                y, saved = model.forward(a)
                apart += [y, model.backward(da, saved)]
                alone.append([p.grad.copy() for p in model.parameters])
            model.zero_gradients()
            (y0, saved0), (y1, saved1) = (model.forward(a) for a in x)
            kept = [a.copy() for a in saved_arrays(saved0)]
            together = [y0.copy(), model.backward(dy[0], saved0), y1,
                        model.backward(dy[1], saved1)]
            assert all(map(np.array_equal, apart, together)), parallelism
            for p, first, second in zip(model.parameters, *alone):
                assert np.array_equal(p.grad, first + second), f"{parallelism}: {p.name}"
            y0[...] = np.nan    # the caller's own: nothing that was saved may be part of it
            assert np.array_equal(model.backward(dy[0], saved0), apart[1]), parallelism
            assert all(map(np.array_equal, kept, saved_arrays(saved0))), parallelism
            for name, arrays in (("x", x), ("dy", dy)):
                assert all(np.array_equal(a, model.random(f"{name} {n}"))
                           for n, a in enumerate(arrays)), parallelism
