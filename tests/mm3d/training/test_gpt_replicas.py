"""A GPT on several replicas has the losses and gradients of one rank, in every stage of ZeRO."""
import numpy as np
import pytest

import mm3d
from gpts import SIZES, differences, serial, tokens_and_targets, train
from mm3d.model.chain_specs import ChainSpec, ModelSpec
from mm3d.model.gpt_spec import embedding_spec, gpt_spec, output_specs
from mm3d.model.sizes import ModelSizes
from mm3d.model.transformer_spec import model_spec
from mm3d.schemes.parallelism import Parallelism
from mm3d.training import costs, data_costs
from mm3d.training.hops import transfers
from mm3d.training.tied import table_blocks

# By ranks: replicas and the rest of a mesh; micro-batches.
MESHES = {2: [(dict(data=2, scheme="serial"), 2)],
          3: [(dict(data=3, scheme="serial"), 1)],
          4: [(dict(data=2, stages=2, scheme="serial"), 2), (dict(data=4, scheme="serial"), 1),
              (dict(data=2, stages=2, scheme="serial"), 1),
              (dict(data=4, shards=2, scheme="serial"), 1),
              (dict(data=2, scheme="1d", grid=(2,)), 1)],
          8: [(dict(data=2, stages=2, scheme="3d", grid=[(1, 2, 1), (2, 1, 1)]), 1),
              (dict(data=2, stages=2, scheme="1d", shards=1, grid=(2,)), 2)]}


@pytest.mark.ranks(4, slow=(2, 3, 8), first=(4,))
@pytest.mark.parametrize("number", range(5))
def test_losses_and_gradients_are_those_of_one_rank(comm, number):
    """Targets that count are more in some replicas: nothing is divided by a rank's own number.

    Guards against gradients divided by the local number of tokens (NVIDIA/Megatron-LM#7452).

    Stages of ZeRO are equal to the bit as without embedding and head, tied ones too, which are
    on one stage or on two.
    """
    if number >= len(MESHES[comm.size]):
        pytest.skip(f"{comm.size} ranks have {len(MESHES[comm.size])} meshes")
    options, microbatches = MESHES[comm.size][number]
    mesh = mm3d.Mesh(comm, **options)
    for case in (dict(tied=True), dict(tied=False))[:1 + (number > 0)]:
        case |= {"steps": 1 + (number > 0)}
        found = [train(mesh, microbatches=microbatches, zero=zero, **case) for zero in range(4)]
        assert not differences(found[0], serial(**case)), (options, case)
        for one, other in ((1, 0), (3, 2), (2, 0))[:2 + (microbatches == 1)]:
            assert all(np.array_equal(found[one][name], a)
                       for name, a in found[other].items()), (one, other)
        assert not differences(found[2], serial(**case)), (options, case)
    mesh.free()


@pytest.mark.ranks(slow=(2, 4))
def test_words_along_replicas_are_the_closed_form(comm):
    mesh, sizes = mm3d.Mesh(comm, data=comm.size, scheme="serial"), dict(SIZES)
    vocab = sizes.pop("vocab")
    for tied in (True, False):
        for zero in range(4):
            model = mm3d.GPT(mesh, **SIZES, zero=zero, tied=tied)
            model.reset_traffic()
            model.step(*tokens_and_targets())
            model.refresh()
            found = {key: words for key, traffic in mesh.data_grid.traffic().items()
                     if (words := comm.allreduce(traffic.words))}
            spec = gpt_spec(ModelSizes(**sizes), vocab, tied)
            assert found == data_costs.data_words(
                [spec], Parallelism("serial", {"x": 1}, 1, 1), comm.size, zero, 1), (tied, zero)
            model.free()
    mesh.free()


def stage_spec(stage: int, tied: bool) -> ModelSpec:
    """One of two stages of a GPT with a layer each; the second one copies a tied table."""
    sizes = dict(SIZES)
    vocab, hidden = sizes.pop("vocab"), sizes["hidden"]
    part = model_spec(ModelSizes(**sizes), causal=True, part=range(stage, stage + 1))
    layers = ((*part.chain.layers, *output_specs(vocab, hidden, tied, copied=tied)) if stage else
              (embedding_spec(vocab, sizes["seq"], hidden), *part.chain.layers))
    return ModelSpec(part.batch, part.seq, part.hidden, ChainSpec(layers))


@pytest.mark.ranks(4)
def test_words_of_two_stages_with_a_table_on_both_are_the_closed_forms(comm):
    """Along the replicas, of each stage by itself; and between the stages."""
    mesh = mm3d.Mesh(comm, data=2, stages=2, scheme="serial")
    half = SIZES["batch"] // 2, SIZES["seq"], SIZES["hidden"]
    for tied, zero in ((True, 0), (True, 1), (True, 2), (True, 3), (False, 1)):
        model = mm3d.GPT(mesh, **SIZES, zero=zero, tied=tied)
        model.reset_traffic()
        model.step(*tokens_and_targets())
        model.refresh()
        found = {key: words for key, traffic in sorted(mesh.data_grid.traffic().items())
                 if (words := mesh.data_grid.comm.allreduce(traffic.words))}
        assert found == data_costs.data_words(
            [stage_spec(mesh.stage, tied)], Parallelism("serial", {"x": 1}, 1, 1), 2, zero,
            1), (tied, zero)
        sent = 2 * costs.hop_words(model.schedule, "serial", mesh.grids, half)
        sent += tied and costs.tied_words("serial", mesh.grids, SIZES["vocab"], SIZES["hidden"],
                                          data=2, zero=zero)
        assert comm.allreduce(model.traffic()["s", "send"].words) == sent, (tied, zero)
        model.free()
    mesh.free()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("options", [{}, {"data": 2}])
def test_who_exchanges_what_of_a_tied_table_is_computed_before_the_steps(comm, options,
                                                                         monkeypatch):
    mesh = mm3d.Mesh(comm, stages=2, scheme="serial" if options else "1d", **options)
    model = mm3d.GPT(mesh, **SIZES, zero=len(options))

    def refuse(*_):
        raise AssertionError("computed in a step")
    monkeypatch.setattr("mm3d.training.tied.transfers", refuse)
    for step in range(2):
        model.step(*tokens_and_targets(SIZES, step))
    model.free()
    mesh.free()


@pytest.mark.parametrize("scheme, sizes, copies", [
    ("3d", [(2, 2, 1), (1, 2, 2)], 1), ("1d", [(4,), (4,)], 1), ("faces", [(2, 2, 1)] * 2, 1),
    ("2.5d", [(1, 1, 4), (2, 2, 1)], 4), ("serial", [(1,), (1,)], 1)])
def test_tied_words_are_those_of_the_blocks(scheme, sizes, copies):
    """All ranks of a stage together receive the table, as often as they hold it."""
    kind = mm3d.SCHEMES[scheme]
    grids = [kind.grid_shape(one) for one in sizes]
    first, last = (table_blocks(grid, mm3d.Layout(kind.down_weight), (17, 12)) for grid in grids)
    both = [*transfers(first, last), *transfers(last, first)]
    assert costs.tied_words(scheme, grids, 17, 12) == sum(one.words for one in both)
    assert costs.tied_words(scheme, grids[:1], 17, 12) == copies * 17 * 12
