"""Trainings and steps beside PyTorch's: what it is given, and recorded; by a made-up library."""
import contextlib
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench.__main__ import parser
from bench.errors import UsageError, WrongResult
from bench.experiments.torch import models
from bench.experiments.torch.child import TorchProcesses, compare_kernels
from bench.experiments.training import beside, torch_training
from bench.experiments.training.plan import Plan
from bench.experiments.training.text import read_training_text
from bench.experiments.training.timed_step import STEP_PARTS, TimedTraining
from bench.instruments.timing import Limits
from bench.records import run_file
from bench.statistics import elapsed
from bench.verbs import train
from made_up_torch import make_up
from mm3d.arrays import backend as backends
from mm3d.config import Config, Division, Model
from mm3d.model.experts.layer import Experts
from mm3d.training.gpt import GPT
from records import format_record, only_record, written
from refused import refused

PLAN = Plan(layers=1, hidden=8, heads=2, batch=4, seq=6, steps=3, lr=0.01, warmup=2)
TEXT = read_training_text()
WORDS = ("--layers 1 --hidden 8 --heads 2 --batch 4 --seq 6 --steps 3 --lr 0 --scheme serial "
         "--validate-every 2 --validation-batches 1 --checkpoints none").split()
LOSS = 5.4963    # of the held-out text, which the rate 0 does not change

# In the place of PyTorch: keeps what it gets, and says what lies beside it.
SUBJECT = """
import json, shutil

class Subject:
    def __init__(self, torch, case, arrays):
        shutil.copytree(sys.argv[2], os.path.join(HERE, "given"))
        with open(os.path.join(HERE, "answer")) as file:
            self.losses, self.validations = json.load(file)

    def step(self, number):
        if not self.losses:
            sys.exit(3)
        return {"loss": self.losses[int(number)], "begin": 7.0, "end": 7.5}

    def validate(self):
        return {"validation": self.validations.pop(0)}
"""


IDLE = """
class Subject:
    def __init__(self, torch, case, arrays):
        pass

    def step(self):
        return {"begin": 0.0, "end": 1.0}
"""


def made_up(folder, losses, validation):
    """Write a made-up interpreter that says these losses and validations; return its path.

    It ends in the first step for which there is no loss.
    """
    (folder / "answer").write_text(json.dumps([losses, [*validation.values()]]))
    return make_up(folder, SUBJECT)


def test_pytorch_gets_the_same_parameters_batches_and_rates(tmp_path):
    state = {"norm.weight": np.arange(8.0), "embedding.weight": np.ones((256, 8))}
    python = made_up(tmp_path, [5.0, 4.5, 4.0], {0: 5.5, 3: 3.5})
    steps_done = []
    found = torch_training.train_by_torch(python, PLAN, TEXT, state, 3, [3, 0], 2,
                                          lambda done, history: steps_done.append(done))
    assert found.about.startswith("PyTorch made up, ") and steps_done == [0, 1, 2, 3, 3]
    assert found.history.losses == {0: 5.0, 1: 4.5, 2: 4.0}
    assert found.history.validation == {0: 5.5, 3: 3.5}
    case = json.loads((tmp_path / "given" / "case.json").read_text())
    assert case["rates"] == [PLAN.rate(step) for step in range(3)]
    assert PLAN.settings().items() <= case.items()
    with np.load(tmp_path / "given" / "arrays-0.npz") as arrays:
        given = dict(arrays)
    steps, held_out = given.pop("tokens of steps"), given.pop("tokens of validation")
    assert given.keys() == state.keys() and all(np.array_equal(given[n], state[n]) for n in state)
    assert steps.shape == (3, 4, 7) and held_out.shape == (2, 4, 7)
    for batches, expected in ((steps, lambda n: TEXT.batch(PLAN.seed, n, 4, 6)),
                              (held_out, lambda n: TEXT.validation(n, 4, 6))):
        for number, both in enumerate(batches):
            tokens, targets = expected(number)
            assert np.array_equal(both[:, :-1], tokens) and np.array_equal(both[:, 1:], targets)


