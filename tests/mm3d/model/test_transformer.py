"""The Transformer is one model, whatever scheme, grid and number of ranks it runs on."""
import math

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from mm3d.model.chains import saved_arrays
from mm3d.model.layer_specs import LinearSpec
from mm3d.model.specs import Builder
from models import PARALLELISMS, SIZES, SOME, Parallelism, data, differences, serial, train
from reference import integers, relative_error

pytestmark = pytest.mark.usefixtures("transport")

every_size = pytest.mark.parametrize("sizes, causal", [
    ("even", False), ("uneven", True), ("few", False)])
every_grid = pytest.mark.ranks(1, 4, 8, slow=(6,))    # of PARALLELISMS
every_grid_once = pytest.mark.ranks(1, 4, 8, slow=(6,), first=(8,))
some_grids = pytest.mark.ranks(*SOME, first=(8,))
# 8 ranks would show nothing more.
four_ranks = pytest.mark.ranks(1, 4, slow=(6,))


def layer_norm(x, weight, bias):
    mean = x.mean(-1, keepdims=True)
    return weight * (x - mean) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) + bias


def plain_transformer(x, state, layers, heads, causal):
    """The definition of the model, in NumPy without further ado."""
    batch, seq, hidden = x.shape
    later = np.triu(np.full((seq, seq), -np.inf if causal else 0), 1)
    for n in range(layers):
        p = {name.removeprefix(f"layers.{n}."): a for name, a in state.items()}
        z = layer_norm(x, p["ln1.weight"], p["ln1.bias"])
        qkv = z @ p["attention.qkv.weight"] + p["attention.qkv.bias"]
        q, k, v = (a.reshape(batch, seq, heads, -1) for a in np.split(qkv, 3, axis=-1))
        scores = np.exp(np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(hidden // heads) + later)
        scores /= scores.sum(-1, keepdims=True)
        z = np.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape)
        x = x + z @ p["attention.proj.weight"] + p["attention.proj.bias"]
        z = layer_norm(x, p["ln2.weight"], p["ln2.bias"])
        u = z @ p["mlp.up.weight"] + p["mlp.up.bias"]
        u = u / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u ** 3)))
        x = x + u @ p["mlp.down.weight"] + p["mlp.down.bias"]
    return x


@every_size
def test_serial_model_is_the_definition(sizes, causal):
    """Forward against plain NumPy; every gradient against central differences of that."""
    size = SIZES[sizes]
    x, dy, state = data(**size)
    model, results = (size["layers"], size["heads"], causal), serial(sizes, causal)
    assert relative_error(results["y"], plain_transformer(x, state, *model)) <= 1e-12
    rng, h = np.random.default_rng(3), 1e-5
    for name, a in {"dx": x, **state}.items():
        v = rng.standard_normal(a.shape)
        v /= np.linalg.norm(v)
        up, down = (np.vdot(dy, plain_transformer(x + t * v, state, *model) if name == "dx" else
                            plain_transformer(x, state | {name: a + t * v}, *model))
                    for t in (h, -h))
        slope = np.vdot(results[name], v)
        assert abs((up - down) / (2 * h) - slope) <= 1e-6 * np.linalg.norm(results[name]), name


def compare_with_serial(comm, parallelisms, sizes, dtype, causal, forward, backward, steps=0):
    expected = serial(sizes, causal, steps)
    for parallelism in parallelisms[comm.size]:
        with parallelism.on(comm) as scheme:
            model = mm3d.Transformer(scheme, **SIZES[sizes], dtype=dtype, causal=causal)
            results = train(model, *data(**SIZES[sizes]), steps)
            wrong = differences(model, results, expected, forward, backward)
        assert not wrong, f"{parallelism}: {wrong}"


@every_grid_once
@every_size
def test_equals_serial(comm, sizes, causal):
    """Output, input gradient and parameter gradients, on every scheme and grid."""
    compare_with_serial(comm, PARALLELISMS, sizes, "float64", causal, 1e-12, 1e-11)


@some_grids
@pytest.mark.parametrize("sizes", SIZES)
def test_float32_equals_serial(comm, sizes):
    """The same in float32, against the float64 model."""
    compare_with_serial(comm, SOME, sizes, "float32", True, 1e-5, 5e-5)


@pytest.mark.ranks(1, 4, slow=(6, 8))
def test_sgd_steps_equal_serial(comm):
    """Three steps of SGD leave the same parameters everywhere."""
    compare_with_serial(comm, PARALLELISMS, "uneven", "float64", False, 1e-11, 1e-11, steps=3)


