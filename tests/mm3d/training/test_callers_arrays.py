"""Arrays of a caller: what they say counts, and what cannot count is refused by name."""
import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from gpts import SIZES, tokens_and_targets
from mm3d.training.batches import check_tokens

SHAPE = (SIZES["batch"], SIZES["seq"])


def said_alone(value) -> str:
    """The name of a case: the words of its error, since functions have none."""
    return value if isinstance(value, str) else "refused"


@pytest.fixture
def model():
    mesh = mm3d.Mesh(MPI.COMM_SELF, scheme="serial", backend="numpy")
    model = mm3d.GPT(mesh, **SIZES, dtype="float64")
    yield model
    model.free()
    mesh.free()


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.uint64])
def test_masked_targets_are_ignored_ones(model, kind):
    tokens, targets = tokens_and_targets()
    ignored = targets == -1
    masked = np.ma.array(np.where(ignored, 99, targets).astype(kind), mask=ignored)
    expected = model.step(tokens, targets), model.gradients()
    for given in (masked, list(masked)):
        assert model.step(tokens, given) == expected[0]
        for name, a in model.gradients().items():
            assert np.array_equal(a, expected[1][name])
    assert model.evaluate(np.ma.array(tokens), masked) == expected[0]
    with pytest.raises(ValueError, match="all targets are -1"):
        model.step(tokens, np.ma.masked_all(SHAPE, int))


@pytest.mark.parametrize("change, said", [
    (lambda a: np.ma.array(a, mask=a == a[1, 2]), r"tokens\[\d, \d\] is masked: 0 to 16 would"),
    (lambda a: a + 0.5, "of float64, should be whole"), (lambda a: a > 3, "of bool, should"),
    (lambda a: a * 1j, "of complex128"), (lambda a: a.astype(str), "of <U"),
    (lambda a: a.astype(object), "of object"), (lambda a: a[0, 0], r"tokens: \(\) of"),
    (lambda a: a.astype("m8[s]"), "of timedelta64"), (lambda a: a.T, r"\(5, 4\) of int64"),
    (lambda a: [[1, 2], [3]], "tokens: list of parts that make no array"),
    (lambda a: a.astype(np.uint64) + np.uint64(2 ** 63), "= 92233720368547758.. is out of range"),
    (lambda a: np.where(a == a, np.nan, 0), "of float64")], ids=said_alone)
def test_what_are_no_tokens_is_refused(model, change, said):
    tokens, targets = tokens_and_targets()
    with pytest.raises(ValueError, match=said):
        model.step(change(tokens), targets)


def test_views_and_maps_of_tokens_are_taken_as_they_are(model, tmp_path):
    tokens, targets = tokens_and_targets()
    expected = model.evaluate(tokens, targets)
    tokens.astype(np.uint16).tofile(tmp_path / "tokens")
    fixed = np.array(tokens.T, order="C").T
    fixed.flags.writeable = False
    for given in (fixed, tokens.tolist(), np.repeat(tokens, 2, axis=1)[:, ::2],
                  np.memmap(tmp_path / "tokens", np.uint16, "r", shape=SHAPE)):
        assert model.evaluate(given, targets) == expected
    assert check_tokens("tokens", tokens, SHAPE, 17) is tokens    # nothing is copied


@pytest.mark.parametrize("change, said", [
    (lambda a: a * 1j, "complex128 are no real numbers"),
    (lambda a: np.ma.array(a, mask=np.arange(a.size).reshape(a.shape) == 1), "1 elements are"),
    (lambda a: a.astype(str), "are no real numbers"), (lambda a: a.astype("m8[s]"), "timedelta"),
    (lambda a: a.astype(object), "object are no real"), (lambda a: [[1.0], [1.0, 2.0]], "no arr")],
    ids=said_alone)
def test_what_is_no_real_array_is_not_loaded(model, change, said):
    name = "layers.0.mlp.up.weight"
    state = model.state()
    before = {name: a.copy() for name, a in state.items()}
    for load, own in ((model.load, state), (model.pipeline.load, {
            name: a for name, a in state.items() if name.startswith("layers")})):
        with pytest.raises(ValueError, match=f"parameter '{name}': .*{said}"):
            load({one: a + 1 for one, a in own.items()} | {name: change(state[name])})
    with pytest.raises(ValueError, match=f"the activation: .*{said}"):
        model.pipeline.chunks[0].shard(change(np.ones((4, 5, 12))))
    assert all(np.array_equal(a, before[name]) for name, a in model.state().items())


def test_whole_numbers_and_narrow_floats_are_loaded(model):
    state = {name: np.round(3 * a).astype(np.int8) for name, a in model.state().items()}
    model.load(state)
    assert all(np.array_equal(a, state[name]) for name, a in model.state().items())
    model.load({name: np.asfortranarray(a.astype(np.float16)) for name, a in state.items()})
    assert all(np.array_equal(a, state[name]) for name, a in model.state().items())


def test_masked_blocks_are_refused(model):
    chunk = model.pipeline.chunks[0]
    x = np.ma.masked_greater(chunk.random("x"), 1)
    y, saved = chunk.forward(x.data)
    for use in (lambda: chunk.forward(x), lambda: chunk.backward(x, saved),
                lambda: chunk.backward_input(x, saved), lambda: chunk.shard(x),
                lambda: chunk.outer.layout().shard(x, chunk.grid)):
        with pytest.raises(ValueError, match="elements are masked and have no value"):
            use()
