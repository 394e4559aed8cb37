"""Pipelines predicted by a machine model: hops by their links, steps by the clock, plans."""
from fractions import Fraction

import numpy as np
import pytest

from bench.__main__ import main
from bench.prediction import machine_model
from bench.prediction.pipelines import hop_seconds, pipeline_seconds
from bench.prediction.pipelines.chunk_events import run_few
from bench.prediction.pipelines.pipeline_model import PipelineModel
from bench.prediction.seconds import step_seconds
from mm3d import ModelSizes
from mm3d.grid.shape import GridShape
from mm3d.model.experts.layer import Experts
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.tracing import dry_run
from mm3d.training.schedules import Times, build, time_actions
from support import status_of

LONGHORN = machine_model.load_machine("longhorn")    # 4 ranks a node
SIZES = ModelSizes(layers=8, hidden=256, heads=4, batch=16, seq=64)
DRY = ["dry", "--hidden", "256", "--layers", "8", "--batch", "16", "--seq", "64"]


def made(name="1f1b", stages=4, grid=(2, 1, 1), **more) -> PipelineModel:
    grids = (find_scheme("3d").grid_shape(grid),) * stages
    return PipelineModel(build(name, stages, 8), "3d", grids, Stack(**SIZES), **more)


def test_a_hop_takes_the_link_between_its_nodes():
    """Stages of 2 ranks, 4 ranks a node: 0 and 1 are on a node; two ranks share its link to 2."""
    size, achieved = 1e6, LONGHORN.achieved

    def hop(places, source, target):
        moves = np.arange(places), np.arange(places), np.full(places, size)
        return hop_seconds.seconds_of_moves(LONGHORN, *hop_seconds.place_moves(
            moves, 1, GridShape("rdsx", (1, 1, 8, places)), "", 4, (source, target)))
    seconds, level = hop(2, 0, 1)
    assert level == "node" and seconds == pytest.approx(
        LONGHORN.node.seconds_per_message / achieved.latency
        + size / LONGHORN.node.bytes_per_second / achieved.node)
    seconds, level = hop(2, 1, 2)
    assert level == "network" and seconds == pytest.approx(
        LONGHORN.network.seconds_per_message / achieved.latency
        + 2 * size / LONGHORN.network.bytes_per_second / achieved.network)
    alone = hop(1, 3, 4)
    assert alone[1] == "network" and alone[0] < seconds


def test_hops_of_their_own_are_as_one_hop_where_they_are_equal():
    schedule = build("interleaved:2", 3, 6)
    pairs = {(a, b): Fraction(1, 4) for a in range(3) for b in range(3) if a != b}
    times = Times.equal(6, 1, 2, 1, hop="0.25")
    other = Times(times.forward, times.backward, times.weights, links=pairs)
    assert time_actions(schedule, times).ends == time_actions(schedule, other).ends
    slow = Times(times.forward, times.backward, times.weights, times.hop, {(1, 2): Fraction(9)})
    assert time_actions(schedule, slow).makespan > time_actions(schedule, times).makespan
    with pytest.raises(ValueError, match="negative"):
        Times((Fraction(1),), (Fraction(1),), (Fraction(1),), links={(0, 1): Fraction(-1)})


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_step_is_that_of_the_closed_form_without_hops(name):
    """Of equal stages; F and B are those of a dry run of a stage's two layers."""
    model = made(name)
    found = pipeline_seconds.predict_pipeline(model, LONGHORN)
    each = step_seconds(LONGHORN, model.trace(2))
    assert found.without_hops == (8 + 3) * sum(map(Fraction, each.values()))
    assert found.timeline.makespan > found.without_hops
    assert 0 < found.inside < found.between
    halves = pipeline_seconds.predict_pipeline(made("zb-h1"), LONGHORN).timeline.times
    assert min(halves.weights) > 0 and max(found.timeline.times.weights) == 0
    assert np.isnan(pipeline_seconds.predict_pipeline(made(stages=2), LONGHORN).between)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_stage_is_predicted_as_a_model_without_stages(name):
    """To the last digit: of one micro-batch it is the step that dry runs predict."""
    model = PipelineModel(build(name, 1, 1), "3d", (find_scheme("3d").grid_shape((2, 2, 1)),),
                          Stack(**SIZES))
    found = pipeline_seconds.predict_pipeline(model, LONGHORN)
    trace = dry_run.extrapolate_step("3d", 4, (2, 2, 1), **SIZES)
    assert float(found.seconds) == sum(step_seconds(LONGHORN, trace).values())
    assert found.timeline.bubble == 0


@pytest.mark.parametrize("ranks, stages, grid", [
    (16_000, 16, "10 x 10 x 10"),
    pytest.param(1_000_000, 64, "25 x 25 x 25", marks=pytest.mark.slow)])
