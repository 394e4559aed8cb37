"""GPTs of other architectures are what they are defined to be; what states and refuses them."""
import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from llamas import architecture, norm, plain_layers
from mm3d.model.stack import Stack

SIZES = dict(layers=2, hidden=10, heads=6, vocab=17, batch=4, seq=5)


def test_the_loss_is_that_of_its_definition():
    """Embedding, layers, last norm and head of a Llama in plain NumPy; without a table of
    positions."""
    how, rng = architecture("llama"), np.random.default_rng(0)
    mesh = mm3d.Mesh(MPI.COMM_SELF, scheme="serial")
    model = mm3d.GPT(mesh, **SIZES, architecture=how, dtype="float64", tied=False)
    state = {name: 5 * a for name, a in model.state().items()}
    model.load(state)
    tokens, targets = rng.integers(0, 17, (2, 4, 5))
    x = plain_layers(state["embedding.weight"][tokens], state, SIZES["layers"], SIZES["heads"],
                     how)
    logits = norm(x, state, "norm", how) @ state["head.weight"]
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(logits, targets[..., None], -1).mean()
    assert "positions.weight" not in state
    assert model.step(tokens, targets) == pytest.approx(expected, rel=1e-13)


# --- What is stated, and what is refused ----------------------------------------------------

def test_keywords_make_the_architecture():
    """Alone, or of a stack that has another one already; in a configuration too."""
    scheme = mm3d.scheme("serial", MPI.COMM_SELF)
    sizes = dict(layers=1, hidden=8, heads=4, batch=2, seq=4)
    stack = Stack.of(sizes | dict(kv_heads=2, norm="rms"))
    assert stack.architecture == mm3d.Architecture(kv_heads=2, norm="rms")
    more = mm3d.Transformer(scheme, stack, norm="layer", inner=5)
    assert more.stack.architecture == mm3d.Architecture(kv_heads=2, inner=5)
    assert mm3d.Config.of(sizes | dict(biases="qkv")).model.architecture.biases == "qkv"
    assert mm3d.Architecture(rotary_scaling=[8, 1, 4, 64]) == mm3d.Architecture(
        rotary_scaling=(8.0, 1.0, 4.0, 64.0))


def test_sizes_know_their_architecture():
    sizes = mm3d.ModelSizes(2, 12, 6, 8, 16, mm3d.Architecture(kv_heads=2, head=4, inner=9))
    assert mm3d.ModelSizes(**sizes) == sizes and {sizes: 1}[mm3d.ModelSizes(**sizes)] == 1
    assert (sizes.head, sizes.kv_heads, sizes.group, sizes.inner) == (4, 2, 3, 9)
    plain = mm3d.ModelSizes(2, 12, 6, 8, 16)
    assert len(plain) == len([*plain]) == 5 and len(sizes) == len([*sizes]) == 6
    assert (plain.head, plain.kv_heads, plain.group, plain.inner) == (2, 6, 1, 48)
    assert mm3d.ModelSizes.from_settings({"seed": 0, **plain}) == plain and plain.tokens == 128
    with pytest.raises(KeyError):
        plain["vocab"]


@pytest.mark.parametrize("fields, said", [
    (dict(norm="batch"), "norm='batch' is unknown: choose one of layer, rms"),
    (dict(biases=None), "biases=None is unknown: choose one of all, qkv, none"),
    (dict(kv_heads=4), "kv_heads=4 does not divide heads=6: 1, 2, 3, 6 would do"),
    (dict(inner=0), "inner=0 should be a whole number of at least 1, or None"),
    (dict(epsilon=0), "epsilon=0 should be a number above 0"),
    (dict(positions="rotary", head=3), "positions='rotary' rotates pairs .* a head has 3"),
    (dict(positions="rotary", rotary_scaling=(8, 4, 1, 8192)), "low below high"),
    (dict(rotary_scaling=(8, 1, 4, 8192)), "has no effect on positions='learned'"),
    (dict(architecture="llama"), "architecture='llama' should be mm3d.Architecture"),
    (dict(window=3, causal=False), "window=3 .*: causal=True would do, or window=None")], ids=str)
def test_what_is_no_architecture_is_named(fields, said):
    scheme = mm3d.scheme("serial", MPI.COMM_SELF)
    sizes = dict(layers=1, hidden=12, heads=6, batch=2, seq=4, causal=True)
    with pytest.raises(ValueError, match=said):
        mm3d.Transformer(scheme, **(sizes | fields))


def test_who_knows_the_plain_one_alone_says_so():
    mm3d.Architecture().require_plain("it")
    with pytest.raises(ValueError, match=r"it knows no Transformer with norm='rms', inner=7: the"):
        mm3d.Architecture(norm="rms", inner=7).require_plain("it")


def test_a_definition_names_the_architecture():
    scheme = mm3d.scheme("serial", MPI.COMM_SELF)
    sizes = dict(layers=1, hidden=12, heads=6, batch=2, seq=4)
    plain, rms = (mm3d.Transformer(scheme, **sizes, **more).definition.function
                  for more in ({}, dict(norm="rms", epsilon=1e-6)))
    assert plain["architecture.norm"] == "layer" and plain["epsilon"] == 1e-5
    assert rms["architecture.norm"] == "rms" and rms["epsilon"] == 1e-6
    assert rms["architecture.kv_heads"] == "none"
