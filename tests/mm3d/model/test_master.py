"""Float32 masters of models in 16 bits: gradients and parameters keep what 16 bits would lose."""
import math

import numpy as np
import pytest

import mm3d
from mm3d.model.builder import Builder
from mm3d.model.layers import LayerNorm, Linear
from models import CHOSEN, SIZES, Parallelism, data, differences, serial, train
from reference import fits

MIXED = dict(dtype="float16", master="float32")
RANKS = (1, 4)


def schemes(comm):
    """Each scheme that these ranks fit; the paper's on its lines, too."""
    lines = [Parallelism("3d", grid) for grid in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2))
             if math.prod(grid) == comm.size]
    yield from CHOSEN.get(comm.size) or [Parallelism(name) for name in mm3d.SCHEMES
                                         if name != "serial" and fits(name, comm.size)]
    yield from lines


@pytest.mark.ranks(*RANKS)
def test_gradients_of_a_linear_layer_are_exact(comm):
    """Sums of 4096 products, over rows and over ranks, which float16 rounds to even numbers."""
    rng = np.random.default_rng(5)
    X, DY = (1 + 2 * rng.integers(0, 2, (64, 64, n)).astype(float) for n in (8, 12))
    DY[0, 0] += 1    # so that sums are odd
    expected = np.einsum("bsi,bso->io", X, DY)
    assert (expected.astype(np.float16) != expected).mean() > 0.3
    for parallelism in schemes(comm):
        for way in ("up", "down"):
            with parallelism.on(comm, "numpy") as scheme:
                outer, inner = scheme.spaces(64, 64)
                spaces = (outer, inner) if way == "up" else (inner, outer)
                layer = Linear(Builder(scheme, outer, inner, np.float16, np.float32), "linear",
                               way, (8, 12))
                layer.weight.load(np.ones((8, 12)))
                layer.bias.load(np.ones(12))
                x, dy = (space.layout().shard(a.astype(np.float16), scheme.grid)
                         for space, a in zip(spaces, (X, DY)))
                y, saved = layer.forward(x)
                dx = layer.backward(dy, saved)
                assert y.dtype == dx.dtype == np.float16, parallelism
                dW, db = (p.gather(p.grad) for p in layer.parameters)
            assert dW.dtype == np.float32 and np.array_equal(dW, expected), (parallelism, way)
            assert db.dtype == np.float32 and np.array_equal(db, DY.sum((0, 1))), parallelism


@pytest.mark.ranks(*RANKS)
def test_gradients_of_a_norm_are_summed_in_float32(comm):
    """Those of gamma and beta, against the sums of the very rows that the layer has."""
    rng = np.random.default_rng(6)
    X, DY = rng.standard_normal((2, 64, 64, 8)).astype(np.float16)
    for parallelism in schemes(comm):
        with parallelism.on(comm, "numpy") as scheme:
            space, inner = scheme.spaces(64, 64)
            build = Builder(scheme, space, inner, np.float16, np.float32)
            layer = LayerNorm(build, "norm", 8, 1e-5)
            layer.weight.load(np.ones(8))
            layer.bias.load(np.zeros(8))
            layout = space.layout()
            y, saved = layer.forward(layout.shard(X, scheme.grid))
            layer.backward(layout.shard(DY, scheme.grid), saved)
            xhat = layout.unshard(y, scheme.grid, X.shape).astype(float)    # gamma 1, beta 0
            dgamma, dbeta = (p.gather(p.grad) for p in layer.parameters)
        for found, expected in ((dgamma, (DY * xhat).sum((0, 1))),
                                (dbeta, DY.astype(float).sum((0, 1)))):
            assert found.dtype == np.float32
            assert np.abs(found - expected).max() <= 1e-3, parallelism    # float16: 2e-2


@pytest.mark.ranks(*RANKS)
def test_the_model_is_the_serial_one(comm):
    """To the precision of its products, with everything stored in float32."""
    for parallelism in schemes(comm):
        with parallelism.on(comm, "numpy") as scheme:
            model = mm3d.Transformer(scheme, **SIZES["uneven"], **MIXED, causal=True)
            drawn = model.state()
            results = train(model, *data(**SIZES["uneven"]))
            loaded = model.state()
            wrong = differences(model, results, serial("uneven", True), 0.01, 0.05)
            kinds = {a.dtype.name for a in (*model.gradients().values(), *loaded.values())}
            assert {p.value.dtype.name for p in model.parameters} == {"float16"}
            assert all(np.array_equal(p.value, p.master.astype(np.float16))
                       for p in model.parameters), parallelism
        assert not wrong, f"{parallelism}: {wrong}"
        assert kinds == {"float32"}
        for name, value in data(**SIZES["uneven"])[2].items():
            assert np.array_equal(loaded[name], value.astype(np.float32)), name
            assert not np.array_equal(drawn[name], drawn[name].astype(np.float16)), name


@pytest.mark.ranks(1, 2)
def test_small_steps_add_up(comm):
    """Each is too small for float16, whose numbers around 1 are 1/1024 apart."""
    with Parallelism("3d", (1, comm.size, 1)).on(comm, "numpy") as scheme:
        model = mm3d.Transformer(scheme, **SIZES["even"], **MIXED)
        model.load({name: np.ones_like(a) for name, a in model.state().items()})
        for step in range(64):
            for p in model.parameters:
                p.master += 1 / 4096
            model.refresh()
        for p in model.parameters:
            assert np.all(p.value == np.float16(1 + 64 / 4096)), p.name
            p.accumulate(np.full_like(p.grad, 2048))
            p.accumulate(np.ones_like(p.grad))
            assert np.all(p.grad == 2049), p.name
