"""Replicas of a model compute its gradients, whatever of its state is divided among them."""
import math
from itertools import product

import numpy as np
import pytest
from gpts import SIZES, alone, case_of, differences, tokens_and_targets, train
from models import different
from reference import all_refuse

import mm3d
from mm3d.grid.layout import Layout
from mm3d.grid.shape import GridShape
from mm3d.training.batches import divide_rows
from mm3d.training.data_parallel import shard_layout

LAYERS = dict(layers=2, hidden=10, heads=2, seq=3)


@pytest.mark.parametrize("spec, shape, units", [
    ("xy,z", (7, 5), {}), ("z,,yx", (5, 3, 8), {2: 4}), ("zx@y", (7,), {}), (",zx@y", (3, 8), {}),
    (",y", (1, 5), {}), ("xy0,z", (7, 5), {}), ("x,z0", (3, 5), {}), ("x0@y", (5,), {})])
def test_shards_divide_what_each_rank_of_a_replica_holds(spec, shape, units):
    """Also a face that holds all: its other ranks have nothing to divide."""
    layout, shape = Layout(spec, units), tuple(shape)
    grid, whole = GridShape("xyz", (2, 2, 2)), GridShape("dxyz", (3, 2, 2, 2))
    for coords in grid.all_coordinates():
        expected, found = (np.zeros(shape, int) for _ in range(2))
        expected[layout.slices(grid, shape, coords)] += 1
        for d in range(3):
            found[shard_layout(layout).slices(whole, shape, {"d": d} | dict(coords))] += 1
        assert np.array_equal(found, expected), coords


@pytest.mark.ranks(2)
@pytest.mark.parametrize("changed, said", [
    (dict(batch=1, microbatches=1),
     "a batch of 1 sequences cannot be divided into 1 equal micro-batches of at least 2 "
     "sequences, one for each replica: 2 would do"),
    (dict(batch=5), "5 sequences cannot be divided into 2 equal micro-batches of at least 2 "
     "sequences, one for each replica: 4 or 6 would do"),
    (dict(zero=4), "zero=4 is no stage of ZeRO"), (dict(zero=True), "zero=True is no stage"),
    (dict(zero=2.0), "zero=2.0 is no stage"), (dict(synchronous="no"), "synchronous='no': True o"),
    (dict(in_flight=-1), "in_flight=-1 should be a whole number of at least 0")],
    ids=str)
def test_what_replicas_cannot_divide_is_named_on_all_ranks(comm, changed, said):
    mesh = mm3d.Mesh(comm, data=2, scheme="serial")
    with all_refuse(comm, said):
        mm3d.Pipeline(mesh, "gpipe", **LAYERS | {"batch": 8, "microbatches": 2} | changed)


@pytest.mark.ranks(2)
def test_a_step_after_one_that_failed_has_gradients_of_its_own(comm):
    """Not those of micro-batches before the failure, whose sums are on their way yet."""
    mesh = mm3d.Mesh(comm, data=2, scheme="serial")
    for zero in range(4):
        pipeline = mm3d.Pipeline(mesh, "1f1b", **LAYERS, batch=8, microbatches=2, zero=zero,
                                 in_flight=2)
        pipeline.rehearse()
        expected, draw = pipeline.gradients(), pipeline.chunks[0].random

        def fail(micro, y):
            if micro:
                raise KeyboardInterrupt
            return draw("gradient")
        with pytest.raises(KeyboardInterrupt), pipeline.new_gradients():
            pipeline.step(lambda micro: draw("input"), fail)
        with pipeline.new_gradients():
            pipeline.rehearse()
        assert not different(pipeline.gradients(), expected), zero


@pytest.mark.ranks(slow=(2, 4))
def test_sums_in_flight_and_steps_that_add_change_no_bit(comm):
    """Sums that go on while ranks compute; and two steps without setting gradients to zero."""
    mesh = mm3d.Mesh(comm, data=comm.size, scheme="serial")
    sizes = LAYERS | {"batch": 2 * comm.size, "microbatches": 2, "dtype": "float64"}
    for zero in range(4):
        found = []
        for in_flight in (0, 1, 3):
            pipeline = mm3d.Pipeline(mesh, "gpipe", **sizes, zero=zero, in_flight=in_flight)
            pipeline.rehearse()
            found.append(pipeline.gradients())
            assert not different(found[-1], found[0]), (zero, in_flight)
            pipeline.zero_gradients()
            once, twice = (add_step(pipeline) for _ in range(2))
            for name in once:
                assert np.allclose(twice[name], 2 * once[name], rtol=1e-12, atol=1e-12), name


def add_step(pipeline):
    """The gradients after one step more, on the same data."""
    draw = pipeline.chunks[0].random
    pipeline.step(lambda micro: draw(f"x{micro}"), lambda micro, y: draw(f"g{micro}"))
    return pipeline.gradients()


# By ranks: a mesh, a schedule, micro-batches, and sequences, which these divide.
MESHES = {
    1: [(dict(scheme="serial"), "gpipe", 3, 6)],
    2: [(dict(data=2, scheme="serial"), "gpipe", 3, 9),
        (dict(data=2, scheme="serial"), "gpipe", 1, 7)],
    3: [(dict(data=3, scheme="serial"), "gpipe", 1, 8)],
    4: [(dict(data=2, stages=2, scheme="serial"), "zb-h1", 2, 6),
        (dict(data=2, scheme="3d", grid=(2, 1, 1)), "gpipe", 2, 10),
        (dict(data=4, scheme="serial"), "gpipe", 1, 7),
        (dict(data=4, shards=2, scheme="serial"), "gpipe", 1, 8),
        (dict(data=2, scheme="1d", grid=(2,)), "gpipe", 1, 4)],
    8: [(dict(data=4, shards=2, stages=2, scheme="serial"), "1f1b", 1, 7),
        (dict(data=2, stages=2, scheme="3d", grid=(1, 2, 1)), "1f1b", 3, 9),
        (dict(data=2, scheme="1d-sp", grid=(4,)), "gpipe", 3, 9),
        (dict(data=2, stages=2, scheme="3d", grid=[(1, 2, 1), (2, 1, 1)]), "1f1b", 1, 4),
        (dict(data=2, stages=2, scheme="1d", shards=1, grid=(2,)), "1f1b", 2, 8),
        (dict(data=2, scheme="faces", grid=(1, 2, 2)), "gpipe", 1, 9),
        (dict(data=2, scheme="3d", grid=(1, 2, 2)), "gpipe", 1, 9)]}


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


@pytest.mark.ranks(1, 4, slow=(2, 3, 8), first=(4,))
@pytest.mark.parametrize("number", range(7))
def test_losses_and_gradients_are_those_of_one_rank(comm, transport, number):
    """The loss is the mean over all targets, not a mean of means of micro-batches or replicas.

    Masks of dropout are those of the sequences' numbers in the batch.  Stages of ZeRO are equal to
    the bit: all of them with one micro-batch, else 0 and 1, and 2 and 3.  A tied head is on the
    embedding's stage or on another.  Guards against gradients divided by what a rank has of the
    batch, against a last shard that is never updated (NVIDIA/Megatron-LM#7452,
    pytorch/pytorch#176076), and against a sum that keeps the last micro-batch alone
    (allenai/open-instruct#1498).
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
