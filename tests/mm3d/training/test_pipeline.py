"""A pipeline computes what one stage computes, to the bit, whatever its schedule."""
import math
from dataclasses import replace

import numpy as np
import pytest

import mm3d
from gpts import case_of
from mm3d.schemes.words import Words
from mm3d.training.schedules.messages import message_count
from mm3d.training.schedules import ScheduleError, build, parse_schedule
from pipelines import M, SIZES, VEE, delayed, differing, run_one_stage, run_pipeline
from reference import all_refuse

# By ranks: stages, scheme, grid.
MESHES = {1: [(1, "3d", None)], 2: [(2, "3d", (1, 1, 1))],
          4: [(2, "3d", (2, 1, 1)), (4, "serial", None), (2, "1d", (2,))],
          8: [(4, "3d", (2, 1, 1)), (2, "2d", (2, 2)), (2, "3d", (1, 2, 2)), (2, "1d-sp", (4,))]}
SOME = ("1f1b", "interleaved:2", "zb-v")
REST = ("gpipe", "zb-h1", "zb-h2", "v-min", "v-half", "dualpipe-v", "auto")


def schedules(stages: int, names=SOME) -> dict:
    """Schedules of these names for so many stages that the layers can be divided among."""
    found = {name: build(name, stages, M) for name in names
             if name != "dualpipe-v" or stages <= M // 2}
    return {name: schedule for name, schedule in (found | {"vee": VEE.get(stages)}).items()
            if schedule and schedule.stage_count <= SIZES["layers"]}


@pytest.mark.ranks(1, 4, slow=(2, 8), first=(1, 4))
@pytest.mark.parametrize("number, names", [
    *((n, SOME) for n in range(4)), *((n, REST) for n in range(2))])
def test_gradients_are_those_of_one_stage_to_the_bit(comm, number, names):
    """Of all parameters, of inputs, and outputs: sends are synchronous, and ranks late.

    Words between stages are the closed form, those inside as many as without a pipeline.
    """
    stages, scheme, grid = case_of(comm, MESHES, number)
    mesh = mm3d.Mesh(comm, stages, scheme, grid)
    expected = run_one_stage(mesh.scheme)
    for name, schedule in schedules(stages, names).items():
        compare(mesh, name, schedule, expected, SIZES)


@pytest.mark.ranks(slow=(4,))
def test_two_chunks_on_each_of_four_stages(comm):
    """As many layers as stages of the schedule."""
    mesh, sizes = mm3d.Mesh(comm, 4, "serial"), SIZES | {"layers": 8}
    expected = run_one_stage(mesh.scheme, sizes)
    for name in ("interleaved:2", "zb-v"):
        compare(mesh, name, build(name, 4, M), expected, sizes)


def compare(mesh, name: str, schedule, expected, sizes) -> None:
    """Run a schedule, and compare its results and words with those of one stage."""
    comm, scheme = mesh.comm, mesh.scheme.name
    pipeline = mm3d.Pipeline(mesh, schedule, **sizes, synchronous=True,
                             around=delayed(comm.rank), asleep=name != "1f1b")
    pipeline.reset_traffic()
    found = run_pipeline(pipeline)
    assert not differing(found, expected), (name, mesh)
    names = {key for every in comm.allgather([*found]) for key in every}
    assert names == expected.keys(), name
    words = hop_words(pipeline)
    assert comm.allreduce(pipeline.traffic()["s", "send"].words) == words, name
    assert words_inside(mesh) == words_of_layers(pipeline, scheme), name
    compare_forward(pipeline, expected, words, name)


def hop_words(pipeline) -> int:
    """Words of all ranks to other stages: each rank there gets its block of a result once."""
    chunk = pipeline.chunks[0]
    copies = Words(chunk.scheme.name, chunk.grid.shape, *chunk.shape[:2]).outer.copies
    return message_count(pipeline.schedule) * copies * math.prod(chunk.shape)


def compare_forward(pipeline, expected, words: int, name: str) -> None:
    """Compare the outputs of forward alone, and its words: half of a step's `words`."""
    model, found = pipeline.chunks[0], {}
    pipeline.reset_traffic()
    pipeline.forward(lambda micro: model.random(f"{micro}"), lambda micro, y: found.update(
        {f"y{micro}": np.array(model.grid.backend.to_host(y))}))
    assert not differing(found, expected), name
    every = {key for one in pipeline.comm.allgather([*found]) for key in one}
    assert every == {f"y{micro}" for micro in range(M)}, name
    assert 2 * pipeline.comm.allreduce(pipeline.traffic()["s", "send"].words) == words, name


def words_inside(mesh) -> dict:
    """Words along the directions of this stage's grid, of all its ranks."""
    grid = mesh.scheme.grid
    return {key: grid.comm.allreduce(traffic.words) for key, traffic in grid.traffic().items()}


def words_of_layers(pipeline, scheme: str) -> dict:
    """The same by the closed form of the layers."""
    found = {}
    for chunk, stage in zip(pipeline.chunks, pipeline.schedule.stages[pipeline.mesh.stage]):
        sizes = replace(chunk.sizes, layers=len(pipeline.parts[stage]))
        for phase in mm3d.cost.words(scheme, chunk.grid.shape, sizes, chunk.recompute).values():
            for key, words in phase.items():
                found[key] = found.get(key, 0) + M * words
    return found


@pytest.mark.ranks(4, slow=(8,))
def test_different_grids_in_different_stages(comm):
    """Blocks are redistributed on the way, uneven ones too; words are the closed form."""
    grids = {4: ((2, 1, 1), (1, 1, 2)), 8: ((2, 1, 2), (1, 4, 1))}[comm.size]
    sizes = SIZES | {"seq": 5, "hidden": 14}
    mesh = mm3d.Mesh(comm, 2, "3d", grids)
    expected = run_one_stage(mesh.scheme, sizes, dtype="float64")
    pipeline = mm3d.Pipeline(mesh, "interleaved:2", **sizes, microbatches=M, dtype="float64",
                             synchronous=True, asleep=True, around=delayed(comm.rank))
    for key, a in run_pipeline(pipeline).items():
        assert np.allclose(a, expected[key], rtol=1e-9, atol=1e-9), key
    words = hop_words(pipeline)
    assert comm.allreduce(pipeline.hops.traffic.words) == words


@pytest.mark.ranks(1, 2)
def test_state_has_the_names_and_values_of_one_stage(comm):
    """Guards against a wrong stage map of V schedules, which have the first and the last layers
    on one rank; and it can be loaded again.
    """
    mesh = mm3d.Mesh(comm, comm.size, "serial")
    expected = mm3d.Transformer(mesh.scheme, **SIZES, seed=3).state()
    for schedule in (VEE[comm.size], "interleaved:2"):
        pipeline = mm3d.Pipeline(mesh, schedule, **SIZES, seed=3,
                                 microbatches=getattr(schedule, "microbatches", M))
        found = pipeline.state()
        assert list(found) == list(expected) and not differing(found, expected)
        for p in pipeline.parameters:
            p.value[...] = 0
        pipeline.load(expected)
        assert not differing(pipeline.state(), expected)


WRONG = "F0 F1 BW0 BW1\nF0 BW1 F1 BW0\n"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("changed, error, said", [
    (dict(schedule=parse_schedule(WRONG)), ScheduleError,
     r"rule 'order' of a schedule: rank 1, action 1"),
    (dict(schedule="4f4b"), ValueError, "schedule '4f4b' is unknown"),
    (dict(schedule=build("1f1b", 3, M)), ValueError,
     "a schedule of 3 ranks cannot be executed by 2 stages"),
    (dict(schedule="interleaved:3"), ValueError,
     "4 layers cannot be divided among 6 stages: at least one layer for each is needed"),
    (dict(batch=3), ValueError,
     "a batch of 3 sequences cannot be divided into 4 equal micro-batches: 4 would do"),
    (dict(schedule="dualpipe-v", microbatches=3, batch=3), ValueError,
     "at least 4 micro-batches are needed"),
    (dict(microbatches="2"), ValueError, "microbatches='2' should be a whole number"),
    (dict(microbatches=None), ValueError, "schedule '1f1b': a name needs microbatches too"),
    (dict(microbatches=0), ValueError, "microbatches=0 should be a whole number"),
    (dict(schedule=build("1f1b", 2, 2)), ValueError,
     "a schedule of 2 micro-batches: 4 were asked for")], ids=str)
def test_what_does_not_fit_is_named_on_all_ranks_before_messages(comm, changed, error, said):
    mesh = mm3d.Mesh(comm, 2, "serial")
    arguments = {"schedule": "1f1b", **SIZES, "microbatches": M} | changed
    with all_refuse(comm, said, error):
        mm3d.Pipeline(mesh, **arguments)
