"""Experts divided among some of the replicas, and copied to the others: every divisor of all."""

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from expert_gpts import CASES, SIZES, serial, train
from experts import expert_layers
from gpts import case_of, differences, tokens_and_targets
from mm3d.training.mesh import expert_shards
from models import different

BATCH = 16    # two micro-batches of 8 replicas
# By ranks: replicas, shards and the rest of a mesh; how many of the replicas divide experts.
MESHES = {
    4: [(dict(data=4, scheme="serial"), 2), (dict(data=4, shards=2, scheme="serial"), 2),
        (dict(data=4, shards=2, scheme="serial"), 4), (dict(data=4, shards=1, scheme="serial"), 2),
        (dict(data=4, shards=2, scheme="serial"), 1)],
    6: [(dict(data=6, shards=2, scheme="serial"), 3)],    # no number of whole groups of shards
    8: [(dict(data=4, scheme="3d", grid=(1, 2, 1)), 2),
        (dict(data=8, shards=4, scheme="serial"), 2),
        (dict(data=4, shards=2, scheme="2d", grid=(1, 1), stages=2), 2)]}


@pytest.mark.ranks(4, slow=(6, 8), first=(4,))
@pytest.mark.parametrize("number", range(5))
def test_every_division_trains_what_one_rank_trains(comm, number):
    """Losses, routings and gradients after a step of SGD, in every stage of ZeRO.

    Gradients of experts are summed over their copies and divided by the tokens of all replicas,
    not by the number of copies (databricks/megablocks#86, laekov/fastmoe#106,
    deepspeedai/DeepSpeed#5618).  Stages are equal to the bit as those of other parameters.
    """
    options, parts = case_of(comm, MESHES, number)
    mesh = mm3d.Mesh(comm, **options)
    for case in range(len(CASES)) if (comm.size, number) == (4, 1) else (0,):
        steps = 1 + (number > 0)
        found = [train(mesh, case, steps, BATCH, zero=zero, expert_parallel=parts)
                 for zero in range(4)]
        assert not differences(found[0], serial(case, steps, BATCH))
        assert not differences(found[2], serial(case, steps, BATCH))
        assert not different(found[1], found[0]) and not different(found[3], found[2])
        assert CASES[case][1] > 1 or not different(found[2], found[0])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("zero", [0, 2])
def test_copies_of_an_expert_with_and_without_tokens_are_summed(comm, zero):
    """The first half of the batch goes to the first expert, the other to the last one.

    Each is there twice, and one of its copies gets nothing.  Guards against an expert without
    tokens that leaves out a collective, on which its copy waits, or keeps an old gradient.
    """
    gradients, sizes = [], SIZES | {"batch": BATCH}
    for mesh, more in ((mm3d.Mesh(MPI.COMM_SELF, 1, "serial"), {}),
                       (mm3d.Mesh(comm, data=4, scheme="serial"), {"expert_parallel": 2})):
        model = mm3d.GPT(mesh, **sizes, experts=mm3d.Experts(2, top=1, every=2, capacity=None),
                         dtype="float64", zero=zero, **more)
        layer, = expert_layers(model.pipeline.chunks[0].layers)
        router, rows = layer.router, model.pipeline.rows[0]
        second = np.repeat(np.arange(rows.start, rows.stop) >= BATCH // 2, sizes["seq"])

        def forward(x, own=router.forward, logits=np.stack([~second, second], axis=1)):
            return np.asarray(logits, float), own(x)[1]
        router.forward = forward
        for p in model.trained:
            p.grad[...] = 7    # what an earlier step has left
        model.step(*tokens_and_targets(sizes))
        gradients.append(model.gradients())
        assert model.routings["layers.1.experts"].chosen.tolist() == [[40, 40]]
    assert not differences(gradients[1], gradients[0])


@pytest.mark.parametrize("shards, parts, found", [
    (4, 1, 4), (4, 2, 2), (4, 4, 1), (2, 4, 1), (1, 2, 1), (2, 3, 2), (4, 6, 2)])
def test_zero_divides_what_a_group_has_until_whole_groups_of_shards_are_full(shards, parts, found):
    assert expert_shards(shards, parts) == found
