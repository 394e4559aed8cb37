"""Replicas of pipelines, predicted."""

from dataclasses import replace
from functools import partial

import pytest

import mm3d
from bench.__main__ import main
from bench.prediction import machine_model
from bench.prediction.pipelines import hop_seconds, pipeline_seconds
from bench.prediction.pipelines.chunk_events import events_of_chunk
from bench.prediction.pipelines.pipeline_model import PipelineModel
from mm3d.grid.shape import GridShape
from mm3d.model.stack import Stack
from mm3d.tracing import dry_run
from mm3d.tracing.events import Collective
from mm3d.training.optimizers import AdamW
from mm3d.training.schedules import build

LONGHORN = machine_model.load_machine("longhorn")    # 4 ranks a node
DRY = ["dry", "--hidden", "256", "--layers", "8", "--batch", "16", "--seq", "64"]


def shapes(sizes) -> tuple:
    return tuple(mm3d.SCHEMES["3d"].grid_shape(one) for one in sizes)


def made(name="1f1b", stages=4, microbatches=8, grid=(2, 1, 1), **more) -> PipelineModel:
    stack = Stack(layers=8, hidden=256, heads=4, batch=16, seq=64)
    return PipelineModel(build(name, stages, microbatches), "3d", shapes([grid]) * stages, stack,
                         **more)


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
    predicted = PipelineModel(build("1f1b", 2, 2), "3d", shapes([(1, 2, 1)]) * 2,
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
    grids = shapes([(2, 1, 1), (1, 1, 2)])
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
    """64 replicas of 16 stages of a thousand ranks; a rank of the last replica."""
    ranks = data * stages * 1000
    assert main([*DRY[:3], "--layers", "128", "--batch", str(64 * data), "--ranks", str(ranks),
                 "--data", str(data), "--stages", str(stages), "--microbatches", str(2 * stages),
                 "--rank", str(ranks - 1000), "--zero", "3", "--machine", "longhorn",
                 "--memory", "16 GB"]) == 0
    text = capsys.readouterr().out
    assert f"{data} replicas of grid 10 x 10 x 10, rank {ranks - 1000} of {ranks}" in text
    assert f"{stages} stages, ZeRO 3" in text and f"Stage {stages - 1} of {stages}" in text
    assert "sums ms" in text and "3: and parameters" in text
    assert any(line.split()[:2] == ["d", "all_gather"] for line in text.splitlines())


def test_memory_shrinks_with_the_stages_of_zero():
    peaks = [pipeline_seconds.peak_bytes(made(data=4, zero=zero), 0, True)[0] for zero in range(4)]
    assert peaks[0] > peaks[1] > peaks[2] > peaks[3]
    assert pipeline_seconds.peak_bytes(made(data=4, zero=3, shards=1), 0, True)[0] >= peaks[0]


def test_plans_of_replicas(capsys):
    assert main(["plan", *DRY[1:], "--ranks", "16", "--batch", "64", "--stages", "2", "--data",
                 "4", "--top", "2"]) == 0
    text = capsys.readouterr().out
    assert "sums ms" in text and "4 replicas of 2 stages, 4 micro-batches, ZeRO 0" in text
    assert main(["plan", *DRY[1:], "--ranks", "4", "--data", "4"]) == 2
    assert "--data 4: give --stages too, such as --stages 1" in capsys.readouterr().err


@pytest.mark.parametrize("words, said", [
    (["--zero", "2"], "--zero 2: give --stages too, such as --stages 1"),
    (["--stages", "2", "--zero", "2"], "--zero 2: give --data too"),
    (["--ranks", "24", "--batch", "48", "--stages", "8", "--data", "3", "--shards", "2"],
     "--shards 2 does not divide --data 3"),
    (["--ranks", "16", "--stages", "8", "--data", "2", "--rank", "16"],
     "--rank 16: 0 to 15 would do"),
    (["--data", "3"], "--data 3 does not divide --ranks 8, which is that of all replicas"),
    (["--ranks", "9", "--data", "3"], "--data 3 does not divide --batch 16"),
    (["--grid", "4x1x1,1x4x1"], "--grid 4x1x1,1x4x1: give --stages too, or one grid"),
    (["--stages", "4", "--grid", "2x1x1,1x2x1"], "2 grids for 4 stages")])
def test_what_cannot_be_is_refused(words, said, capsys):
    assert main([*DRY, "--ranks", "8", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words, said", [
    (["--data", "2"], "--data 2: it is of --stages: give that too"),
    (["--grid", "2x1x1,1x2x1"], "--grid 2x1x1,1x2x1: it is of --stages: give that too"),
    (["--stages", "2", "--data", "4", "--shards", "3"], "--shards 3 does not divide --data 4")])
def test_rows_that_are_asked_for_wrongly(words, said, capsys):
    assert main(["predict", *words]) == 2
    assert said in capsys.readouterr().err
