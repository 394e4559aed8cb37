"""Plans and pipelines of models with experts: exact words, dry runs of the best."""
import pytest

import mm3d
from bench.__main__ import main
from bench.prediction import machine_model, planner
from bench.prediction.closed_form_plan import screen_grid
from bench.prediction.pipelines.pipeline_model import PipelineModel
from bench.prediction.pipelines.pipeline_seconds import predict_pipeline
from mm3d.model.experts.layer import Experts
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.tracing import dry_run
from mm3d.tracing.events import PHASES
from mm3d.training.schedules import build

LONGHORN = machine_model.load_machine("longhorn")
EXPERTS = Experts(4, top=2, every=2, gate="mixtral", capacity=None)
SIZES = mm3d.ModelSizes(4, 32, 4, 8, 8)
WORDS = "--ranks 4 --layers 4 --hidden 64 --heads 4 --batch 8 --seq 16 --experts 4".split()


def made(name="1f1b", stages=2, scheme="3d", grid=(2, 1, 1), sizes=SIZES, **more):
    shape = find_scheme(scheme).grid_shape(grid)
    return PipelineModel(build(name, stages, 4), scheme, (shape,) * stages,
                         Stack(**sizes, experts=EXPERTS), **more)


def test_stages_take_together_what_the_whole_model_takes():
    """F of both stages, and the memory of one stage with one micro-batch."""
    model = made()
    whole = dry_run.trace_step("3d", 2, (2, 1, 1), block=LONGHORN.elementwise_block,
                               experts=EXPERTS, **model.micro)
    halves = [model.trace(2, stage=stage, block=LONGHORN.elementwise_block) for stage in (0, 1)]
    for phase in PHASES:
        assert sum(half.flops(phase) for half in halves) == whole.flops(phase)
    times = predict_pipeline(model, LONGHORN).timeline.times
    assert times.forward[0] == times.forward[1] > 0
    with_none = predict_pipeline(PipelineModel(
        model.schedule, "3d", model.grids, Stack(**SIZES)), LONGHORN).timeline.times
    assert times.forward[0] > with_none.forward[0]


@pytest.mark.parametrize("scheme, grid", [("3d", (2, 2, 1)), ("1d", (4,)), ("2d", (2, 2))])
def test_screened_words_are_those_of_dry_runs(scheme, grid):
    shape = find_scheme(scheme).grid_shape(grid)
    plan = screen_grid(scheme, shape, LONGHORN, Stack(**SIZES, experts=EXPERTS))
    traces = [dry_run.trace_step(scheme, 4, grid, rank, experts=EXPERTS, **SIZES)
              for rank in range(4)]
    for phase in PHASES:
        moved = sum(one.words for trace in traces for one in trace.traffic[phase].values())
        assert plan.words[phase] == moved / 4 > 0
    traced = planner.trace_plan(plan, LONGHORN, Stack(**SIZES, experts=EXPERTS))
    assert traced.memory == dry_run.trace_step(
        scheme, 4, grid, block=LONGHORN.elementwise_block, experts=EXPERTS, **SIZES).peak
    assert plan.over_bound != plan.over_bound


def test_plans_with_experts_are_printed(capsys):
    assert main(["plan", *WORDS, "--expert-top", "1", "--top", "2"]) == 0
    first = capsys.readouterr().out
    assert "4 experts in one of 2 layers, top 1" in " ".join(first.split())
    assert "lower bound for the products" not in first
    assert main(["plan", *WORDS, "--stages", "2", "--top", "1", "--recompute", "full"]) == 0
    assert "2 stages, 4 micro-batches" in capsys.readouterr().out


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


@pytest.mark.parametrize("more, said", [
    (["--data", "2", "--stages", "1"], "--data: what is planned with experts is one replica"),
    (["--costs"], "--costs: what is planned"),
    (["--convention", "megablocks", "--capacity", "0.001"], "drops every one of 128 tokens"),
    (["--stages", "2", "--expert-every", "3"], "begins with layer 2 of a model with experts"),
    (["--expert-top", "5"], "--expert-top 5 experts cannot be chosen among --experts 4")])
def test_what_cannot_be_planned_is_refused(capsys, more, said):
    assert main(["plan", *WORDS, *more]) != 0
    assert said in " ".join(capsys.readouterr().err.split())


def test_options_of_experts_alone_are_refused(capsys):
    assert main(["plan", "--ranks", "4", "--hidden", "64", "--gate", "switch"]) != 0
    assert "--gate switch would do nothing here" in capsys.readouterr().err
