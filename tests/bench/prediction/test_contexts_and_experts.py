"""Contexts and experts: exact words, dry runs, and plans against brute force."""
import re
from dataclasses import replace

import pytest
from msgspec import structs

import mm3d
from bench.__main__ import main
from bench.prediction import planner, seconds
from bench.prediction.machine_model import load_machine
from bench.prediction.meshes.context_ways import list_contexts
from bench.prediction.model_file import ModelFile
from bench.prediction.pipelines.pipeline_model import PipelineModel
from bench.prediction.pipelines.pipeline_seconds import predict_pipeline
from bench.prediction.pipelines.training_step import (expert_parameters, layer_parameters,
                                                      predict_step)
from bench.prediction.training_plans import screening, search
from bench.prediction.training_plans.choices import LONG_SEQ, Choice, Training
from bench.prediction.training_plans.layer_work import PlannedLayer, trace_layer, traced_work
from bench.reports.plans.kind_map import winners
from mm3d.grid.shape import GridShape
from mm3d.model.attention.costs import context_moves
from mm3d.model.experts.layer import Experts
from mm3d.model.experts.options import PLAIN_DESIGN, ExpertDesign
from mm3d.model.stack import Stack
from mm3d.tracing import dry_run
from mm3d.tracing.events import PHASES, Collective
from mm3d.training.schedules import build
from plans import Few, check_best, training, works_of

LONGHORN = load_machine("longhorn")
SPARSE = Experts(4, top=2, every=2, gate="mixtral", capacity=None)
SIZES = mm3d.ModelSizes(4, 32, 4, 8, 8)
WORDS = "--ranks 4 --layers 4 --hidden 64 --heads 4 --batch 8 --seq 16 --experts 4".split()


def test_stages_take_together_what_the_whole_model_takes():
    model = PipelineModel(build("1f1b", 2, 4), "3d", (GridShape("xyz", (2, 1, 1)),) * 2,
                          Stack(**SIZES, experts=SPARSE))
    whole = dry_run.trace_step("3d", 2, (2, 1, 1), block=LONGHORN.elementwise_block,
                               experts=SPARSE, **model.micro)
    halves = [model.trace(2, stage=stage, block=LONGHORN.elementwise_block) for stage in (0, 1)]
    for phase in PHASES:
        assert sum(half.flops(phase) for half in halves) == whole.flops(phase)
    times = predict_pipeline(model, LONGHORN).timeline.times
    assert times.forward[0] == times.forward[1] > 0
    with_none = predict_pipeline(PipelineModel(
        model.schedule, "3d", model.grids, Stack(**SIZES)), LONGHORN).timeline.times
    assert times.forward[0] > with_none.forward[0]


def test_dry_runs_with_experts_take_the_planned_grid_and_stages(capsys):
    best = planner.best_grid("3d", 4, LONGHORN, Stack(4, 64, 4, 8, 16,
                                                      experts=Experts(4, gate="mixtral")))
    assert main(["dry", *WORDS, "--ranks", "8", "--batch", "16", "--grid", "auto", "--data", "2",
                 "--expert-parallel", "2"]) == 0
    out = capsys.readouterr().out
    assert f"2 replicas of grid {best}, rank 0 of 8" in out
    assert "Direction e has the replicas" in out
    assert main(["dry", *WORDS, "--grid", "2x1x1", "--stages", "2", "--schedule", "zb-h1",
                 "--memory", "1 GB"]) == 0
    out = capsys.readouterr().out
    assert "\n\nOne micro-batch:\n\n" in out and "\n\n\n" not in out
    out = " ".join(out.split())
    assert "of 32 tokens that are routed together" in out and "it fits" in out


EXPERTS = Experts(4, top=2, every=1, gate="mixtral", capacity=None)
ROUTED = ModelFile("routed", layers=4, hidden=256, heads=4, vocab=512, seq=128, experts=EXPERTS)
LINE = GridShape("x", (1,))


def routed(**more) -> ModelFile:
    return structs.replace(ROUTED, experts=replace(EXPERTS, **more))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("gpus, batch, mib, every", [(4, 4, 70, 1), (8, 8, 45, 1), (8, 8, 40, 2)])