@pytest.mark.parametrize("chosen, expected", [
    ({"capacity": 1.0}, {"capacity": 6, "counted choices": 2, "share divisor": 2}),
    ({"gate": "gshard", "convention": "megablocks", "capacity": None},
     {"capacity": 0, "by choice": True, "share divisor": 2 * PLAN.layers}),
    ({"gate": "sigmoid-bias", "bias_rate": 0.5, "convention": "deepspeed", "capacity": 0.5},
     {"capacity": 4, "by choice": True, "counted choices": 1, "share divisor": 1,
      "bias rate": 0.5}),
    ({"convention": "huggingface", "capacity": None}, {"share divisor": 1})])
def test_pytorch_is_told_how_tokens_are_routed(tmp_path, chosen, expected):
    """The 12 tokens of a micro-batch together, by the definitions of each convention."""
    python = made_up(tmp_path, [], {0: 5.5})
    plan = replace(PLAN, experts=Experts(4, every=1, **chosen))
    torch_training.train_by_torch(python, plan, TEXT, {}, 0, [0], 1, microbatches=2)
    case = json.loads((tmp_path / "given" / "case.json").read_text())
    assert case["microbatches"] == 2 and expected.items() <= case["routing"].items()
    assert plan.settings().items() <= case.items()


def test_a_training_that_pytorch_cannot_follow_is_refused():
    with pytest.raises(UsageError, match="--torch with --dropout 0.1"):
        torch_training.check_torch(replace(PLAN, dropout=0.1))


def run(comm, folder, python):
    """Train by the verb; return the exit status and the records."""
    arguments = parser(["train"]).parse_args([
        "train", *WORDS, "--torch", python, "--out", str(folder / "out")])
    status = train.run(arguments, comm)
    return status, [run_file.read_run(path) for path in (folder / "out").glob("*.h5")]


def test_both_trainings_are_in_one_record(comm, tmp_path, capsys):
    """The numbers of each, and how far apart the last validations are."""
    python = made_up(tmp_path, [5.0, 4.5, 4.0], {0: 5.5, 2: 5.3, 3: LOSS + 0.01})
    status, (found,) = run(comm, tmp_path, python)
    assert status == 0 and found.configuration["torch"].startswith("PyTorch made up, ")
    values = {name: variable.values for name, variable in found.variables.items()}
    assert values["torch_loss"].tolist() == [5.0, 4.5, 4.0]
    assert values["torch_validation_loss"].tolist() == [5.5, 5.3, LOSS + 0.01]
    assert found.checks[-1].error == pytest.approx(
        abs(LOSS + 0.01 - values["validation_loss"][-1]))
    only_record(tmp_path / "out")
    out = capsys.readouterr().out
    assert ", one process, trained afterwards" in " ".join(out.split())
    assert "At equal rates" in " ".join(out.split())
    assert "48 tokens a second" in " ".join(out.split())
    with np.load(tmp_path / "given" / "arrays-0.npz") as arrays:
        assert arrays["layers.0.mlp.up.weight"].shape == (8, 32)


def test_another_curve_is_not_published(comm, tmp_path, capsys):
    python = made_up(tmp_path, [5.0, 4.5, 4.0], {0: 5.5, 2: 5.3, 3: LOSS - 0.05})
    assert run(comm, tmp_path, python) == (1, [])
    assert re.search("failed: train-serial.* last validation loss beside PyTorch's",
                     capsys.readouterr().err)


def test_what_was_trained_is_kept_when_pytorch_fails_later(comm, tmp_path, capsys):
    python = made_up(tmp_path, [], {0: 5.5})
    status, (found,) = run(comm, tmp_path, python)
    assert status == 1 and "torch_loss" not in found.variables
    assert len(found.scales["step"]) == 3
    said = capsys.readouterr()
    assert re.match("failed: train-serial.* could not train the model", said.err)
    assert "written: " in said.out


