"""Plans of whole trainings with experts: against brute force, dry runs, and as options."""
import re
from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from bench.__main__ import main
from bench.prediction.machine_model import load_machine
from bench.prediction.model_file import ModelFile
from bench.prediction.pipelines.pipeline_seconds import predict_pipeline
from bench.prediction.training_plans import screening, search
from bench.prediction.training_plans.choices import LONG_SEQ, Choice, Training
from bench.prediction.training_plans.layer_work import PlannedLayer, trace_layer
from bench.prediction.pipelines.training_step import expert_parameters, layer_parameters
from mm3d.grid.shape import GridShape
from mm3d.model.experts.layer import Experts
from mm3d.model.experts.options import PLAIN_DESIGN, ExpertDesign
from plans import Few, check_best, training, works_of
from support import status_of

EXPERTS = Experts(4, top=2, every=1, gate="mixtral", capacity=None)
ROUTED = ModelFile("routed", layers=4, hidden=256, heads=4, vocab=512, seq=128, experts=EXPERTS)
LINE = GridShape("x", (1,))


def routed(**more) -> ModelFile:
    """The model with other experts."""
    return structs.replace(ROUTED, experts=replace(EXPERTS, **more))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("gpus, batch, mib, every", [(4, 4, 70, 1), (8, 8, 45, 1), (8, 8, 40, 2)])
def test_the_best_plan_is_that_of_all_predicted_exactly(gpus, batch, mib, every):
    """On 4 GPUs without grids."""
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
    """With kernels that add to the gradients of a rank's experts, and with products that do."""
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


@pytest.mark.slow
def test_dry_predicts_the_best_plan_as_it_is_printed(capsys, tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(msgspec.toml.encode({name: getattr(ROUTED, name) for name in (
        "name", "layers", "hidden", "heads", "vocab", "seq")}).decode())
    assert main(["plan", "--machine", "dgx-a100", "--gpus", "4", "--model", str(path), "--batch",
                 "4", "--experts", "4", "--expert-every", "2", "--format", "json"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "experts on" in said and "models with experts" not in said
    options = re.search(r'python -m bench (dry .*?)"', said)[1].split()
    assert options[options.index("--experts") + 1] == "4"
    seconds = re.search(r'"step s".*?(\d+\.\d+)', said)
    assert seconds and main(options) == 0


@pytest.mark.parametrize("more", [["--expert-width", "96"], ["--shared-expert", "96"]])
def test_experts_unlike_the_perceptron_are_refused(capsys, more):
    words = "plan --gpus 8 --batch 8 --model llama-3-8b --experts 8".split()
    assert status_of(main, [*words, *more]) == 2
    assert "trainings are planned with experts as wide as" in capsys.readouterr().err


def test_options_of_experts_that_do_nothing_are_refused(capsys):
    assert status_of(main, ["plan", "--gpus", "8", "--model", "gpt-3-175b", "--batch", "8",
                            "--expert-top", "2"]) == 2
    assert "--experts 8 would do" in capsys.readouterr().err
