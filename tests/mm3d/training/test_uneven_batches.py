"""Batches that replicas and micro-batches do not divide evenly: the same model, exact words."""
from itertools import product

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from gpts import SIZES, differences, tokens_and_targets, train
from mm3d.model.chain_specs import ModelSpec
from mm3d.model.gpt_spec import gpt_spec
from mm3d.model.sizes import ModelSizes
from mm3d.training.batches import divide_rows

UNEVEN = SIZES | {"batch": 7}
# By ranks: a mesh, a schedule, and micro-batches, which do not divide 7 sequences.
MESHES = {
    1: [(dict(scheme="serial"), "gpipe", 3)],
    2: [(dict(data=2, scheme="serial"), "gpipe", 3),
        (dict(stages=2, scheme="serial"), "zb-h1", 5)],
    4: [(dict(data=2, stages=2, scheme="serial"), "zb-h1", 2),
        (dict(data=2, scheme="3d", grid=(2, 1, 1)), "gpipe", 2),
        (dict(stages=2, scheme="3d", grid=[(2, 1, 1), (1, 2, 1)]), "1f1b", 3),
        (dict(scheme="3d", grid=(1, 2, 2)), "gpipe", 4)],
    8: [(dict(data=4, shards=2, stages=2, scheme="serial"), "1f1b", 1),
        (dict(data=2, stages=2, scheme="3d", grid=(1, 2, 1)), "1f1b", 3),
        (dict(data=2, scheme="1d-sp", grid=(4,)), "gpipe", 3)]}


def test_lengths_differ_by_one_at_most(comm):
    for batch, data, micros in product(range(1, 12), range(1, 5), range(1, 5)):
        if batch < data * micros:
            with pytest.raises(ValueError, match=f"at least {data * micros} would do"):
                divide_rows(batch, data, micros)
            continue
        found = divide_rows(batch, data, micros)
        assert len(found) == data and {len(rows) for rows in found} == {micros}
        assert [n for rows in found for one in rows
                for n in range(one.start, one.stop)] == [*range(batch)]
        for rows in found:
            lengths = [one.stop - one.start for one in rows]
            assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1
        if batch % (data * micros) == 0:
            assert {one.stop - one.start for rows in found for one in rows} == {
                batch // data // micros}


def alone(**case) -> dict[str, np.ndarray]:
    """`train` on one rank, with the whole batch at once."""
    mesh = mm3d.Mesh(MPI.COMM_SELF, 1, "serial", backend="numpy")
    found = train(mesh, sizes=UNEVEN, **case)
    mesh.free()
    return found


@pytest.mark.ranks(1, 4, slow=(2, 8), first=(4,))
@pytest.mark.parametrize("number", range(4))
def test_losses_and_gradients_are_those_of_one_rank(comm, number):
    """The loss is the mean over all targets, not a mean of means of micro-batches or replicas.

    Masks of dropout are those of the sequences' numbers in the batch.  Stages of ZeRO are equal to
    the bit as where all is even.
    """
    if number >= len(MESHES[comm.size]):
        pytest.skip(f"{comm.size} ranks have {len(MESHES[comm.size])} meshes")
    options, schedule, microbatches = MESHES[comm.size][number]
    mesh, replicas = mm3d.Mesh(comm, **options), options.get("data", 1) > 1
    cases = [dict(tied=True, dropout=0.3), dict(tied=False, z_loss=0.01)]
    for case in cases[number % 2:][:1] if comm.size == 8 else cases:    # there one in turn
        expected = alone(**case)
        found = [train(mesh, sizes=UNEVEN, schedule=schedule, microbatches=microbatches,
                       zero=zero, **case) for zero in range(1 + 3 * replicas)]
        for one in found:
            assert not differences(one, expected), (options, case)
        for one, other in ((1, 0), (3, 2)) if replicas else ():
            assert all(np.array_equal(found[one][name], a)
                       for name, a in found[other].items()), (one, other)
    mesh.free()


@pytest.mark.ranks(slow=(2,))
def test_schedules_and_stages_are_equal_to_the_bit(comm):
    one = mm3d.Mesh(MPI.COMM_SELF, 1, "serial", backend="numpy")
    sizes = UNEVEN | {"layers": 4}
    expected = train(one, sizes=sizes, microbatches=5)
    mesh = mm3d.Mesh(comm, 2, "serial")
    for name in ("gpipe", "1f1b", "zb-h1", "zb-v"):
        found = train(mesh, sizes=sizes, microbatches=5, schedule=name,
                      recompute="full" if name == "1f1b" else "none")
        assert all(np.array_equal(found[key], a) for key, a in expected.items()), name
    mesh.free()
    one.free()


def spec_of(sizes) -> ModelSpec:
    """The spec of a GPT of these sizes on one stage."""
    sizes = dict(sizes)
    return gpt_spec(vocab=sizes.pop("vocab"), sizes=ModelSizes(**sizes))


def words_of_grid(model: mm3d.GPT, rows: list[slice]) -> dict:
    """Words inside a replica, by the closed form of each micro-batch."""
    scheme, found = model.mesh.scheme, {}
    for one in rows:
        spec = spec_of(UNEVEN | {"batch": one.stop - one.start})
        for phase in mm3d.cost.words(scheme.name, scheme.grid.shape, spec).values():
            for key, words in phase.items():
                found[key] = found.get(key, 0) + words
    return found


@pytest.mark.ranks(4)
def test_words_are_the_closed_forms(comm):
    """Inside a replica, and between stages."""
    mesh = mm3d.Mesh(comm, data=2, scheme="3d", grid=(1, 2, 1))
    model, grid = mm3d.GPT(mesh, **UNEVEN, microbatches=3), mesh.scheme.grid
    model.reset_traffic()
    model.step(*tokens_and_targets(UNEVEN))
    assert words_of_grid(model, model.pipeline.rows) == {
        key: grid.comm.allreduce(traffic.words) for key, traffic in grid.traffic().items()}
    model.free()
    mesh.free()
    mesh = mm3d.Mesh(comm, data=2, stages=2, scheme="serial")
    model = mm3d.GPT(mesh, **UNEVEN, microbatches=3, tied=False)
    model.reset_traffic()
    model.step(*tokens_and_targets(UNEVEN))
    assert comm.allreduce(model.traffic()["s", "send"].words) == (
        2 * UNEVEN["batch"] * UNEVEN["seq"] * UNEVEN["hidden"])
    model.free()
    mesh.free()


def test_models_of_both_sizes_have_the_same_parameters(comm):
    """Not copies of them: what the second one would have is neither stored nor drawn."""
    mesh = mm3d.Mesh(comm, 1, "serial")
    model = mm3d.GPT(mesh, **UNEVEN, microbatches=3)
    first, second = model.pipeline.models.values()
    assert first[0] is model.pipeline.chunks[0] and (first[0].shape[0], second[0].shape[0]) == (
        3, 2)
    assert all(a is b for a, b in zip(first[0].parameters, second[0].parameters))
    heads = [ends.output.head.weight for ends in model._ends.values()]
    assert heads[0] is heads[1]
    model.free()
    mesh.free()
