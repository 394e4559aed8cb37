"""Plans of whole trainings against brute force, and the lines that say why there is none."""
import re

import msgspec
import pytest

from bench.__main__ import main
from bench.prediction.machine_model import load_machine
from bench.prediction.model_file import GptFile, load_model
from bench.prediction.training_plans import search
from bench.prediction.training_plans.choices import Choice, Training
from bench.prediction.training_plans.layer_work import (Layer, screened_work,
                                                        traced_work)
from bench.reports.training_plans import command_lines
from support import status_of

SMALL = GptFile("small", layers=4, hidden=256, heads=4, vocab=512, seq=128)
PLAN = ["plan", "--machine", "dgx-a100"]


def training(gpus: int, batch: int, mib: float) -> Training:
    """A small model on nodes of 4 GPUs with little memory."""
    machine = msgspec.structs.replace(load_machine("dgx-a100"), ranks_per_node=4,
                                      memory_bytes=mib * 2 ** 20)
    return Training(SMALL, gpus, batch, SMALL.seq, "float16", machine)


class Few(search.Search):
    """A search among a part of all plans, so that each can be predicted exactly."""

    def choices(self):
        for choice in super().choices():
            if (choice.zero < 3 and choice.recompute in ("none", "full")
                    and choice.places in (1, 4) and choice.scheme in ("1d", "2d", "3d")
                    and choice.micro in (1, self.training.batch // choice.data)):
                yield choice


@pytest.mark.slow_but_first
@pytest.mark.parametrize("gpus, batch, mib", [(8, 2, 13), (8, 4, 20), (16, 4, 9), (16, 4, 14)])
def test_the_best_plan_is_that_of_all_predicted_exactly(gpus, batch, mib):
    asked = Few(training(gpus, batch, mib))
    found, limit = asked.run(), asked.limit
    every = [plan for choice in asked.choices() if (plan := asked.predicted(choice))]
    fitting = [plan for plan in every if plan.memory["all"] <= limit]
    assert 10 < len(fitting) < len(every)    # the memory decides
    assert found.best.seconds == min(plan.seconds for plan in fitting)
    for plan in fitting:
        choice = plan.choice
        assert plan.choice.family in found.families
        filled, _ = asked.filled(Layer.of(choice, whole=True))
        assert asked.estimator.memory(choice, filled) <= search.SLACK * limit
        filled = asked.traced(Layer.of(choice)).filled
        assert asked.estimator.memory(choice, filled) <= limit * search.TRACED_SLACK[
            choice.schedule == "zb-h1"]


@pytest.mark.parametrize("machine, error", [("dgx-a100", .03), ("dgx-h100", .03),
                                            ("longhorn", .15)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_closed_forms_of_a_layer_are_near_its_dry_run(machine, error, recompute):
    """With softmax in memory, with scores in registers, and with this library's own passes."""
    asked = Training(load_model("llama-2-7b"), 8, 8, 2048, "float32", load_machine(machine))
    for scheme, grid in asked.shapes():
        if grid.sizes in ((1,), (4,), (2, 2), (1, 2, 2)):
            layer = Layer(scheme, grid, 2, recompute, False)
            near, exact = screened_work(asked, layer), traced_work(asked, layer)
            for name in ("forward", "backward"):
                assert getattr(near, name) == pytest.approx(getattr(exact, name), rel=error), layer
            assert near.filled.saved == pytest.approx(exact.filled.saved, rel=.03)


def test_the_options_of_the_best_plan_are_those_of_dry(capsys, tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(msgspec.toml.encode(SMALL).decode())
    assert main([*PLAN, "--gpus", "2", "--model", str(path), "--batch", "2", "--all"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    options = re.search(r"python -m bench (dry .*?) - mpirun", said)[1].split()
    assert main(options) == 0
    assert "MFU" in said and "0 % beside" not in said


def test_a_plan_with_stages_as_options():
    asked = training(8, 8, 100)
    choice = Choice(2, 1, 2, "interleaved:2", 1, "3d", next(
        grid for scheme, grid in asked.shapes() if scheme == "3d"), "full")
    line, _ = command_lines(asked, choice)
    assert "--data 2 --zero 1 --stages 2 --schedule interleaved:2 --microbatches 4" in line
    assert main(line.split()[3:]) == 0


@pytest.mark.parametrize("options, message", [
    (["--gpus", "8", "--model", "llama-3-71b", "--batch", "8"], "did you mean llama-3-70b"),
    (["--gpus", "8", "--model", "llama-3-70b"], "--batch is missing"),
    (["--gpus", "7919", "--model", "llama-3-70b", "--batch", "8"], "such as 4096 would do"),
    (["--gpus", "8", "--model", "gpt-3-175b", "--batch", "1"], "no plan fits 74.5 GiB a GPU"),
    (["--gpus", "8", "--model", "none.toml", "--batch", "8"], "there is no such file"),
    (["--gpus", "8", "--model", "gpt-3-175b", "--batch", "8", "--zero", "1"], "--zero 1"),
    (["--ranks", "8"], "--hidden is missing")])
def test_why_there_is_no_plan(options, message, capsys):
    assert status_of(main, [*PLAN, *options]) == 2
    assert message in capsys.readouterr().err
