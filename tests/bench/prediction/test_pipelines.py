"""Pipelines, their replicas and schedules, predicted: hops, sums, the clock, plans."""
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

import mm3d
from bench.__main__ import main
from bench.prediction import machine_model
from bench.prediction.pipelines import hop_seconds, pipeline_seconds, schedule_costs
from bench.prediction.pipelines.chunk_events import events_of_chunk, run_few
from bench.prediction.pipelines.pipeline_model import PipelineModel
from bench.prediction.pipelines.schedule_costs import ComparedPipeline
from bench.prediction.seconds import step_seconds
from mm3d import ModelSizes
from mm3d.grid.shape import GridShape
from mm3d.model.experts.layer import Experts
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.tracing import dry_run
from mm3d.tracing.events import Collective
from mm3d.training.optimizers import AdamW
from mm3d.training.schedules import Times, build, format_schedule, time_actions

LONGHORN = machine_model.load_machine("longhorn")    # 4 ranks a node
SIZES = ModelSizes(layers=8, hidden=256, heads=4, batch=16, seq=64)
DRY = ["dry", "--hidden", "256", "--layers", "8", "--batch", "16", "--seq", "64"]


def shapes(*sizes) -> tuple[GridShape, ...]:
    return tuple(find_scheme("3d").grid_shape(one) for one in sizes)


def made(name="1f1b", stages=4, grid=(2, 1, 1), microbatches=8, **more) -> PipelineModel:
    return PipelineModel(build(name, stages, microbatches), "3d", shapes(*[grid] * stages),
                         Stack(**SIZES), **more)


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
    model = PipelineModel(build(name, 1, 1), "3d", (find_scheme("3d").grid_shape((2, 2, 1)),),
                          Stack(**SIZES))
    found = pipeline_seconds.predict_pipeline(model, LONGHORN)
    trace = dry_run.extrapolate_step("3d", 4, (2, 2, 1), **SIZES)
    assert float(found.seconds) == sum(step_seconds(LONGHORN, trace).values())
    assert found.timeline.bubble == 0


MILLION = ["dry", "--hidden", "256", "--layers", "128", "--machine", "longhorn", "--memory",
           "16 GB"]


@pytest.mark.parametrize("ranks, stages, grid", [
    (16_000, 16, "10 x 10 x 10"),
    pytest.param(1_000_000, 64, "25 x 25 x 25", marks=pytest.mark.slow)])
