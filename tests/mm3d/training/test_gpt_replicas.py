"""What a GPT on several replicas moves; `test_unequal_replicas.py` has what it computes."""
import math

import pytest

import mm3d
from gpts import SIZES, tokens_and_targets


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


@pytest.mark.ranks(4)
@pytest.mark.parametrize("options", [{}, {"data": 2}])
def test_who_exchanges_what_is_not_computed_again_in_each_step(comm, options, monkeypatch):
    mesh = mm3d.Mesh(comm, stages=2, scheme="serial" if options else "1d", **options)
    model = mm3d.GPT(mesh, **SIZES, zero=len(options))

    def refuse(*_, **__):
        raise AssertionError("computed in a step")
    model.step(*tokens_and_targets(SIZES))
    monkeypatch.setattr("mm3d.training.hops.transfers", refuse)
    for step in range(2):
        model.step(*tokens_and_targets(SIZES, step))