@every_grid_once
def test_weights_are_dealt_over_all_ranks(comm):
    """Of each weight exactly 1/P lies on each rank where everything divides.  Other schemes store
    no more than their layouts say."""
    size = dict(layers=1, hidden=48, heads=24, batch=1, seq=1)
    for parallelism in PARALLELISMS[comm.size]:
        with parallelism.on(comm) as scheme:
            model = mm3d.Transformer(scheme, **size)
        for p in model.parameters:
            assert p.value.shape == p.grad.shape
            if len(p.public_shape) == 2:
                grid, faces, whole = scheme.grid, p.layout.faces, math.prod(p.public_shape)
                dealt = math.prod(grid.shape[c] for c in p.layout.letters if c not in faces)
                owns = not any(grid.coords[c] for c in faces)
                assert p.value.size * dealt == whole * owns, p.name
                assert dealt == comm.size or parallelism.name not in ("1d", "1d-sp", "2d", "3d")


@four_ranks
@pytest.mark.parametrize("sizes", ["even", "uneven"])
def test_random_numbers_do_not_depend_on_the_grid(comm, sizes):
    """The same parameters and activations, to the bit, on every grid as on one rank."""
    def drawn(scheme):
        model = mm3d.Transformer(scheme, **SIZES[sizes], seed=5, dtype="float64")
        return model, {"y": model.random("output"), "dx": model.random("gradient"),
                       **{p.name: p.value for p in model.parameters}}

    with Parallelism("serial").on(MPI.COMM_SELF) as scheme:
        expected = drawn(scheme)[1]
    for parallelism in PARALLELISMS[comm.size]:
        with parallelism.on(comm) as scheme:
            model, found = drawn(scheme)
            assert not differences(model, found, expected, 0, 0), parallelism


def test_random_numbers_depend_on_seed_and_name():
    """Fresh numbers of N(0, 1) for every seed, name and row; weights of N(0, 1 / fan-in)."""
    with Parallelism("serial").on(MPI.COMM_SELF) as scheme:
        size = dict(layers=2, hidden=32, heads=2, batch=20, seq=10)
        models = [mm3d.Transformer(scheme, **size, seed=seed, dtype="float64") for seed in (0, 1)]
    draws = [model.random(name) for model in models for name in ("x", "y")]
    assert np.array_equal(draws[0], models[0].random("x"))
    state = {(n, name): a for n, model in enumerate(models) for name, a in model.state().items()}
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
def test_state_and_load(comm):
    """`load` then `state` gives the same bits, names and shapes as documented; `gradients` the
    same names and shapes."""
    size = SIZES["uneven"]
    x, dy, state = data(**size)
    expected = serial("uneven", False)
    for parallelism in SOME[comm.size]:
        with parallelism.on(comm) as scheme:
            model = mm3d.Transformer(scheme, **size, dtype="float64")
            train(model, x, dy, state)
            found, gradients = model.state(), model.gradients()
        assert list(found) == list(state) == list(gradients)
        for name, a in found.items():
            assert np.array_equal(a, state[name]), f"{parallelism}: {name}"
            gradient = expected[name].reshape(a.shape)
            assert relative_error(gradients[name], gradient) <= 1e-11, f"{parallelism}: {name}"


@pytest.mark.ranks(1, 4, slow=(8,))
def test_micro_batches_in_flight(comm):
    """Forward, forward, backward, backward gives to the bit what one after the other does, and
    gradients add up until they are set to zero."""
    size = SIZES["uneven"]
    for parallelism in SOME[comm.size]:
        with parallelism.on(comm) as scheme:
            model = mm3d.Transformer(scheme, **size, dtype="float64", causal=True)
            x, dy = ([model.random(f"{name} {n}") for n in range(2)] for name in ("x", "dy"))
            apart, alone = [], []
            for a, da in zip(x, dy):
                model.zero_gradients()
                y, saved = model.forward(a)
                apart += [y, model.backward(da, saved)]
                alone.append([p.grad.copy() for p in model.parameters])
            model.zero_gradients()
            (y0, saved0), (y1, saved1) = (model.forward(a) for a in x)
            together = [y0, model.backward(dy[0], saved0), y1, model.backward(dy[1], saved1)]
        assert all(map(np.array_equal, apart, together)), parallelism
        for p, first, second in zip(model.parameters, *alone):
            assert np.array_equal(p.grad, first + second), f"{parallelism}: {p.name}"


