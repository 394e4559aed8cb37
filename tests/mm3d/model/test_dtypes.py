"""No operation changes the type of the numbers: float32 in, float32 everywhere."""
import math

import ml_dtypes
import numpy as np
import pytest
from models import CHOSEN, SIZES, SOME, Parallelism, data, differences, serial, train
from reference import fits, on_grid
from support import use_only

import mm3d
from mm3d.arrays import backend
from mm3d.arrays.numpy_backend import NumpyBackend
from mm3d.grid.axis import COLLECTIVES
from mm3d.grid.split import Split
from mm3d.model.builder import Builder
from mm3d.model.chains import saved_arrays
from mm3d.model.layers import LayerNorm, Linear


class Watched(np.ndarray):
    """An array all of whose offspring are watched, too: every result, temporary and view."""

    seen: set[str] = set()

    def __array_finalize__(self, parent):
        self.seen.add(str(self.dtype))


class WatchedBackend(NumpyBackend):
    """NumPy, with every array watched from its first moment."""

    name = "watched"

    def empty(self, shape, dtype):
        return np.empty(shape, dtype).view(Watched)

    def arange(self, start, stop):
        return np.arange(start, stop).view(Watched)


class Travelled:
    """A transport that notes type and last dimension of every array that it is handed."""

    def __init__(self, transport, found: set):
        self.transport, self.found = transport, found

    def __getattr__(self, name):
        called = getattr(self.transport, name)
        if name not in COLLECTIVES:
            return called

        def noted(a, *arguments):
            self.found.add((str(a.dtype), a.shape[-1]))
            return called(a, *arguments)
        return noted


@pytest.fixture
def watched(monkeypatch):
    """A backend whose arrays' types are recorded, and that all arrays in use belong to."""
    monkeypatch.setenv("MM3D_TRANSPORT", "mpi")    # where the backend makes every array
    library = WatchedBackend()
    monkeypatch.setattr(Watched, "seen", set())
    with use_only(library):
        yield library


@pytest.mark.ranks(*SOME, first=(4, 8))
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_no_promotion(comm, watched, dtype):
    """All arrays of a step have the model's type, but for masks and positions; with float16,
    sums and attention's probabilities are float32, of which only sums travel."""
    float16 = dtype == "float16"
    for parallelism in SOME[comm.size]:
        with parallelism.on(comm, watched) as scheme:
            Watched.seen.clear()
            travelled: set[tuple[str, int]] = set()
            for axis in scheme.grid.axes.values():
                axis.transport = Travelled(axis.transport, travelled)
            model = mm3d.Transformer(scheme, **SIZES["uneven"], dtype=dtype, causal=True)
            y, saved = model.forward(model.random("x"))
            dx = model.backward(model.random("dy"), saved)
        lasting = [y, dx, *(a for p in model.parameters for a in (p.value, p.grad))]
        assert all(isinstance(a, Watched) and a.dtype == dtype for a in lasting), parallelism
        assert np.isfinite(y).all() and np.isfinite(dx).all(), parallelism
        wide = {"float32"} if float16 else {dtype}
        statistics = {str(a.dtype) for a in saved_arrays(saved)} - {dtype}
        assert statistics == wide - {dtype}, parallelism
        assert Watched.seen == {dtype, "int64", "bool"} | wide, parallelism
        assert comm.size == 1 or {kind for kind, _ in travelled} <= {dtype} | wide, parallelism
        if float16:
            assert all(kind == dtype or last <= 2 for kind, last in travelled), parallelism


@pytest.mark.ranks(4)
@pytest.mark.every_transport
@pytest.mark.parametrize("columns", [4, 9000])    # handed to all ranks in shared memory, and not
@pytest.mark.parametrize("dtype, terms, total", [
    ("float16", (40000, 40000, -40000, 0), 40000), ("float16", (2048, 1, 1, 0), 2050),
    ("bfloat16", (256, 1, 1, 0), 258)])
def test_sums_of_16_bits_over_ranks_are_rounded_once(comm, transport, columns, dtype, terms,
                                                     total):
    """Summed in 16 bits the first would be infinite, the second 2048, and the third 256."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    with on_grid(comm, x=4) as grid:
        x, term = grid.x, np.full((4, columns), terms[comm.rank], kind)
        split, found = Split(x, 0, 4), {}
        found["all_reduce"] = x.all_reduce(term.copy())
        for dim in (0, 1):
            found[f"reduce_scatter {dim}"] = x.reduce_scatter(term.copy(), dim)
            even = [term.shape[dim] // 4] * 4
            found[f"begun {dim}"] = x.begin_reduce_scatter(term.copy(), dim, even).take()
        found["uneven"] = x.reduce_scatter(term.copy(), 0, [2, 1, 0, 1])
        for name, made, add in (("placed", split.term, split.reduce_scatter),
                                ("reduce_term", split.reduce_term, lambda a: x.reduce(a, 1)),
                                ("reduce", lambda *_: term.copy(), lambda a: x.reduce(a, 1))):
            mine = made(term.shape, kind)
            mine[...] = term
            found[name] = add(mine)
        for name, a in found.items():
            assert a is None or a.dtype == kind and np.array_equal(
                a, np.full(a.shape, total)), (name, a)
        assert [name for name, a in found.items() if a is None] == (
            [] if comm.rank == 1 else ["reduce_term", "reduce"])
        del found, mine


@pytest.mark.ranks(1, 4, slow=(8,))
def test_bfloat16_is_as_exact_as_its_three_bits_less_allow(comm, transport):
    """Beside float64: about 8 times as far as float16, 2 to 32 times; with masters of float32."""
    for parallelism in SOME[comm.size]:
        found = {}
        for dtype, master in (("float64", None), ("float16", "float32"), ("bfloat16", "float32")):
            with parallelism.on(comm, backend.get("numpy")) as scheme:
                model = mm3d.Transformer(scheme, **SIZES["uneven"], dtype=dtype, master=master)
                y, saved = model.forward(model.random("x"))
                dx = model.backward(model.random("dy"), saved)
                assert (str(y.dtype), str(dx.dtype)) == (dtype, dtype)
                if master:
                    assert {str(a.dtype) for p in model.parameters
                            for a in (p.master, p.grad)} == {"float32"}
                found[dtype] = [np.asarray(a, float) for a in
                                (y, dx, *(p.grad for p in model.parameters))]
        float16, bfloat16 = (
            np.sqrt(comm.allreduce(sum(np.sum((a - b) ** 2) for a, b in zip(
                found[dtype], found["float64"])))) for dtype in ("float16", "bfloat16"))
        assert 2 * float16 < bfloat16 < 32 * float16, parallelism


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
