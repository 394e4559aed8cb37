"""Checkpoints and optimizers of replicas, of ZeRO's shards, and of tied weights on two stages."""
import numpy as np
import pytest

import mm3d
from checkpoint_models import everything, release, same, set_gradients

SIZES = dict(layers=2, hidden=15, heads=3, batch=4, seq=2)
DIVIDED = [dict(data=2, zero=1, stages=2, scheme="serial"),
           dict(data=2, zero=2, scheme="3d", grid=(1, 2, 1)),
           dict(data=4, shards=2, zero=3, scheme="serial"),
           dict(data=2, zero=0, scheme="1d", grid=(2,))]


def pipeline(comm, zero, seed=0, **mesh):
    stages = mesh.get("stages", 1)
    return mm3d.Pipeline(mm3d.Mesh(comm, **mesh), "1f1b" if stages > 1 else "gpipe",
                         **SIZES, microbatches=stages, zero=zero, seed=seed)


def gpt(comm, stages=1, tied=True, seed=0, grid=(1, 1, 1), **options):
    mesh = mm3d.Mesh(comm, stages, "3d", grid)
    return mm3d.GPT(mesh, layers=2, hidden=6, heads=2, vocab=11, batch=4, seq=3, tied=tied,
                    microbatches=2, seed=seed, dtype="float64", **options)


@pytest.mark.ranks(4)
def test_every_stage_of_zero_steps_and_saves_the_same_bits(comm, shared_tmp_path):
    """Norms, parameters and moments after clipped steps, by ``==``; each reads the one before.

    Guards against norms that count replicas or leave out shards (NVIDIA/Megatron-LM#5916), and
    against a last shard that is never updated (pytorch/pytorch#176076).
    """
    expected, norms = None, []
    for number, options in enumerate(DIVIDED):
        model = pipeline(comm, **options, seed=number)
        optimizer = mm3d.AdamW(model, 0.01, clip=0.5)
        if number:
            mm3d.restore(shared_tmp_path, model, optimizer, step=number)
            assert same(everything(model, optimizer), expected), options
        set_gradients(model, seed=0)
        optimizer.step()
        norms.append(optimizer.norm)
        mm3d.save(shared_tmp_path, model, optimizer, step=number + 1)
        expected = everything(model, optimizer)
        release(model)
    assert len(set(norms)) == 1
    whole = pipeline(comm, 0, scheme="3d", grid=(2, 1, 2))
    optimizer = mm3d.AdamW(whole, 0.01, clip=0.5)
    for _ in DIVIDED:
        set_gradients(whole, seed=0)
        optimizer.step()
    assert same(everything(whole, optimizer), expected)
    release(whole)


@pytest.mark.ranks(2)
def test_a_tied_table_on_two_stages_is_counted_and_saved_once(comm, shared_tmp_path):
    """Guards against gradients of tied weights that are summed after the norm, or not at all
    (NVIDIA/Megatron-LM#299)."""
    tokens = np.arange(12).reshape(4, 3) % 11
    found = []
    for stages, grid in ((1, (2, 1, 1)), (2, (1, 1, 1))):
        model = gpt(comm, stages, grid=grid)
        optimizer = mm3d.AdamW(model, 0.01, clip=1e-3)
        model.step(tokens, tokens[::-1])
        gradients = model.gradients()
        optimizer.step()
        norm = np.sqrt(sum((g ** 2).sum() for g in gradients.values()))
        assert optimizer.norm == pytest.approx(norm, rel=1e-13)
        mm3d.save(shared_tmp_path / str(stages), model, optimizer)
        found.append((everything(model, optimizer), optimizer.norm, model))
    (one, norm, whole), (two, other, parts) = found
    assert one.keys() == two.keys() and norm == pytest.approx(other, rel=1e-13)
    for model, stages in ((whole, 2), (parts, 1)):
        optimizer = mm3d.AdamW(model, 0.01, clip=1e-3)
        mm3d.restore(shared_tmp_path / str(stages), model, optimizer)
        assert same(everything(model, optimizer), two if stages == 2 else one)
    tables = comm.allgather([t.master.copy() for t in parts.trained
                             if t.name == "embedding.weight"])
    assert [len(held) for held in tables] == [1, 1]
    assert np.array_equal(tables[0][0], tables[1][0])
    for model in (whole, parts):
        release(model)


@pytest.mark.ranks(2)
def test_a_gpt_that_goes_on_has_the_bits_of_one_that_did_not_stop(comm, shared_tmp_path):
    """Losses too, with dropout."""
    batches = np.random.default_rng(0).integers(0, 11, (4, 2, 4, 3))
    losses, models = [], []
    for stop in (False, True):
        model = gpt(comm, 2, tied=False, dropout=0.3)
        optimizer = mm3d.AdamW(model, 0.01, clip=1.0)
        losses.append([])
        for step, (tokens, targets) in enumerate(batches):
            if stop and step == 2:
                mm3d.save(shared_tmp_path, model, optimizer)
                release(model)
                model = gpt(comm, 2, tied=False, dropout=0.3)
                optimizer = mm3d.AdamW(model, 0.01, clip=1.0)
                for t in model.trained:
                    t.master[...] = 7
                mm3d.restore(shared_tmp_path, model, optimizer)
            losses[-1].append(model.step(tokens, targets))
            optimizer.step()
        models.append(everything(model, optimizer))
        release(model)
    assert losses[0] == losses[1] and same(*models)