def test_the_best_plan_is_that_of_all_predicted_exactly(gpus, batch, mib, every):
    shapes = [("1d", 1), *[("1d", 2)] * (gpus > 4)]
    _, fitting = check_best(Few(
        training(routed(every=every), gpus, batch, mib), lambda one: one.recompute == "none"
        and one.micro == 1 and one.schedule == "1f1b" and (one.scheme, one.places) in shapes,
        lambda one: one.zero in (0, 2)))
    assert {2, 4} <= {plan.choice.expert_parallel for plan in fitting}


@pytest.mark.parametrize("mib, more", [
    (13, {"experts": None}), (45, {}),
    pytest.param(40, {"experts": replace(EXPERTS, every=2)}, marks=pytest.mark.slow),
    (400, {"experts": None, "seq": LONG_SEQ})])
def test_plans_come_in_the_order_of_their_estimates_and_none_is_left_out(mib, more):
    """Bounds are no higher than estimates, in any place on the nodes; contexts are among plans."""
    asked = search.Search(training(structs.replace(ROUTED, **more), 8, 4, mib))
    found = {family: [seconds for seconds, _ in plans]
             for family, plans in asked.screen().items()}
    every: dict[str, list[float]] = {}
    for choice in asked.choices():
        filled, _ = asked.layers.filled(PlannedLayer.of(choice, whole=True))
        if asked.estimator.memory(choice, filled) <= screening.SLACK * asked.limit:
            seconds = asked.estimator.seconds(choice, asked.screened(PlannedLayer.of(choice)))
            every.setdefault(choice.family, []).append(seconds)
    assert found == {family: sorted(seconds) for family, seconds in every.items()}


@pytest.mark.parametrize("zero, shards, parts", [(0, None, 1), (1, None, 4), (3, 2, 4), (2, 4, 2)])
def test_estimates_by_dry_runs_of_layers_are_near_those_of_a_step(zero, shards, parts):
    """ZeRO cannot divide a single expert of a rank: it stays whole on one of two shards.  With
    ZeRO 2 estimates have 6 % less bytes."""
    asked = search.Search(training(ROUTED, 8, 8, 100))
    plan = asked.predicted(Choice(8, zero, 1, "1f1b", 1, "1d", LINE, "none", shards, "", parts))
    work = asked.traced(PlannedLayer.of(plan.choice))
    assert asked.estimator.memory(plan.choice, work.filled) == pytest.approx(
        plan.memory["all"], rel=.07)
    assert asked.estimator.seconds(plan.choice, work) == pytest.approx(plan.seconds, rel=.08)


@pytest.mark.parametrize("scheme, sizes, parts", [
    ("1d", (2,), 1), ("1d", (2,), 3), ("3d", (2, 1, 2), 2), ("2d", (2, 2), 4)])
@pytest.mark.parametrize("design", [PLAIN_DESIGN, ExpertDesign(512, 768, True)])
def test_parameters_are_those_of_a_dry_run(scheme, sizes, parts, design):
    """Of two layers, one with experts; values and gradients have 2 bytes each."""
    asked = training(routed(every=2, design=design), 4, 4, 100)
    (grid,) = {one for kind, one in asked.shapes if kind == scheme and one.sizes == sizes}
    trace = trace_layer(asked, PlannedLayer(scheme, grid, 2, "none", False, parts))[0]
    where = scheme, grid, asked.stack(2, "none").sizes, asked.gpt.experts
    experts = expert_parameters(*where, parts)
    assert layer_parameters(*where) + experts == pytest.approx(trace.parameters / 8, rel=5e-3)
    if parts > 1:
        assert experts == pytest.approx(trace.divided / 8, rel=5e-3)


@pytest.mark.parametrize("parts, recompute, own", [(1, "none", .18), (4, "full", .08)])
def test_closed_forms_of_a_layer_are_near_its_dry_run(parts, recompute, own):
    gpt = structs.replace(ROUTED, hidden=4096, heads=32,
                          experts=Experts(8, top=2, every=1, capacity=None))
    machine = load_machine("dgx-h100")
    asked = Training(gpt, 8, 8, 2048, "float16", machine)
    for scheme, grid in asked.shapes:
        if grid.sizes in ((1,), (4,), (1, 2, 2)):
            layer = PlannedLayer(scheme, grid, 2, recompute, False, parts,
                                 (*map(grid.stride, grid), grid.ranks) if parts > 1 else ())
            traces = trace_layer(asked, layer.anywhere)
            for kernels, error in (("own", own), ("fused", .11)):
                near, exact = works_of(replace(asked, machine=structs.replace(
                    machine, kernels=kernels)), layer, error, traces)
            assert near.filled.saved == pytest.approx(exact.filled.saved, rel=.15)
            assert near.filled.working < 1.05 * exact.filled.working


