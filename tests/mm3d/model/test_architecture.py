"""Transformers of other architectures are what they are defined to be, on every grid."""
import functools

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from llamas import ARCHITECTURES, SIZES, architecture, plain_layers
from mm3d.model import cost
from models import (EACH_ONCE, Parallelism, activation, different, differences, passes, train,
                    wrong_slopes)
from reference import relative_error

X, DY = (activation(SIZES["batch"], SIZES["seq"], SIZES["hidden"], seed) for seed in (1, 2))


def make(scheme, name: str, **more) -> mm3d.Transformer:
    fields = SIZES | dict(dtype="float64", causal=True) | more
    return mm3d.Transformer(scheme, architecture=architecture(name), **fields)


@functools.cache
def serial(name: str, **more) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Outputs and gradients on one rank, and the state that gives them."""
    with Parallelism("serial").on(MPI.COMM_SELF, "numpy") as scheme:
        model = make(scheme, name, **more)
        state = model.state()
        return {key: np.array(a) for key, a in train(model, X, DY, state).items()}, state


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_layers_are_their_definition(name, causal):
    """Forward against plain NumPy; every gradient against central differences of that."""
    if name == "window" and not causal:
        pytest.skip("windows are causal")
    results, state = serial(name, causal=causal)

    def plain(x, state):
        return plain_layers(x, state, SIZES["layers"], SIZES["heads"], architecture(name), causal)
    assert relative_error(results["y"], plain(X, state)) <= 1e-12
    assert not wrong_slopes(results, DY, plain, X, state)


@pytest.mark.ranks(1, 4, 8, slow=(6,), first=(8,))
def test_equals_serial_on_every_grid(comm):
    """Llama on every scheme and grid, and another architecture on each; on 8 ranks one of all on
    each in turn. 3 heads of keys, or 1, on up to 8 ranks, so that some have none."""
    every, others = [*ARCHITECTURES], [name for name in ARCHITECTURES if name != "llama"]
    ahead = [Parallelism("3d", (2, 1, 4), {"overlap": n}) for n in (1, 2)] * (comm.size == 8)
    for number, parallelism in enumerate([*EACH_ONCE[comm.size], *ahead]):
        with parallelism.on(comm) as scheme:
            for name in ((every[number % len(every)],) if comm.size == 8 else
                         ("llama", others[number % len(others)])):
                expected, state = serial(name)
                model = make(scheme, name)
                wrong = differences(model, train(model, X, DY, state), expected, 1e-12, 1e-11)
                assert not wrong, f"{parallelism}, {name}: {wrong}"


@pytest.mark.ranks(1, 4, first=(4,))
@pytest.mark.parametrize("name", ["llama", "biases", "window"])
def test_recomputation_and_halves_give_the_same_bits_and_the_words_of_closed_forms(comm, name):
    """Also in float16 with masters, with the rows of sequences divided."""
    grid = {1: (1, 1, 1), 4: (1, 2, 2)}[comm.size]
    with Parallelism("3d", grid, {"rows": "positions"}).on(comm) as scheme:
        for types in (dict(dtype="float64"), dict(dtype="float16", master="float32")):
            expected = passes(make(scheme, name, **types), "Fx Dx")
            assert all(np.isfinite(a).all() for a in expected.values())
            assert not different(passes(make(scheme, name, **types), "Fx Bx Wx"), expected)
            for policy in ("selective", "full", "uniform:2+selective"):
                model = make(scheme, name, **types, recompute=policy)
                scheme.grid.reset_traffic()
                assert not different(passes(model, "Fx Dx"), expected), policy
                words = sum(comm.allreduce(one.words)
                            for _, one in sorted(scheme.grid.traffic().items()))
                closed = cost.words("3d", scheme.grid.shape, model.sizes, policy,
                                    rows="positions")
                assert words == sum(sum(of.values()) for of in closed.values()), policy


def test_float16_is_near_float64():
    """Sums and attention in float32: what is far beyond rounding would be a wrong type."""
    expected, state = serial("llama")
    with Parallelism("serial").on(MPI.COMM_SELF, "numpy") as scheme:
        found = train(make(scheme, "llama", dtype="float16", master="float32"), X, DY, state)
    for key in ("y", "dx", "layers.0.attention.qkv.weight", "layers.1.ln2.weight"):
        assert relative_error(found[key].astype(float), expected[key]) <= 0.01, key


@pytest.mark.parametrize("count, layers, hidden, heads, vocab, fields", [
    (8030261248, 32, 4096, 32, 128256, dict(kv_heads=8, inner=14336)),    # Llama 3.1 8B
    (7241732096, 32, 4096, 32, 32000, dict(kv_heads=8, inner=14336)),    # Mistral 7B
    (7615616512, 28, 3584, 28, 152064, dict(kv_heads=4, inner=18944, biases="qkv"))])  # Qwen2 7B
def test_published_models_have_as_many_parameters(count, layers, hidden, heads, vocab, fields):
    how = mm3d.Architecture(**dict(norm="rms", positions="rotary", perceptron="swiglu",
                                   biases="none") | fields)
    sizes = mm3d.ModelSizes(layers, hidden, heads, 1, 1, how)
    assert cost.parameters(sizes) + (2 * vocab + 1) * hidden == count
