"""A checkpoint of another function is refused; another training is said, as is what is unknown."""
import functools
import inspect
import warnings
from dataclasses import fields, replace
from fractions import Fraction

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from mm3d.config import OF_MESH
from mm3d.model.stack import Stack
from mm3d.model.transformer_layers import transformer_layers
from mm3d.training.optimizers import Optimizer
from checkpoint_models import as_before, everything, release, same, transformer

GPT = dict(layers=2, hidden=8, heads=4, vocab=11, batch=4, seq=3)
ROUTED = dict(count=4, top=2, every=1, capacity=1.5)
FUNCTION, TRAINING = "function", "training"
# What no definition has: where the ranks are, what leaves a shape, and what changes no result.
ELSEWHERE = {
    "mesh", "scheme", "schedule", "microbatches", "recompute", "master", "batch", "seq", "seed",
    "around", "synchronous", "asleep", "zero", "in_flight", "expert_parallel",
    "stack", "fields", "parameter", "initial_values", "expert_ranks", "self", "experts",
    "make_layers", "architecture", "context_way"}
# A GPT that is saved, what another one has in place of it, and whether that is another function.
OTHERS = [
    (dict(heads=4), dict(heads=8), FUNCTION), (dict(heads=4), dict(heads=2), FUNCTION),
    (dict(heads=4), dict(heads=1), FUNCTION),
    (dict(), dict(window=2), FUNCTION), (dict(epsilon=1e-6), dict(), FUNCTION),
    (dict(positions="rotary"), dict(positions="rotary", rotary_base=500.0), FUNCTION),
    (dict(positions="rotary", rotary_scaling=(8, 1, 4, 8)),
     dict(positions="rotary", rotary_scaling=(4, 1, 4, 8)), FUNCTION),
    (dict(), dict(dropout=0.1), TRAINING), (dict(dropout=0.2), dict(dropout=0.1), TRAINING),
    (dict(dropout=0.2), dict(dropout=0.2, seed=7), TRAINING),
    (dict(), dict(label_smoothing=0.1), TRAINING), (dict(), dict(z_loss=0.1), TRAINING),
    (dict(), dict(ignored=5), TRAINING),
    (dict(dtype="float16", master="float32"), dict(), TRAINING)]
EXPERTS = [
    (dict(top=2), dict(top=1), FUNCTION), (dict(gate="switch"), dict(gate="mixtral"), FUNCTION),
    (dict(gate="mixtral"), dict(gate="gshard", order="position"), FUNCTION),
    (dict(capacity=1.5), dict(capacity=1.0), FUNCTION),
    (dict(capacity=1.5), dict(capacity=None), FUNCTION),
    (dict(convention="mm3d"), dict(convention="megatron"), FUNCTION),
    (dict(min_capacity=None), dict(min_capacity=2), FUNCTION),
    (dict(order=None), dict(order="choice"), FUNCTION),
    (dict(every=1), dict(every=2), FUNCTION), (dict(count=4), dict(count=5), FUNCTION),
    (dict(balance=0.01), dict(balance=0.1), TRAINING), (dict(z=0.1), dict(z=0.2), TRAINING),
    (dict(bias_rate=0.1), dict(bias_rate=0.2), TRAINING),
    (dict(convention="mm3d", capacity=None), dict(convention="huggingface", capacity=None),
     TRAINING),
    (dict(order=None), dict(order="position"), None),
    (dict(min_capacity=None), dict(min_capacity=0), None)]


def gpt(comm=MPI.COMM_SELF, routed=None, grid=(1, 1, 1), **options):
    experts = {} if routed is None else {"experts": mm3d.Experts(**(ROUTED | routed))}
    return mm3d.GPT(mm3d.Mesh(comm, 1, "3d", grid), **(GPT | options | experts))


