"""A GPT has the same losses and gradients on every mesh."""
import math

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from gpts import SIZES, alone, case_of, differences, serial, tokens_and_targets, train
from llamas import architecture
from mm3d.schemes.serial import Serial
from mm3d.training.batches import check_tokens
from reference import all_refuse

SMOOTHED = dict(tied=False, label_smoothing=0.1, z_loss=0.01)
DROPPED = dict(dropout=0.3)
MIXTRAL = dict(experts=mm3d.Experts(3, top=2, every=1, gate="mixtral", capacity=None,
                                    balance=0.1), microbatches=2)    # which are routed together
# By ranks: mesh, what changes rounding alone, architecture, positions, other options.  No number
# of positions is a multiple of the chunks of a context; 3 and 5 leave some of them empty.
MESHES = {
    1: [(dict(scheme="3d"), {}, None, 5, {}), (dict(scheme="3d"), {}, None, 5, SMOOTHED),
        (dict(scheme="serial"), dict(recompute="full"), None, 5, DROPPED),
        (dict(scheme="serial"), dict(recompute="selective"), "window", 5, {})],
    2: [(dict(context=2, scheme="serial"), dict(zero=1), "llama", 7, {}),
        (dict(context=2, scheme="serial"), dict(recompute="selective"), None, 3, {})],
    4: [(dict(scheme="3d", grid=(2, 1, 2)), dict(recompute="selective"), None, 5, DROPPED),
        (dict(stages=2, scheme="3d", grid=(1, 2, 1)), {}, None, 5, SMOOTHED),
        (dict(stages=2, scheme="1d-sp", grid=(2,)), dict(schedule="zb-h1"), None, 5, DROPPED),
        (dict(data=2, scheme="1d"), dict(zero=2), "qwen", 5, dict(tied=False)),
        (dict(stages=2, scheme="3d", grid=(1, 2, 1)), dict(
            schedule="zb-h1", recompute="full+selective"), "biases", 5, {}),
        (dict(data=2, scheme="1d-sp"), dict(zero=1, expert_parallel=2), "llama", 5, MIXTRAL),
        (dict(context=4, scheme="serial"), dict(zero=3), "llama", 13, {}),
        (dict(context=2, scheme="1d-sp"), dict(zero=1, microbatches=1), "qwen", 7, dict(
            tied=False)),
        (dict(context=2, scheme="3d", grid=(1, 2, 1), rows="positions"), dict(
            zero=3, microbatches=1), None, 9, DROPPED),
        (dict(stages=2, context=2, scheme="serial"), dict(schedule="zb-h1"), None, 6, DROPPED),
        (dict(scheme="2d"), dict(recompute="full"), None, 5, DROPPED),
        (dict(scheme="1d"), {}, None, 5, SMOOTHED), (dict(scheme="1d-sp"), {}, None, 5, {}),
        (dict(context=4, scheme="serial"), dict(in_flight=1, microbatches=1), "window", 11, {}),
        (dict(context=4, scheme="serial"), dict(microbatches=1), None, 5, {}),
        (dict(context=2, scheme="3d", grid=(2, 1, 1)), dict(recompute="full"), "llama", 5, {}),
        (dict(data=2, context=2, scheme="serial"), dict(zero=3), "window", 9, {})],
    8: [(dict(data=2, stages=2, scheme="3d", grid=(2, 1, 1)), dict(
            zero=3, recompute="full", in_flight=1), "llama", 5, dict(tied=False)),
        (dict(data=2, scheme="3d", grid=(2, 2, 1)), dict(
            zero=3, expert_parallel=2, recompute="selective"), "llama", 5, MIXTRAL),
        (dict(stages=2, scheme="2d"), {}, "window", 5, dict(dropout=0.2)),
        (dict(stages=2, context=2, scheme="3d", grid=(1, 2, 1), rows="positions"), dict(zero=3),
         "window", 14, {}),
        (dict(context=4, scheme="1d"), dict(zero=3, microbatches=1), "biases", 17, DROPPED),
        (dict(context=2, scheme="2d"), {}, "gelu", 8, {}),
        (dict(context=2, scheme="3d", grid=(2, 2, 1)), dict(zero=1), "llama", 10, {}),
        (dict(scheme="2.5d"), {}, None, 5, SMOOTHED), (dict(scheme="faces"), {}, None, 5, {}),
        (dict(scheme="3d", grid=(1, 2, 4)), dict(microbatches=1), None, 5, DROPPED),
        (dict(data=2, context=2, shards=2, scheme="3d", grid=(2, 1, 1)), dict(
            zero=3, recompute="full+selective"), "llama", 7, dict(tied=False)),
        (dict(scheme="3d"), {}, None, 5, {}), (dict(scheme="3d", grid=(2, 4, 1)), {}, None, 5,
                                               SMOOTHED),
        (dict(stages=2, scheme="2d"), {}, None, 5, {}),
        (dict(stages=2, scheme="3d", grid=(1, 2, 2)), {}, None, 5, SMOOTHED),
        (dict(stages=2, scheme="3d", grid=(2, 1, 2)), dict(recompute="full"), None, 5, DROPPED),
        (dict(scheme="3d", grid=(1, 1, 8)), {}, None, 5, {})]}