def test_experts_inside_nodes_are_reached_faster():
    """4 replicas of 2 stages divide the experts, on nodes of 4: of the first or of all stages."""
    asked = training(ROUTED, 16, 8, 100)
    choice = Choice(8, 1, 2, "1f1b", 1, "1d", LINE, "none", None, "", 4)
    plans = [search.Search(asked).predicted(choice._replace(inside=inside, shards=shards))
             for inside, shards in (("", None), ("d", None), ("d", 4), ("s", None))]
    far, near, hybrid, same = (sum(one.own["forward"]["network"]
                                   for one in plan.step.pipeline.spent) for plan in plans)
    assert far == same > 0 == near == hybrid
    assert asked.insides(choice) == ("", "d") and asked.insides(choice._replace(shards=2)) == ("",)
    with pytest.raises(ValueError, match="shards=2 that expert_parallel=4 divides would do"):
        predict_pipeline(asked.model(choice._replace(shards=2)), asked.machine, inside="d")


DRY = ["dry", "--scheme", "1d", "--hidden", "64", "--heads", "4", "--layers", "4", "--batch", "4",
       "--seq", "32", "--ranks", "8", "--stages", "2"]
A100 = load_machine("dgx-a100")
WAYS = pytest.mark.parametrize("way", ["gather", "ring"])


def made(way: str, **more) -> PipelineModel:
    stack = Stack(layers=3, hidden=12, heads=2, batch=2, seq=13, causal=True)
    return PipelineModel(build("1f1b", 2, 2), "serial",
                         (mm3d.SCHEMES["serial"].grid_shape((1,)),) * 2, stack, vocab=17,
                         context_way=way, **more)