def restored(folder, model, optimizer=None, **options) -> str:
    """Restore, and return what was warned of, in one text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mm3d.restore(folder, model, optimizer, **options)
    return "\n".join(str(one.message) for one in caught)


def check(folder, one, other, kind, given: dict) -> None:
    """Restore `one` into `other`, which differs by what was given."""
    mm3d.save(folder, one, step=1)
    before = everything(other)
    if kind == FUNCTION:
        with pytest.raises(ValueError, match="of another model") as caught:
            mm3d.restore(folder, other)
        assert same(everything(other), before) and "\n" not in str(caught.value)
        shapes = {*given} & {"count", "every"}    # which the shapes of arrays tell
        assert shapes or any(name in str(caught.value) for name in given)
    else:
        text = restored(folder, other)
        assert bool(text) == (kind == TRAINING)
        assert kind is None or any(name in text for name in given), text
        assert same(everything(other), everything(one))
    release(one, other)


@pytest.mark.parametrize("saved, loaded, kind", OTHERS)
def test_another_gpt(tmp_path, saved, loaded, kind):
    check(tmp_path, gpt(**saved), gpt(**loaded), kind, saved | loaded)


@pytest.mark.parametrize("saved, loaded, kind", EXPERTS)
def test_other_experts(tmp_path, saved, loaded, kind):
    check(tmp_path, gpt(routed=saved), gpt(routed=loaded), kind, saved | loaded)


def test_attention_with_and_without_a_mask(tmp_path):
    mm3d.save(tmp_path, transformer(causal=False), step=1)
    with pytest.raises(ValueError, match="causal is False there, True here"):
        mm3d.restore(tmp_path, transformer(causal=True))


def test_layers_of_a_description_of_ones_own_are_said(tmp_path):
    def own_layers(build, stack):
        return transformer_layers(build, stack)
    mm3d.save(tmp_path, transformer(), step=1)
    assert "own_layers" in restored(tmp_path, transformer(make_layers=own_layers))


def test_every_argument_is_in_the_definition_or_known_not_to_be():
    """A new argument of a model is put here or there by whoever adds it."""
    model = gpt(routed={}, dropout=0.1)
    facts = {*model.definition.function, *model.definition.training}
    arguments = {name for kind in (mm3d.Pipeline, mm3d.Transformer)
                 for name in inspect.signature(kind.__init__).parameters}
    arguments |= {one.name for kind in (mm3d.Model, mm3d.Division, Stack) for one in fields(kind)}
    arguments -= {*OF_MESH} - {"scheme"}
    assert arguments - facts == ELSEWHERE
    assert {f"experts.{one.name}" for one in fields(mm3d.Experts)} - facts == {"experts.design"}
    # Only what differs from the designs of before is a fact.
    designed = gpt(routed={"gate": "sigmoid-bias", "count": 4, "design": mm3d.ExpertDesign(
        width=8, shared=4, shared_gate=True, groups=2, top_groups=2, factor=2.0)})
    more = {*designed.definition.function} - {*model.definition.function}
    assert {f"experts.{one.name}" for one in fields(mm3d.ExpertDesign)} <= more
    assert {f"architecture.{one.name}" for one in fields(mm3d.Architecture)} - facts == {
        "architecture.epsilon"}    # which has been a fact before
    assert not {*model.definition.function} & {*model.definition.training}
    release(model)


def test_a_checkpoint_from_before_architectures_is_of_the_plain_one(tmp_path):
    """It is read without a word, and not into another model of the same shapes."""
    one, other, windowed = transformer(), transformer(seed=1), transformer(window=2, causal=True)
    one.definition = replace(one.definition, function={
        name: fact for name, fact in one.definition.function.items()
        if not name.startswith("architecture.")})
    mm3d.save(tmp_path, one, step=1)
    assert restored(tmp_path, other) == "" and same(everything(other), everything(one))
    with pytest.raises(ValueError, match="architecture.window is 'none' there, 2 here"):
        mm3d.restore(tmp_path, windowed)


@pytest.mark.ranks(4)
def test_a_llama_is_read_on_another_mesh(comm, shared_tmp_path):
    """Groups of heads, and both products of a gate, lie elsewhere there."""
    how = dict(norm="rms", positions="rotary", kv_heads=2, perceptron="swiglu", inner=7,
               biases="qkv", tied=False)
    one, other = gpt(comm, None, (1, 4, 1), **how), gpt(comm, None, (2, 1, 2), seed=1, **how)
    mm3d.save(shared_tmp_path, one, step=1)
    assert restored(shared_tmp_path, other) == ""
    expected, found = one.state(), other.state()
    assert all(np.array_equal(a, found[name]) for name, a in expected.items())
    release(one, other)


@pytest.mark.ranks(1, 4)
def test_the_definition_is_the_same_on_every_mesh(comm, shared_tmp_path):
    """What one writes the others read without a word."""
    grids = {1: [(1, 1, 1)], 4: [(2, 1, 2), (1, 4, 1)]}[comm.size]
    for number, grid in enumerate(grids):
        model = gpt(comm, dict(top=1), grid, dropout=0.1)
        if number:
            assert restored(shared_tmp_path, model, step=number) == ""
        mm3d.save(shared_tmp_path, model, step=number + 1)
        release(model)
    mesh = mm3d.Mesh(comm, comm.size // 2 or 1, "serial" if comm.size == 1 else "1d",
                     (1 + (comm.size > 1),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = mm3d.GPT(mesh, **GPT, dropout=0.1, experts=mm3d.Experts(**(ROUTED | dict(top=1))))
        mm3d.restore(shared_tmp_path, model)
        release(model)


# --- Optimizers ------------------------------------------------------------------------------

ADAMW = dict(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, clip=1.0)


@pytest.mark.parametrize("other, name", [
    (dict(betas=(0.8, 0.99)), "beta1"), (dict(betas=(0.9, 0.9)), "beta2"), (dict(eps=1e-6), "eps"),
    (dict(weight_decay=0.0), "weight_decay"), (dict(clip=None), "clip"),
    (dict(loss_scaling=mm3d.LossScaling()), "loss_scaling"),
    (dict(decays=lambda t: True), "decays"), (dict(lr=0.5), "")])
def test_other_options_of_the_optimizer_are_said(tmp_path, other, name):
    """The learning rate is restored."""
    model = transformer()
    mm3d.save(tmp_path, model, mm3d.AdamW(model, **ADAMW), step=1)
    again = mm3d.AdamW(model, **(ADAMW | other))
    text = restored(tmp_path, model, again)
    assert (f"optimizer.{name} was" in text) if name else not text
    assert again.lr == 0.1
    assert restored(tmp_path, model) == ""    # the model alone


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", (Fraction(1, 10), np.float32(0.1), np.array(0.1)))
def test_the_same_options_are_not_said(tmp_path, number):
    """Whatever kind of number they are; a partial function shows its place in memory."""
    def which(kind, trained):
        return kind in trained.name
    for step in (1, 2):
        model = gpt(z_loss=number, label_smoothing=number, dropout=number)
        optimizer = mm3d.AdamW(model, number, decays=functools.partial(which, "weight"))
        if step == 1:
            mm3d.save(tmp_path, model, optimizer)
        else:
            mm3d.restore(tmp_path, model, optimizer)
        release(model)


def test_every_argument_of_an_optimizer_is_said_or_restored():
    model = transformer()
    for kind in (mm3d.SGD, mm3d.AdamW):
        optimizer = kind(model, 0.1)
        names = {*optimizer.options(), *optimizer.numbers(), *("betas",) * ("beta1" in
                                                                            optimizer.options())}
        for owner in (kind, Optimizer):
            arguments = {*inspect.signature(owner.__init__).parameters}
            assert arguments - names == {"self", "model"} | ({"options"} & arguments)
    rule = mm3d.LossScaling(4.0, 3.0, 0.3, 7, 5, 0.5).rule()
    assert all(text in rule for text in ("3.0", "0.3", "7", "5", "0.5"))


@pytest.mark.parametrize("before, after", [(0.9, 0.0), (0.0, 0.9), (0.9, 0.5)])
def test_momentum_may_begin_and_end(tmp_path, before, after):
    """SGD with and without momentum is no other model, and no other kind of optimizer."""
    one, other = transformer(), transformer(seed=1)
    optimizer = mm3d.SGD(one, 0.1, momentum=before)
    for arrays in optimizer.state.values():
        for a in arrays:
            a[...] = 3
    mm3d.save(tmp_path, one, optimizer, step=1)
    again = mm3d.SGD(other, 0.1, momentum=after)
    for arrays in again.state.values():
        for a in arrays:
            a[...] = 5
    text = restored(tmp_path, other, again)
    assert "optimizer.momentum was" in text
    assert ("begins with zeros" in text) == (before == 0)
    assert same(everything(other), everything(one))
    assert all((a == (3 if before else 0)).all() for a in again.state.get("momentum", ()))


# --- What cannot be told ---------------------------------------------------------------------

def test_a_checkpoint_of_the_version_before_does_not_say(tmp_path):
    one = gpt()
    as_before(mm3d.save(tmp_path, one, mm3d.SGD(one, 0.1), step=1))
    other = gpt(seed=3)
    text = restored(tmp_path, other, mm3d.SGD(other, 0.1))
    assert "the checkpoint does not say" in text and "heads" in text and "cannot be told" in text
    assert same(everything(other), everything(one))
    release(one, other)


def test_a_model_of_ones_own_without_a_definition(tmp_path):
    class Own:
        def __init__(self, of):
            self.trained, self.comm, self.refresh = of.trained, of.comm, of.refresh
    model = transformer()
    mm3d.save(tmp_path, Own(model), step=1)
    assert restored(tmp_path, Own(model)) == ""
    assert "the checkpoint does not say" in restored(tmp_path, model)
    mm3d.save(tmp_path, model, step=2)
    assert "the model does not say" in restored(tmp_path, Own(model))


def test_the_index_shows_the_definition(tmp_path):
    model = gpt(routed=dict(capacity=None))
    path = mm3d.save(tmp_path, model, mm3d.AdamW(model, 0.1), step=1)
    with h5py.File(path / "index.h5") as index:
        assert index["model"].attrs["heads"] == 4 and index["model"].attrs["causal"]
        assert index["model"].attrs["experts.capacity"] == "none"
        assert index["training"].attrs["optimizer.beta1"] == np.float64(0.9)
    release(model)