@pytest.mark.ranks(1, 2, 4, 8, first=(8,))
@pytest.mark.parametrize("number", [
    *range(10), *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 17))])
def test_losses_and_gradients_are_those_of_one_rank(comm, number):
    """With uneven sizes, ignored targets, two micro-batches, all kinds of loss, architectures,
    pipelines, ZeRO, recomputation, dropout, divided experts, and contexts in both ways in turn.

    Also where a micro-batch has more targets that count than another, or a rank more than another
    one: a mean of means differs, and so does the gradient of a bias that is not summed over all
    ranks with other rows.  Guards against both (NVIDIA/Megatron-LM#7452, axonn-ai/axonn#55), and
    against masks that are others on another rank, or when drawn again (NVIDIA/Megatron-LM#1256).
    """
    where, how, name, seq, options = case_of(comm, MESHES, number)
    sizes = SIZES | dict(seq=seq)
    if name is not None:
        sizes |= dict(hidden=10, heads=6, architecture=architecture(name))
    expected, mesh = alone(sizes, **options), mm3d.Mesh(comm, **where)
    ways = ("ring", "gather") if "context" in where else ("gather",)
    for way in ways if comm.size < 4 else ways[(number + comm.size // 8) % len(ways):][:1]:
        found = train(mesh, sizes=sizes, context_way=way, **{"microbatches": 2} | how | options)
        assert list(found) == list(expected)
        wrong = differences(found, expected)
        assert not wrong, (mesh, name, way, wrong)


@pytest.mark.ranks(4)
def test_positions_of_several_sequences_in_shared_memory(comm, monkeypatch):
    """A block of the logits' gradient then has gaps between its sequences."""
    monkeypatch.setenv("MM3D_TRANSPORT", "shared")
    mesh = mm3d.Mesh(comm, 1, "3d", (1, 2, 2), rows="positions")
    case = dict(steps=1, dropout=0.3)
    assert not differences(train(mesh, **case), serial(**case))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tokens, targets, said", [
    ((1, 2, 17), None, r"tokens\[1, 2\] = 17 is out of range: 0 to 16 would do$"),
    ((3, 0, -1), None, r"tokens\[3, 0\] = -1 is out of range: 0 to 16 would do$"),
    (None, (2, 4, -2), r"targets\[2, 4\] = -2 is out of range: 0 to 16 would do, or -1 to be ig")],
    ids=str)
def test_bad_tokens_are_named_on_every_rank(comm, tokens, targets, said):
    """Before any communication, so that all ranks can go on."""
    mesh = mm3d.Mesh(comm, 2, "serial")
    model, batch = mm3d.GPT(mesh, **SIZES), tokens_and_targets()
    for a, change in zip(batch, (tokens, targets)):
        if change:
            a[change[:2]] = change[2]
    for call in (model.step, model.evaluate):
        with all_refuse(comm, said):
            call(*batch)
    assert math.isfinite(model.step(*tokens_and_targets()))


@pytest.mark.ranks(2)
def test_all_messages_between_stages_are_synchronous_where_asked(comm):
    """Those of tied gradients too: a deadlock that MPI's buffers hide would be found."""
    mesh = mm3d.Mesh(comm, 2, "serial")
    model = mm3d.GPT(mesh, **SIZES, synchronous=True, dtype="float64")
    for messages in (model.pipeline.hops.messages, model._tie.messages):
        assert messages._send == "Issend"
    loss = model.step(*tokens_and_targets())
    assert abs(loss - serial()["losses"][0]) <= 1e-12 * loss


def test_a_scheme_without_what_a_gpt_needs_is_named(comm, monkeypatch):
    """Before a step begins."""
    mesh = mm3d.Mesh(comm, 1, "serial")
    monkeypatch.delattr(Serial, "down_weight")
    with pytest.raises(ValueError, match="scheme 'serial' has no down_weight: a tied GPT needs"):
        mm3d.GPT(mesh, **SIZES)