def test_a_million_ranks_are_predicted(ranks, stages, grid, capsys):
    """Some stage in the middle; each rank of it sends as many blocks as all others do."""
    assert main([*MILLION, "--batch", "128", "--ranks", str(ranks), "--stages", str(stages),
                 "--microbatches", str(stages), "--rank", str(ranks // 2)]) == 0
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


ROUTED = {"experts": Experts(4, top=2, every=1, gate="mixtral", capacity=None)}


@pytest.mark.parametrize("name, stages, micro, stage, more, mesh", [
    ("1f1b", 1, 3, 0, {}, {}), ("1f1b", 3, 5, 0, {"recompute": "full"}, {"data": 2, "zero": 3}),
    ("zb-h1", 2, 4, 0, {"recompute": "selective"}, {"data": 2, "zero": 2, "vocab": 0}),
    ("zb-h1", 2, 4, 1, {}, {"context": 2, "context_way": "ring"}),
    ("interleaved:3", 2, 4, 1, {"layers": 8}, {"data": 2, "zero": 1}),
    ("interleaved:2", 3, 6, 0, ROUTED, {"data": 2, "zero": 1, "expert_parallel": 2})])
def test_few_micro_batches_tell_the_peak_of_all(name, stages, micro, stage, more, mesh):
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


def test_sums_follow_the_last_action_of_each_stage():
    """Their time is that of the collectives along d, which cross nodes; the clock is the same."""
    alone, several = (pipeline_seconds.predict_pipeline(made(data=data), LONGHORN)
                      for data in (1, 4))
    assert set(alone.sums) == {0} and alone.seconds == alone.timeline.makespan
    assert several.timeline.ends == alone.timeline.ends
    assert several.seconds == max(row[-1] + own for row, own in zip(several.timeline.ends,
                                                                    several.sums))
    trace = made(data=4).trace(2)
    assert {event.stride for event in trace.count(Collective, "sums")} == {8}
    moved = sum(one.bytes for one in trace.traffic["sums"].values())
    assert 2 * moved / LONGHORN.network.bytes_per_second < min(several.sums)


WAYS = [{}, dict(data=4, shards=2), dict(data=4, zero=1), dict(data=4, zero=3),
        dict(data=2, context=2, zero=2),
        dict(data=4, zero=1, experts=mm3d.Experts(4, top=2, every=2), expert_parallel=2)]
STAGES = [("gpipe", 1, 0), ("zb-h1", 0, 512), ("gpipe", 3, 512)]


@pytest.mark.parametrize("how, name, stage, vocab", [
    pytest.param(how, *stage, marks=[pytest.mark.slow] * ((i - j) % len(STAGES) > 0))
    for i, how in enumerate(WAYS) for j, stage in enumerate(STAGES)])
def test_parts_of_a_chunk_count_what_a_whole_run_does(name, stage, vocab, how):
    """In the same order too, so that the sums of seconds are equal to the bit."""
    how = dict(how)
    experts, model = how.pop("experts", None), made(name, microbatches=1, vocab=vocab, **how)
    model = replace(model, stack=replace(model.stack, causal=True, experts=experts))
    parts, whole = (count(8, stage=stage, block=1 << 20)
                    for count in (partial(events_of_chunk, model), model.trace))
    assert parts.all_phases == whole.all_phases
    counted, wanted = ([one for one in trace.events.items() if one[0][0] in whole.all_phases]
                       for trace in (parts, whole))    # not what building takes
    assert counted == wanted


def test_a_whole_step_is_that_of_a_gpt_on_every_rank():
    """With 2 replicas of 2 stages of 2 ranks, where nothing divides, from that of fewer layers."""
    sizes = dict(layers=8, hidden=12, heads=3, seq=5, dtype="float16")
    predicted = PipelineModel(build("1f1b", 2, 2), "3d", shapes(*[(1, 2, 1)] * 2),
                              Stack(batch=6, **sizes), vocab=17, data=2, zero=1)

    def model(comm, backend):
        mesh = mm3d.Mesh(comm, data=2, stages=2, scheme="3d", grid=(1, 2, 1), backend=backend)
        return mm3d.GPT(mesh, **sizes, batch=12, vocab=17, schedule="1f1b", microbatches=2,
                        zero=1, master="float32")

    def step(gpt, _):
        optimizer = AdamW(gpt, 1e-3)
        gpt.rehearse()
        optimizer.step()
    for rank in range(8):
        replica, stage, place = rank // 4, rank // 2 % 2, rank % 2
        found = predicted.whole_step(place, stage, replica, optimizer=True)
        wanted = dry_run.trace(model, 8, rank, step=step)
        assert found.total_traffic() == wanted.total_traffic()
        assert (found.parameters, found.peak, found.pool_peak) == (
            wanted.parameters, wanted.peak, wanted.pool_peak)
        assert found.events == wanted.events


def test_zero_3_takes_its_time_in_the_actions():
    """Its gathers are in F and B, and nothing is left for the end of a step."""
    found = [pipeline_seconds.predict_pipeline(made(data=4, zero=zero), LONGHORN)
             for zero in range(4)]
    times = [one.timeline.times for one in found]
    assert times[0] == times[1] and max(found[3].sums) == 0
    assert times[3].forward[0] > times[2].forward[0] == times[0].forward[0]
    assert times[2].backward[0] > times[0].backward[0]
    assert 0 < found[2].sums[0] < found[0].sums[0]


def test_replicas_share_the_links_of_a_node():
    """Stages of one rank, three of them: a node of 4 ranks has one and a third replicas."""
    moves = hop_seconds.stage_moves("serial", *[mm3d.SCHEMES["serial"].grid_shape((1,))] * 2,
                                    (1, 4, 8), {})
    crossing, mesh = {}, GridShape("rdsx", (1, 8, 3, 1))
    for source, target in ((0, 1), (1, 2)):
        placed = hop_seconds.place_moves(moves, 4, mesh, "", 4, (source, target))
        crossing[source] = [(int(a), int(b)) for a, b, _ in zip(*placed) if a // 4 != b // 4]
    assert crossing == {0: [(3, 4)], 1: [(7, 8)]}
    assert len(placed[0]) == 5    # replicas, after which places in nodes repeat


def test_stages_of_other_grids_send_the_parts_that_meet():
    """From rows to columns every rank sends half its block to each; words are exact."""
    grids = shapes((2, 1, 1), (1, 1, 2))
    senders, receivers, moved = hop_seconds.stage_moves("3d", *grids, (4, 6, 8), {})
    assert sorted(zip(senders, receivers)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert moved.sum() == 4 * 6 * 8 and set(moved) == {4 * 6 * 8 // 4}
    seconds, level = hop_seconds.seconds_of_moves(LONGHORN, senders, receivers + 2, 4 * moved)
    assert level == "node" and seconds == pytest.approx(
        2 * LONGHORN.node.seconds_per_message / LONGHORN.achieved.latency
        + 4 * 2 * 48 / LONGHORN.node.bytes_per_second / LONGHORN.achieved.node)


@pytest.mark.parametrize("data, stages", [
    (8, 4), pytest.param(64, 16, marks=pytest.mark.slow)])
def test_a_million_ranks_of_a_whole_mesh(data, stages, capsys):
    ranks = data * stages * 1000
    assert main([*MILLION, "--batch", str(64 * data), "--ranks", str(ranks), "--data", str(data),
                 "--stages", str(stages), "--microbatches", str(2 * stages), "--rank",
                 str(ranks - 1000), "--zero", "3"]) == 0
    text = capsys.readouterr().out
    assert f"{data} replicas of grid 10 x 10 x 10, rank {ranks - 1000} of {ranks}" in text
    assert f"{stages} stages, ZeRO 3" in text and f"Stage {stages - 1} of {stages}" in text
    assert "sums ms" in text and "3: and parameters" in text
    assert any(line.split()[:2] == ["d", "all_gather"] for line in text.splitlines())


def test_memory_shrinks_with_the_stages_of_zero():
    peaks = [pipeline_seconds.peak_bytes(made(data=4, zero=zero), 0, True)[0] for zero in range(4)]
    assert peaks[0] > peaks[1] > peaks[2] > peaks[3]
    assert pipeline_seconds.peak_bytes(made(data=4, zero=3, shards=1), 0, True)[0] >= peaks[0]


SMALL = ["schedule", "--schedule", "zb-h1", "--stages", "3", "--microbatches", "4"]


def test_a_schedule_is_printed_and_read_again(tmp_path, capsys):
    assert main([*SMALL, "--beside", "1f1b,interleaved:3"]) == 0
    printed, _, tables = capsys.readouterr().out.partition("\n\n")
    assert printed + "\n" == format_schedule(build("zb-h1", 3, 4))
    assert "interleaved:3: " in tables and "pending" in tables
    file = tmp_path / "mine.txt"
    file.write_text(printed)
    assert main(["schedule", "--file", str(file), "--times", "1,1.3,0.7", "--hop", "1/10"]) == 0
    assert capsys.readouterr().out.startswith(printed)


def test_times_are_shared_among_the_chunks_of_a_rank():
    """All schedules have the same work, so that their costs can be compared."""
    pipeline = ComparedPipeline(4, 8)
    timelines = {name: schedule_costs.timed(name, pipeline)
                 for name in ("1f1b", "interleaved:3", "zb-v", "auto")}
    assert {one.work for one in timelines.values()} == {(24,) * 4}
    assert timelines["1f1b"].bubble == 9 and timelines["interleaved:3"].bubble == 3
    assert timelines["zb-v"].bubble == 0


@pytest.mark.parametrize("text, match", [
    (b"F0 BW0\nBW0 F0\n", "rule 'order' of a schedule: rank 1, action 0, BW of micro-batch 0"),
    (b"F0 Q0\n", "rule 'text' of a schedule: rank 0, action 1, 'Q0'"),
    (b"F0 \xff", "is no text in UTF-8, as its byte 3 shows; a schedule as")])
def test_a_wrong_file_is_refused_in_one_line(text, match, tmp_path, capsys):
    file = tmp_path / "mine.txt"
    file.write_bytes(text)
    assert main(["schedule", "--file", str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"error: {file}: {match}")
    assert said.err.count("\n") == 1


def test_more_than_the_memory_is_named(capsys):
    assert main([*SMALL, "--max-activations", "2"]) == 0
    assert "MEMORY: zb-h1 holds the activations of 3 micro-batches, more than 2" in (
        capsys.readouterr().out)