@pytest.mark.ranks(1, 2)
def test_a_process_that_ends_while_it_sleeps_is_told_on_all_ranks(comm, shared_tmp_path):
    """As of one that the system kills for its memory: the last, or that of rank 0 alone."""
    if comm.rank == 0:
        make_up(shared_tmp_path, IDLE)
    comm.Barrier()
    for ranks, ask in ((comm.size, lambda one: one.sample()),
                       (comm.size, lambda one: one.ask("step")),
                       (1, lambda one: compare_kernels([(1, 1, 1, False, False, 1)], "float32",
                                                       backends.get("numpy"), one, 0, 1.0))):
        process = TorchProcesses(str(shared_tmp_path / "python"), "models:TorchSteps",
                                 {"dtype": "float32"}, {}, comm, "train the model", ranks)
        if comm.rank == ranks - 1:
            process._process.kill()
            process._process.wait()
        with pytest.raises(UsageError, match=f"--torch {shared_tmp_path}/python could not train "
                                             "the model: its process has ended, by signal 9"):
            ask(process)
        process.close()


@pytest.mark.parametrize("name, said", [
    ("nowhere", "--torch .*nowhere: No such file"),
    ("true", "--torch .*true: ModuleNotFoundError: No module named 'torch'; an interpreter")])
def test_an_interpreter_is_tried_before_the_training(comm, tmp_path, capsys, name, said):
    if name == "true":
        (tmp_path / name).write_text("#!/bin/sh\necho a >&2\n"
                                     "echo \"ModuleNotFoundError: No module named 'torch'\" >&2\n"
                                     "exit 1\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(UsageError, match=said) as caught:
        run(comm, tmp_path, str(tmp_path / name))
    assert "\n" not in str(caught.value) and not any(capsys.readouterr())    # nor a step


def test_momentum_does_not_take_up_the_decay():
    """As in `mm3d.training.optimizers`: matrices are multiplied by 1 - lr weight_decay, and
    PyTorch's SGD, which would add the decay to the gradient, before the momentum, gets none."""
    done = []
    sgd = SimpleNamespace(param_groups=[{}], step=lambda: done.append(
        ("step", sgd.param_groups[0]["lr"])))
    torch = SimpleNamespace(no_grad=contextlib.nullcontext, optim=SimpleNamespace(
        SGD=lambda parameters, lr, momentum: len([*parameters]) == 2 and momentum == 0.5 and sgd))
    model = SimpleNamespace(p={
        name: SimpleNamespace(dim=lambda order=order: order,
                              mul_=lambda factor, name=name: done.append((name, factor)))
        for name, order in (("weight", 2), ("bias", 1))})
    case = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.5, "weight_decay": 0.2}
    optimizer = models.make_torch_optimizer(torch, model, case)
    for rate in (0.1, 0.05):
        models.change(torch, model, optimizer, case, rate)
    assert done == [("weight", 0.98), ("step", 0.1), ("weight", 0.99), ("step", 0.05)]


CASE = Model(layers=1, hidden=8, heads=2, vocab=12, batch=4, seq=6)

# In the place of PyTorch: the serial model, and factors of the loss of one step and of the norm.
STEPS = """
class Subject:
    def __init__(self, torch, case, arrays):
        import mm3d
        from mpi4py import MPI
        self.batch, self.steps = [arrays.pop("tokens"), arrays.pop("targets")], 0
        names = ("layers", "hidden", "heads", "vocab", "batch", "seq")
        self.model = mm3d.GPT(mm3d.Mesh(MPI.COMM_SELF, scheme="serial"),
                              **{name: case[name] for name in names}, seed=7)
        self.model.load(arrays)
        self.optimizer = mm3d.AdamW(self.model, case["lr"], case["betas"], case["eps"],
                                    case["weight_decay"])

    def step(self):
        loss = self.model.step(*self.batch) * (1 + LOSS * (self.steps == AT))
        norm = sum(float((g * g).sum()) for g in self.model.gradients().values()) ** 0.5
        self.optimizer.step()
        self.steps += 1
        return {"begin": 7.0, "end": 7.25, "loss": loss, "norm": norm * (1 + NORM)}

    check = step
"""


