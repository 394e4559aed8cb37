"""Contexts, counted and predicted: on real ranks, in closed form, among plans, in a table."""
import re
from dataclasses import replace

import pytest
from msgspec import structs

import mm3d
from bench.__main__ import main
from bench.prediction import seconds
from bench.prediction.machine_model import load_machine
from bench.prediction.meshes.context_ways import list_contexts
from bench.prediction.model_file import ModelFile
from bench.prediction.pipelines.pipeline_model import PipelineModel
from bench.prediction.training_plans import search
from bench.prediction.training_plans.choices import LONG_SEQ, Training
from bench.prediction.training_plans.layer_work import PlannedLayer, trace_layer, traced_work
from bench.prediction.pipelines.training_step import predict_step
from bench.reports.plans.kind_map import winners
from mm3d.grid.shape import GridShape
from mm3d.model.attention.costs import context_moves
from mm3d.model.stack import Stack
from mm3d.tracing.events import Collective
from mm3d.training.schedules import build
from plans import Few, check_best, training, works_of

DRY = ["dry", "--scheme", "1d", "--hidden", "64", "--heads", "4", "--layers", "4", "--batch", "4",
       "--seq", "32", "--ranks", "8", "--stages", "2"]
A100 = load_machine("dgx-a100")
LINE = GridShape("x", (1,))
WAYS = pytest.mark.parametrize("way", ["gather", "ring"])


def made(way: str, **more) -> PipelineModel:
    """Two stages of one rank; or with `more` other replicas."""
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


def test_replicas_of_a_context_divide_parameters_too(capsys):
    assert main([*DRY, "--context", "2", "--data", "2", "--zero", "3", "--microbatches",
                 "2"]) == 0
    text = capsys.readouterr().out
    assert "4 replicas, AdamW, by stage of ZeRO" in text
    assert "4 replicas of grid 1, rank 0 of 8" in text


@pytest.mark.parametrize("words, said", [
    (["--context", "3"], "--data 1 x --context 3 does not divide --ranks 8"),
    (["--context-way", "ring"], "--context-way ring would do nothing here: --context 2 or more"),
    (["--context", "2", "--shards", "3"], "--shards 3 does not divide --data 1 x --context 2"),
    (["--context", "2", "--seq", "1"], "--seq 1 positions cannot be divided by --context 2"),
    (["--context", "2", "--experts", "4"], "--context 2 divides sequences, which experts route"),
    (["--context", "4", "--shards", "2", "--zero", "1", "--stages", "1", "--inside", "r",
      "--machine", "longhorn"], "--inside r with --context 4: a multiple of 4 as --shards would")])
def test_what_cannot_be_divided_is_refused(words, said, capsys):
    assert main([*DRY, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_context_needs_stages(capsys):
    assert main([*DRY[:-2], "--context", "2"]) == 2
    assert "--context 2: give --stages too, such as --stages 1" in capsys.readouterr().err
    assert main(["plan", "--gpus", "8", "--model", "llama-2-7b", "--batch", "8", "--context",
                 "2"]) == 2
    assert "--context 2: with --gpus the plan says it" in capsys.readouterr().err


def test_plans_of_stages_have_a_context(capsys):
    assert main(["plan", *DRY[3:], "--context", "2", "--top", "2"]) == 0
    assert "2 replicas of 2 stages" in capsys.readouterr().out


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


# --- Plans ----------------------------------------------------------------------------------

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
def test_closed_forms_of_a_layer_are_near_its_dry_run(way, context):
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


def test_a_plan_of_long_sequences_says_its_context(capsys, tmp_path):
    path = tmp_path / "long.toml"
    path.write_text('name = "long"\nlayers = 2\nhidden = 256\nheads = 4\nvocab = 512\n'
                    'seq = 16384\n')
    assert main(["plan", "--machine", "dgx-a100", "--gpus", "4", "--model", str(path), "--batch",
                 "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "+ context" in said and "contexts of more than 16 ranks" in said
    options = re.search(r"python -m bench (dry .*?) - mpirun", said)[1].split()
    assert main(options) == 0
    assert ("--context" in options) == (re.search(r"--context (\d+)", said) is not None)


# --- The table of both ways -----------------------------------------------------------------

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


def test_contexts_are_set_beside_each_other(capsys):
    assert main(["plan", "--contexts", "2", "--model", "llama-3-8b", "--machine", "dgx-h100",
                 "--seq", "8192"]) == 0
    text = capsys.readouterr().out
    assert "predicted and not measured" in text and "closed form" in text
    for words, said in ((["--batch", "2"], "--batch 2: with --contexts one sequence"),
                        (["--seq", "1"], "--seq 1 positions cannot be divided by --context 2")):
        assert main(["plan", "--contexts", "2", "--model", "llama-3-8b", *words]) == 2
        assert said in capsys.readouterr().err
    assert main(["plan", "--contexts", "2", "--model", "mixtral-8x7b"]) == 2
    assert "--context 2 divides sequences, which experts route" in capsys.readouterr().err
    assert main(["plan", "--contexts", "1,2", "--model", "llama-3-8b"]) == 2
    assert "numbers from 2 to 1024 would do" in capsys.readouterr().err
