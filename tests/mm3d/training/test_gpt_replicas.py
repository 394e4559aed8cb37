"""A GPT on several replicas has the losses and gradients of one rank, in every stage of ZeRO."""
import math

import pytest

import mm3d
from gpts import SIZES, case_of, differences, serial, tokens_and_targets, train
from mm3d.training.hops import layout_blocks, transfers
from models import different

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
    options, microbatches = case_of(comm, MESHES, number)
    mesh = mm3d.Mesh(comm, **options)
    for case in (dict(tied=True), dict(tied=False))[:1 + (number > 0)]:
        case |= {"steps": 1 + (number > 0)}
        found = [train(mesh, microbatches=microbatches, zero=zero, **case) for zero in range(4)]
        assert not differences(found[0], serial(**case)), (options, case)
        for one, other in ((1, 0), (3, 2), (2, 0))[:2 + (microbatches == 1)]:
            assert not different(found[one], found[other]), (one, other)
        assert not differences(found[2], serial(**case)), (options, case)
    mesh.free()


@pytest.mark.ranks(4)
def test_words_along_replicas_are_those_that_the_stages_of_zero_say(comm):
    """Of Psi parameters and k micro-batches, by hand; a tied head has a gradient of its own, and
    vectors are read once."""
    mesh, sizes, k = mm3d.Mesh(comm, data=4, scheme="serial"), SIZES | {"batch": 8}, 2
    for zero, tied in ((0, True), (1, False), (2, True), (3, True), (3, False)):
        model = mm3d.GPT(mesh, **sizes, zero=zero, tied=tied, microbatches=k)
        psi = sum(math.prod(p.shape) for p in model.trained)
        matrices = sum(math.prod(p.shape) for p in model.trained if len(p.public_shape) > 1)
        table, places = (n * sizes["hidden"] for n in (sizes["vocab"], sizes["seq"]))
        gradients = psi + tied * table
        # Forward reads all, a tied head the table again; backward the weights of products.
        reads = psi + tied * table + matrices - places - (not tied) * table
        gathered = {0: gradients, 3: k * reads}.get(zero, psi)
        model.reset_traffic()
        model.step(*tokens_and_targets(sizes))
        model.refresh()
        words = comm.allreduce(sum(one.words for (c, _), one in model.traffic().items()
                                   if c == "d"))
        assert words == 3 * ((k if zero > 1 else 1) * gradients + gathered), (zero, tied)
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
    ("3d", [(2, 2, 1), (1, 2, 2)], 2), ("1d", [(4,), (4,)], 2), ("faces", [(2, 2, 1)] * 2, 2),
    ("2.5d", [(1, 1, 4), (2, 2, 1)], 4 + 1), ("serial", [(1,), (1,)], 2)])
def test_tied_words_are_those_of_the_blocks(scheme, sizes, copies):
    """All ranks of a stage together receive the table, as often as they hold it."""
    kind = mm3d.SCHEMES[scheme]
    grids = [kind.grid_shape(one) for one in sizes]
    first, last = (layout_blocks(mm3d.Layout(kind.down_weight), grid, (17, 12)) for grid in grids)
    both = [*transfers(first, last), *transfers(last, first)]
    assert sum(one.words for one in both) == copies * 17 * 12
