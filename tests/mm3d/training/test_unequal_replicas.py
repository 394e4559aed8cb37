"""Replicas, also with one sequence more than others in each micro-batch: the same model."""
from itertools import product

import pytest

import mm3d
from gpts import SIZES, alone, case_of, differences, train
from mm3d.training.batches import divide_rows
from models import different

# By ranks: a mesh, a schedule, micro-batches, and sequences, which these divide.
MESHES = {
    1: [(dict(scheme="serial"), "gpipe", 3, 6)],
    2: [(dict(data=2, scheme="serial"), "gpipe", 3, 9),
        (dict(data=2, scheme="serial"), "gpipe", 1, 7)],
    4: [(dict(data=2, stages=2, scheme="serial"), "zb-h1", 2, 6),
        (dict(data=2, scheme="3d", grid=(2, 1, 1)), "gpipe", 2, 10),
        (dict(data=4, scheme="serial"), "gpipe", 1, 7),
        (dict(data=4, shards=2, scheme="serial"), "gpipe", 1, 8),
        (dict(data=2, scheme="1d", grid=(2,)), "gpipe", 1, 4)],
    8: [(dict(data=4, shards=2, stages=2, scheme="serial"), "1f1b", 1, 7),
        (dict(data=2, stages=2, scheme="3d", grid=(1, 2, 1)), "1f1b", 3, 9),
        (dict(data=2, scheme="1d-sp", grid=(4,)), "gpipe", 3, 9),
        (dict(data=2, stages=2, scheme="3d", grid=[(1, 2, 1), (2, 1, 1)]), "1f1b", 1, 4),
        (dict(data=2, stages=2, scheme="1d", shards=1, grid=(2,)), "1f1b", 2, 8)]}


def test_every_sequence_is_in_one_micro_batch_and_those_of_a_replica_are_equal():
    refused = 0
    for batch, data, micros, together in product(range(1, 13), range(1, 5), range(1, 5), (0, 1)):
        least = data * micros
        if batch % micros or batch < least:
            with pytest.raises(ValueError) as error:
                divide_rows(batch, data, micros, bool(together))
            near = [int(n) for n in str(error.value).split(": ")[-1][:-9].split(" or ")]
            assert near and all(len(divide_rows(n, data, micros)) == data for n in near)
            assert least in near or batch > least
            refused += 1
            continue
        found = divide_rows(batch, data, micros, bool(together))
        assert len(found) == data and {len(rows) for rows in found} == {micros}
        every = [n for rows in (zip(*found) if together else found) for one in rows
                 for n in range(one.start, one.stop)]
        assert every == [*range(batch)]
        lengths = [{one.stop - one.start for one in rows} for rows in found]
        assert {len(one) for one in lengths} == {1}
        assert max(map(max, lengths)) - min(map(min, lengths)) == bool(batch // micros % data)
    assert refused


@pytest.mark.ranks(1, 4, slow=(2, 8), first=(4,))
@pytest.mark.parametrize("number", range(5))
def test_losses_and_gradients_are_those_of_one_rank(comm, number):
    """The loss is the mean over all targets, not a mean of means of micro-batches or replicas.

    Masks of dropout are those of the sequences' numbers in the batch.  Stages of ZeRO are equal to
    the bit as without embedding and head, tied ones too, which are on one stage or on two.  Guards
    against gradients divided by the local number of tokens (NVIDIA/Megatron-LM#7452).
    """
    options, schedule, microbatches, batch = case_of(comm, MESHES, number)
    sizes = SIZES | {"batch": batch}
    mesh, replicas = mm3d.Mesh(comm, **options), options.get("data", 1) > 1
    cases = [dict(tied=True, dropout=0.3), dict(tied=False, z_loss=0.01)]
    for case in cases[number % 2:][:1] if comm.size > 1 else cases:    # there one in turn
        expected = alone(sizes, **case)
        found = [train(mesh, sizes=sizes, schedule=schedule, microbatches=microbatches,
                       zero=zero, **case) for zero in range(1 + 3 * replicas)]
        for one in found:
            assert not differences(one, expected), (options, case)
        for one, other in ((1, 0), (3, 2), (2, 0))[:2 + (microbatches == 1)] * replicas:
            assert not different(found[one], found[other]), (one, other)