@pytest.mark.ranks(1, 4, slow=(8,))
def test_inputs_are_not_overwritten(comm):
    """x, dy and what forward saved are as before, so that backward can run again."""
    for parallelism in SOME[comm.size]:
        with parallelism.on(comm) as scheme:
            model = mm3d.Transformer(scheme, **SIZES["even"], dtype="float64", causal=True)
            x, dy = model.random("x"), model.random("dy")
            y, saved = model.forward(x)
            y[...] = np.nan    # the caller's own: nothing that was saved may be part of it
            kept = [a.copy() for a in saved_arrays(saved)]
            first, second = model.backward(dy, saved), model.backward(dy, saved)
            assert np.array_equal(x, model.random("x")), parallelism
            assert np.array_equal(dy, model.random("dy")), parallelism
        assert all(map(np.array_equal, kept, saved_arrays(saved))), parallelism
        assert np.array_equal(first, second), parallelism


@four_ranks
@pytest.mark.parametrize("causal", [False, True])
def test_attention_sees_every_position(comm, causal):
    """A changed token changes all outputs of its sequence, under a causal mask those from its own
    position on, and no other to the bit; gradients flow back along the same paths.

    Positions and sequences lie on different ranks; three of five sequences are changed.
    """
    size = dict(layers=1, hidden=20, heads=5, batch=5, seq=5)
    changes = np.zeros((5, 5, 20))
    reached = {name: np.zeros(changes.shape, bool) for name in ("y", "dx")}
    for b, t in ((0, 0), (2, 2), (4, 4)):
        changes[b, t] = np.linspace(-1, 1, 20)
        reached["y"][b, t if causal else 0:] = True
        reached["dx"][b, :t + 1 if causal else 5] = True
    for parallelism in PARALLELISMS[comm.size]:
        with parallelism.on(comm) as scheme:
            model = mm3d.Transformer(scheme, **size, dtype="float64", causal=causal)
            x, dy, change = model.random("x"), model.random("dy"), model.shard(changes)
            y, saved = model.forward(x)
            found = {"y": model.forward(x + change)[0] != y,
                     "dx": model.backward(dy + change, saved) != model.backward(dy, saved)}
            for name, a in found.items():
                place = model.outer.layout().slices(scheme.grid, model.shape)
                assert np.array_equal(a, reached[name][place]), f"{parallelism}: {name}"


@four_ranks
@pytest.mark.parametrize("sizes", SIZES)
def test_two_products_restore_the_layout(comm, sizes):
    """Into the inner space and back: in exact integers the product of the global matrices, each
    time where its space says, and in the end where it was at first."""
    _, h, _, batch, seq = SIZES[sizes].values()
    X, W, V = integers((batch, seq, h), 1), integers((h, 4 * h), 2), integers((4 * h, h), 3)
    b, c = integers((4 * h,), 4), integers((h,), 5)
    for parallelism in PARALLELISMS[comm.size]:
        with parallelism.on(comm) as scheme:
            outer, inner = scheme.spaces(batch, seq)
            into, back = Builder(scheme, outer, inner, np.float64).build_layers(
                [LinearSpec("into", "up", W.shape), LinearSpec("back", "down", V.shape)])
            for layer, weight, bias in ((into, W, b), (back, V, c)):
                layer.weight.load(weight)
                layer.bias.load(bias)
            x = outer.layout().shard(X, scheme.grid)
            y, _ = into.forward(x)
            z, _ = back.forward(y)
            Y = inner.layout().unshard(y, scheme.grid, (batch, seq, 4 * h))
            Z = outer.layout().unshard(z, scheme.grid, X.shape)
        assert np.array_equal(Y, X @ W + b), parallelism
        assert z.shape == x.shape and np.array_equal(Z, Y @ V + c), parallelism


@pytest.mark.ranks(2, slow=(8,))
def test_a_gradient_is_taken_alike_where_it_lies_and_in_a_copy(comm):
    """What forward returned on some ranks, its copy on others: too large to be handed over."""
    grid = (2, 2, 2) if comm.size == 8 else (1, 2, 1)
    scheme = mm3d.scheme("3d", comm, grid=grid, backend="numpy")
    model = mm3d.Transformer(scheme, layers=1, hidden=64, heads=4, batch=8, seq=256)
    found = []
    for mixed in (False, True):
        y, saved = model.forward(model.random("x"))
        found.append(model.backward(y if mixed and comm.rank == 0 else y.copy(), saved).copy())
    scheme.grid.free()
    assert np.array_equal(*found)