@WAYS
def test_dry_prints_the_words_of_a_context(way, capsys):
    """Those of the closed form: 2 sequences a micro-batch, 16 positions of others, twice."""
    assert main([*DRY, "--context", "2", "--context-way", way, "--memory", "1 GB", "--vocab",
                 "97", "--machine", "longhorn"]) == 0
    text = capsys.readouterr().out
    assert f"2 stages, context 2 {way}" in text and "2 replicas of grid 2, rank 0 of 8" in text
    assert "c among those with the same sequences" in text
    sizes = mm3d.ModelSizes(4, 64, 4, 1, 32)
    moves = context_moves("1d", dict(x=2), sizes, 2, way)
    for phase, own in moves.items():
        for (_, kind), move in own.items():
            (found,) = re.findall(rf"^ *{phase} +c +{kind} +2 +4 +(\S+) +\S+ +(\S+) ", text,
                                  re.MULTILINE)
            assert [int(one.replace(",", "")) for one in found] == [
                move.calls // 2, move.words // 2 // 4]    # of two layers, on 4 ranks


def test_seconds_of_a_ring():
    """A step of a ring's all-gather: a node's link is shared by the lines that leave the node."""
    for size, stride, lines in ((8, 1, 0), (16, 1, 1), (4, 8, 8), (2, 16, 8)):
        event = Collective("all_to_all", "c", size, stride, 10 ** 9)
        found = seconds.collective_terms(A100, event)
        if lines:
            assert found["network"] == lines * 1e9 / A100.network.bytes_per_second
            assert found["latency"] == A100.network.seconds_per_message
        else:
            assert found == {"node": 1e9 / A100.node.bytes_per_second,
                             "latency": A100.node.seconds_per_message}
    whole = seconds.collective_terms(A100, Collective("all_gather", "c", 4, 8, 4 * 10 ** 9))
    assert 3 * found["network"] == pytest.approx(whole["network"])


@WAYS
def test_a_context_in_another_place_is_priced_there(way):
    """Next to each other inside a node, its replicas move keys and values faster."""
    model = replace(made(way, context=4, data=2), stack=replace(
        made(way).stack, hidden=1024, seq=4096))
    machine = structs.replace(A100, ranks_per_node=4)
    apart, near = (predict_step(model, machine, inside=one) for one in ("", "d"))
    assert near.shares["links"] < apart.shares["links"]
    assert model.strides("d")["c"] == 1 and model.strides()["c"] == 2


LONG = ModelFile("long", layers=4, hidden=256, heads=4, vocab=512, seq=256)


class LongTraining(Training):
    """A training whose sequences count as long."""

    long = True


@pytest.mark.limit(300)
def test_the_best_plan_with_contexts_is_that_of_all_predicted_exactly():
    """One sequence on 4 GPUs: without a context there are 4 stages alone."""
    every, _ = check_best(Few(
        LongTraining(**vars(training(LONG, 4, 1, 30))), lambda one: one.recompute == "none"
        and one.places == 1 and one.schedule == "1f1b" and one.micro == 1,
        lambda one: one.zero in (0, 2) and not one.shards))
    assert {plan.choice.context for plan in every} == {1, 2, 4}
    assert {plan.choice.way for plan in every} == {"gather", "ring"}
    for plan in every:
        assert plan.choice.replicas * plan.choice.stages == 4


def test_short_sequences_and_experts_have_no_context():
    asked = training(LONG, 8, 2, 14)
    assert not asked.long and {one.context for one in search.Search(asked).works()} == {1}
    asked = replace(asked, seq=LONG_SEQ)
    assert asked.long and not replace(asked, gpt=structs.replace(
        LONG, experts=mm3d.Experts(4))).long


@WAYS
@pytest.mark.parametrize("context", [2, 8])
def test_closed_forms_of_a_context_are_near_its_dry_run(way, context):
    asked = Training(structs.replace(LONG, hidden=4096, heads=32), 64, 8, 32768, "float16", A100)
    for sizes in ((1,), (4,)):
        layer = PlannedLayer("1d-sp", GridShape("x", sizes), 1, "none", False,
                             strides=(1, sizes[0]), context=context, way=way)
        near, exact = works_of(asked, layer, .05)
        assert near.filled.saved == pytest.approx(exact.filled.saved, rel=.05)
        assert near.filled.working == pytest.approx(exact.filled.working, rel=.35)


@WAYS
@pytest.mark.parametrize("window", [None, 4096])
def test_so_it_is_where_heads_share_keys_and_with_a_window(way, window):
    """Seconds are near, and bytes are not so many that plans which fit were left out."""
    gpt = structs.replace(LONG, hidden=4096, heads=32, architecture=mm3d.Architecture(
        kv_heads=8, window=window))
    asked = Training(gpt, 64, 8, 16384, "float16", load_machine("dgx-h100"))
    layer = PlannedLayer("1d-sp", GridShape("x", (4,)), 1, "none", False, context=4, way=way)
    near, exact = works_of(asked, layer, .01)
    assert near.filled.working < 1.15 * exact.filled.working


def test_scores_are_priced_without_regard_to_the_mask():
    """As without a context: 2 ranks of a context take half of one rank's attention."""
    asked = Training(structs.replace(LONG, hidden=1024), 2, 2, 65536, "float16", A100)
    alone, half = (traced_work(asked, layer, trace_layer(asked, layer)) for layer in (
        PlannedLayer("1d", LINE, 1, "none", False),
        PlannedLayer("1d", LINE, 1, "none", False, context=2)))
    assert half.forward == pytest.approx(alone.forward / 2, rel=.05)


def test_words_counted_are_those_of_the_closed_form():
    asked = Training(LONG, 1, 1, LONG.seq, "float16", A100)
    places = [*list_contexts(asked, [2, 4], [256])]
    assert [(one.ranks, one.places) for one in places] == [(2, 1), (4, 1), (2, 8), (4, 8)]
    for one in places[:2]:
        assert {way.words for way in one.ways.values()} == {one.words}
        assert one.words == (one.ranks - 1) * 3 * 2 * 256 * 256 // one.ranks
        assert one.ways["ring"].hidden <= one.ways["ring"].seconds
        assert one.ways["gather"].peak > one.ways["ring"].peak
        assert winners(one)[2] in ("-", "ring")