def test_targets_beyond_64_bits_are_not_the_ignored_one():
    """2^64 - 1 is -1 where 64 bits are read with a sign."""
    large = np.full((1, 2), 2 ** 64 - 1, np.uint64)
    with pytest.raises(ValueError, match=r"targets\[0, 0\] = 18446744073709551615 is out of"):
        check_tokens("targets", large, (1, 2), 17, -1)
    small = np.array([[3, 255]], np.uint8)    # of fewer numbers than the vocabulary has
    assert check_tokens("tokens", small, (1, 2), 1000).tolist() == [[3, 255]]


@pytest.mark.ranks(1, 4)
def test_a_state_is_loaded_on_another_mesh(comm):
    """Names and shapes are those of the documentation; the copy of a tied table is loaded too."""
    mesh = mm3d.Mesh(comm, min(2, comm.size), "3d", (comm.size // 2 or 1, 1, 1))
    h, vocab = SIZES["hidden"], SIZES["vocab"]
    for tied in (True, False):
        model = mm3d.GPT(mesh, **SIZES, tied=tied, seed=1, dtype="float64")
        state = model.state()
        assert list(state)[:2] == ["embedding.weight", "positions.weight"]
        assert list(state)[-3 + tied:] == ["norm.weight", "norm.bias", *["head.weight"][tied:]]
        shapes = {name: a.shape for name, a in state.items()}
        assert shapes["embedding.weight"] == (vocab, h)
        assert shapes["positions.weight"] == (SIZES["seq"], h)
        assert shapes.get("head.weight", (h, vocab)) == (h, vocab)
        other = mm3d.GPT(mesh, **SIZES, tied=tied, seed=2, dtype="float64")
        other.load(state)
        assert other.evaluate(*tokens_and_targets()) == model.evaluate(*tokens_and_targets())
        with pytest.raises(ValueError, match="'norm.bias' is missing"):
            other.load({name: a for name, a in state.items() if name != "norm.bias"})


@pytest.mark.parametrize("master", [None, "float32"])
def test_16_bits_with_and_without_masters(comm, master):
    """The scale of the loss multiplies gradients alone."""
    mesh = mm3d.Mesh(comm, 1, "serial")
    exact = mm3d.GPT(mesh, **SIZES, dtype="float64")
    expected, gradients = exact.step(*tokens_and_targets()), exact.gradients()
    model = mm3d.GPT(mesh, **SIZES, dtype="float16", master=master)
    model.loss_scale = 128.0
    assert abs(model.step(*tokens_and_targets()) - expected) < 1e-3 * expected
    assert model.trained[0].grad.dtype == (master or "float16")
    for name, a in model.gradients().items():
        b = gradients[name]
        assert np.linalg.norm(a / 128.0 - b) <= 0.02 * np.linalg.norm(b), name


def test_a_step_sets_gradients_to_zero_and_a_pipeline_leaves_that_to_the_caller():
    mesh = mm3d.Mesh(MPI.COMM_SELF, scheme="serial")
    model, (tokens, targets) = mm3d.GPT(mesh, **SIZES), tokens_and_targets()
    first = [model.step(tokens, targets), model.gradients()]
    again = [model.step(tokens, targets), model.gradients()]
    assert first[0] == again[0]
    assert all(np.array_equal(a, again[1][name]) for name, a in first[1].items())
    pipeline = mm3d.Pipeline(mesh, "1f1b", 1, layers=1, hidden=4, heads=2, batch=2, seq=3)
    x = pipeline.chunks[0].random("x")
    found = []
    for _ in range(2):
        pipeline.step(lambda micro: x, lambda micro, y: x)
        found.append(pipeline.gradients()["layers.0.mlp.up.bias"])
    assert np.array_equal(2 * found[0], found[1]) and found[0].any()


def test_steps_have_other_masks_and_validation_has_none(comm):
    mesh, batch = mm3d.Mesh(comm, 1, "serial"), tokens_and_targets()
    model, plain = (mm3d.GPT(mesh, **SIZES, dtype="float64", dropout=p) for p in (0.3, 0.0))
    assert (model.dropout_step, plain.dropout_step) == (0, None)
    first, second = model.step(*batch), model.step(*batch)
    assert first != second and model.dropout_step == 2
    assert model.evaluate(*batch) == plain.evaluate(*batch) == plain.step(*batch)
    assert plain.dropout_step is None    # so no checkpoint has it
    model.dropout_step = 0
    assert model.step(*batch) == first
    model.dropout_step = None
    assert model.step(*batch) == plain.step(*batch) and model.dropout_step is None