def made_up_steps(folder, at=0, loss=0.0, norm=0.0) -> str:
    """Write a made-up interpreter, whose loss of one step and norm are off by these factors."""
    return make_up(folder, f"AT, LOSS, NORM = {at}, {loss}, {norm}\n{STEPS}",
                   f"python-{at}-{loss}-{norm}")


def measured(comm, python, kinds):
    subject = TimedTraining(GPT(Config(CASE, Division(data=comm.size)), comm))
    try:
        return beside.measure_beside(subject, python, kinds, Limits(2, 2))
    finally:
        subject.model.free()


@pytest.mark.ranks(1, slow=(2,))
def test_all_sides_are_measured_in_turns(comm, shared_tmp_path):
    python = made_up_steps(shared_tmp_path) if comm.rank == 0 else None
    record = measured(comm, comm.bcast(python), ("tp", "one"))
    if comm.rank:
        return
    found = {name: variable.values for name, variable in record.variables.items()}
    assert list(record.scales["side"]) == ["mm3d", "tp", "one"]
    assert found["times"].shape == (2, 3, comm.size, 2)
    assert found["part_seconds"].shape[::2] == (comm.size, len(STEP_PARTS))
    assert np.isnan(found["times"][:, 2, 1:]).all() and (found["part_seconds"] > -1e-3).all()
    assert np.allclose(found["seconds"][2, :3], 0.25)
    assert np.allclose(found["tokens_per_second"][2, :3], 4 * 6 / 0.25)
    own = elapsed(found["times"])[:, 0]
    assert found["ratio"][2, 0] == pytest.approx(np.median(0.25 / own))
    # Beside the model in NumPy: three first steps, the last one, and the first gradient.
    beside_own = [check for check in record.checks if check.quantity.endswith((", tp", ", one"))]
    assert len(record.checks) > len(beside_own) == 2 * (3 + 1 + 1)
    assert all(check.passed for check in record.checks)
    text = " ".join(format_record(written(record, shared_tmp_path)).split())
    assert "parallelism): PyTorch made up" in text and "waiting" in text
    assert "At equal rates" in text and (found["product_samples"] > 0).all()


@pytest.mark.parametrize("wrong, named", [
    (dict(at=1, loss=1e-3), "loss of step 2, one"), (dict(norm=1e-3), "norm of the first"),
    pytest.param(dict(at=5, loss=0.1), "last loss, one", marks=pytest.mark.slow)])
@pytest.mark.ranks(1)
def test_another_loss_or_gradient_gets_no_times(comm, shared_tmp_path, wrong, named):
    with pytest.raises(WrongResult, match=named):
        measured(comm, made_up_steps(shared_tmp_path, **wrong), ("one",))


@pytest.mark.ranks(2)
def test_what_cannot_be_divided_is_refused(comm, shared_tmp_path):
    for kind, sizes, named in (("ddp", {"batch": 3}, "--batch 3"),
                               ("tp", {"heads": 1}, "--heads 1"),
                               ("tp", {"vocab": 13}, "--vocab 13"), ("dp", {}, "ddp, fsdp2")):
        with pytest.raises(UsageError, match=named):
            beside.refuse_division(Model(**{**vars(CASE), **sizes}), (kind,), comm.size)
    assert "without --torch" in refused(comm, "measure", "step", "--torch-parallel", "ddp")
    assert "/nowhere" in refused(comm, "measure", "step", "--torch", "/nowhere",
                                 "--torch-parallel", "tp",
                                 "--hidden", "8", "--heads", "2", "--vocab", "8", "--layers", "1",
                                 "--batch", "2", "--seq", "2", "--scheme", "1d", "--out",
                                 str(shared_tmp_path / "out"))