def test_a_million_ranks_are_predicted(ranks, stages, grid, capsys):
    """Some stage in the middle; each rank of it sends as many blocks as all others do."""
    assert main([*DRY[:3], "--layers", "128", "--batch", "128", "--ranks", str(ranks), "--stages",
                 str(stages), "--microbatches", str(stages), "--rank", str(ranks // 2),
                 "--machine", "longhorn", "--memory", "16 GB"]) == 0
    text = capsys.readouterr().out
    assert f"Stage {stages // 2} of {stages} in a step of {stages} micro-batches" in text
    assert "fits" in text and [line.split()[-1] for line in text.splitlines()
                               if "blocks sent" in line] == [str(2 * stages)]
    assert "between nodes" in text and f"grid {grid}" in text


def test_too_little_memory_ends_with_1(capsys):
    assert main([*DRY, "--ranks", "4", "--stages", "4", "--memory", "1 MB"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_plans_of_the_stages(capsys):
    words = ["--ranks", "4", "--stages", "2", "--microbatches", "4", "--schedule", "zb-h1"]
    assert main(["plan", *DRY[1:], *words, "--top", "3"]) == 0
    text = capsys.readouterr().out
    assert "2 stages, 4 micro-batches" in text and "3 of them run dry" in text
    steps = [float(line.split()[line.count(" x ") * 2 + 2])
             for line in text.splitlines() if line.endswith("yes")]
    assert len(steps) == 3 and steps == sorted(steps)


@pytest.mark.parametrize("words, said", [
    (["--microbatches", "4"], "--microbatches 4: give --stages too"),
    (["--stages", "3"], "--stages 3 does not divide the 8 ranks of a replica"),
    (["--stages", "2", "--grid", "2x1x1"], "grid of 2 x 1 x 1 has 2 ranks, but stage 0 has 4"),
    (["--stages", "2", "--rank", "8"], "--rank 8: 0 to 7 would do"),
    (["--stages", "2", "--schedule", "2f2b"], "schedule '2f2b' is unknown"),
    (["--stages", "2", "--microbatches", "3"], "cannot be divided into 3 equal micro-batches"),
    (["--stages", "2", "--data", "2", "--grid", "2x1x1", "--microbatches", "3"],
     "error: a replica's batch of 8 sequences cannot be divided into 3 equal")])
def test_what_cannot_be_is_refused(words, said, capsys):
    assert status_of(main, [*DRY, "--ranks", "8", "--grid", "4x1x1", *words]) == 2
    assert said in capsys.readouterr().err


ROUTED = {"experts": Experts(4, top=2, every=1, gate="mixtral", capacity=None)}


@pytest.mark.parametrize("name, stages, micro, stage, more, mesh", [
    ("1f1b", 1, 3, 0, {}, {}), ("1f1b", 3, 5, 0, {"recompute": "full"}, {"data": 2, "zero": 3}),
    ("zb-h1", 2, 4, 0, {"recompute": "selective"}, {"data": 2, "zero": 2, "vocab": 0}),
    ("zb-h1", 2, 4, 1, {}, {"context": 2, "context_way": "ring"}),
    ("interleaved:3", 2, 4, 1, {"layers": 8}, {"data": 2, "zero": 1}),
    ("interleaved:2", 3, 6, 0, ROUTED, {"data": 2, "zero": 1, "expert_parallel": 2})])
def test_few_micro_batches_tell_the_peak_of_all(name, stages, micro, stage, more, mesh):
    """Chunks have a layer or two, so that not all are alike."""
    stack = Stack(**{"layers": 6, "dtype": "float16", "causal": True} | more, hidden=64, heads=4,
                  batch=2 * micro, seq=16)
    grid = GridShape("xyz", (1, 2, 1))
    model = PipelineModel(build(name, stages, micro), "3d", (grid,) * stages, stack, named=name,
                          **{"vocab": 64} | mesh)
    chunks = []

    def few(gpt):
        run_few(gpt)
        chunks.extend(getattr(gpt, "pipeline", gpt).worker.chunks)
    known, found = (model.whole_step(0, stage, 0, True, prepare) for prepare in (None, few))
    assert (found.peak, found.activations) == (known.peak, known.activations)
    assert sum(one.runs for one in chunks) < micro * len(chunks)


@pytest.mark.parametrize("recompute, layers, micro", [
    ("full", 11, 6), ("selective", 8, 3),
    *(pytest.param(*more, marks=pytest.mark.slow) for more in (("none", 11, 6), ("full", 10, 6)))])
def test_no_stage_of_a_zero_bubble_pipeline_is_fuller_than_the_fullest(recompute, layers, micro):
    """With recomputation what W needs is the most: stages in the middle with a layer more."""
    model = PipelineModel(build("zb-h1", 4, micro), "1d", (GridShape("x", (1,)),) * 4, Stack(
        layers, 64, 4, micro, 32, dtype="float16", recompute=recompute), vocab=8, named="zb-h1")
    peaks = [model.whole_step(0, stage, optimizer=True).peak for stage in range(4)]
    stage, peak, _ = pipeline_seconds.fullest_stage(model, optimizer=True)
    assert peak == max(peaks) == peaks[stage]
    if (recompute, layers) == ("full", 11):
        assert 0 < stage < 3
