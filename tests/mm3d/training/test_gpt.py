"""A GPT has the same losses and gradients on every mesh."""
import math

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from gpts import SIZES, case_of, differences, serial, tokens_and_targets, train
from mm3d.schemes.serial import Serial
from mm3d.training.batches import check_tokens
from reference import all_refuse

# By ranks: stages, scheme, grid.
MESHES = {1: [(1, "3d", None)],
          4: [(1, "3d", (2, 1, 2)), (2, "3d", (1, 2, 1)), (1, "2d", None), (1, "1d", None),
              (1, "1d-sp", None)],
          8: [(1, "3d", None), (1, "3d", (2, 4, 1)), (2, "2d", None), (2, "3d", (1, 2, 2)),
              (1, "3d", (1, 1, 8)), (1, "2.5d", None), (1, "faces", None)]}
CASES = [dict(tied=True), dict(tied=False, label_smoothing=0.1, z_loss=0.01)]


@pytest.mark.ranks(1, 4, slow=(8,))
@pytest.mark.parametrize("number", [
    0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 7))])
def test_losses_and_gradients_are_those_of_one_rank(comm, number):
    """With uneven sizes, ignored targets, two micro-batches, and all kinds of loss.

    Also where a micro-batch has more targets that count than another, or a rank more than another
    one: a mean of means differs, and so does the gradient of a bias that is not summed over all
    ranks with other rows.  Guards against both (NVIDIA/Megatron-LM#7452, axonn-ai/axonn#55).
    """
    mesh = mm3d.Mesh(comm, *case_of(comm, MESHES, number))
    for case in CASES if comm.size == 1 else CASES[number % 2:][:1]:    # one in turn
        expected = serial(**case)
        found = train(mesh, microbatches=2, **case)
        assert list(found) == list(expected)
        assert not differences(found, expected), (mesh, case)


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
        assert messages._send == messages.comm.Issend
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


@pytest.mark.parametrize("changed, said", [
    (dict(vocab=0), "vocab=0 should be a whole number of at least 1"),
    (dict(label_smoothing=1), "label_smoothing=1 should be at least 0 and below 1"),
    (dict(z_loss=-0.1), "z_loss=-0.1 should be a number of at least 0")], ids=str)
def test_sizes_and_factors_that_make_no_sense_are_named(comm, changed, said):
    mesh = mm3d.Mesh(comm, 1, "serial")
    with pytest.raises(ValueError, match=said):
        mm3d.GPT(mesh, **SIZES | changed)


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
