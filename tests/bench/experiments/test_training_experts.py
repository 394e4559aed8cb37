"""Trainings with experts: verified, recorded, and warned of when few experts get most tokens."""
from dataclasses import replace

import numpy as np
import pytest
from mpi4py import MPI

from bench.__main__ import parser
from bench.errors import UsageError, WrongResult
from bench.experiments.training import comparison, record, trainer
from bench.experiments.training.history import History, progress_line
from bench.experiments.training.meshes import list_mesh_cases, ranks_of_mesh
from bench.experiments.training.plan import Plan
from bench.experiments.training.text import read_training_text
from bench.experiments.training.trainer import Course, TrainingRun
from bench.reports.figures.training import meshes_picture
from bench.verbs import train
from mm3d.config import Division
from mm3d.model.experts import layer
from mm3d.model.experts.layer import Experts
from records import format_record, written

PLAN = Plan(layers=2, hidden=8, heads=2, batch=4, seq=6, steps=2, dtype="float64", warmup=2)
COMPARED = replace(PLAN, layers=4, batch=24, warmup=0, optimizer="sgd", weight_decay=0.0, clip=0.0)
COURSE = Course(validate_every=3, validation_batches=1)
TEXT = read_training_text()


@pytest.mark.ranks(1, 4, first=(4,))
@pytest.mark.parametrize("gate", ["mixtral", "sigmoid-bias"])
def test_experts_are_verified_and_their_use_is_recorded(comm, gate, shared_tmp_path):
    """Also divided among replicas, with dropped tokens; the verification leaves no trace."""
    experts = Experts(4, capacity=1.0, gate=gate, balance=0.1)
    plan = replace(PLAN, experts=experts)
    division = (Division(data=2, grid=(2, 1, 1), expert_parallel=2) if comm.size > 1 else
                Division(microbatches=2))
    training = TrainingRun(comm, plan, division, TEXT)
    before = training.model.state()
    checks = training.verify()
    assert len(checks) > 1
    after = training.model.state()
    assert all((after[name] == before[name]).all() for name in before)
    outcome = trainer.run_training(training, COURSE)
    found = record.training_record(training, COURSE, outcome)
    training.free()
    if found is not None:
        assert plan.settings().items() <= found.configuration.items()
        entropy, dropped = (found.variables[name].values for name in ("entropy", "dropped_share"))
        assert (0 < entropy).all() and (entropy <= 1).all() and (dropped > 0).all()
        assert "experts' entropy 0." in progress_line(2, outcome.history, 2, 1)
        assert "4 experts, top 2" in format_record(found)
        written(found, shared_tmp_path)


@pytest.mark.ranks(2)
def test_meshes_with_experts_have_the_same_losses_and_drop_the_same(comm, shared_tmp_path):
    """A few of them; as many micro-batches are compared."""
    experts = Experts(3, capacity=1.0, gate="mixtral", balance=0.1)
    chosen = [case for case in list_mesh_cases(2, experts) if str(case) in (
        "serial", "serial, 4 micro-batches", "3d 2x1x1", "data 2, ZeRO 3, serial",
        "2 stages 1f1b, serial, 4 micro-batches", "data 2, experts on 2, serial",
        "data 2, ZeRO 2, experts on 2, serial")]
    found = compare_meshes(comm, shared_tmp_path, experts, chosen)
    if found is not None:
        assert found.configuration["one_rank"].split("; ") == [
            "serial, 4 micro-batches" if "4 micro" in mesh else "serial"
            for mesh in found.scales["mesh"]]
        assert sum("bits of" in check.quantity for check in found.checks) == 2


@pytest.mark.slow
@pytest.mark.ranks(8)
@pytest.mark.limit(600)
@pytest.mark.parametrize("experts, divided", [
    (Experts(5, capacity=0.8, gate="gshard", balance=0.1, every=1), False),
    (Experts(4, capacity=None, gate="sigmoid-bias", bias_rate=0.01), True)])
def test_every_mesh_with_experts_has_the_same(comm, shared_tmp_path, experts, divided):
    """All that need more than 2 ranks, and no ZeRO 1 and 2 of experts that nothing divides; with a
    gate that drops nothing, where replicas that divide experts exchange another number of rows in
    each step, these alone."""
    cases = [case for case in list_mesh_cases(8, experts)
             if case.expert_parallel > 1 and (divided or ranks_of_mesh(case) > 2)
             or case.zero in (0, 3) and ranks_of_mesh(case) > 2 and not divided
             or case.given().keys() <= {"scheme", "microbatches"}]
    assert len(cases) > (20 if divided else 35)
    found = compare_meshes(comm, shared_tmp_path, experts, cases)
    if found is not None:
        assert meshes_picture(shared_tmp_path / "meshes.png", found).stat().st_size > 10_000


def compare_meshes(comm, shared_tmp_path, experts, cases):
    found = comparison.compare_meshes(comm, replace(COMPARED, experts=experts), TEXT, cases=cases)
    if comm.rank == 0:
        assert [check for check in found.checks if not check.passed] == []
        dropped = found.variables["dropped_share"].values
        assert (dropped > 0).all() == (experts.capacity is not None)
        text = format_record(written(found, shared_tmp_path))
        assert "DIFFERENT" not in text and "pairs of other experts" in text
    return found


def test_a_mesh_that_routes_otherwise_fails():
    """One pair of all that were chosen, where losses are the same."""
    plan, cases = replace(COMPARED, experts=Experts(3)), list_mesh_cases(2, Experts(3))[:2]
    chosen = np.ones((plan.steps, 2, 2, 3), int)
    trained = [comparison.MeshTraining(np.ones(plan.steps), {"a": np.zeros(3)}, {"a": np.ones(3)},
                                       chosen + moved, np.ones((plan.steps, 2, 3), int))
               for moved in (0, np.eye(3, dtype=int)[0] - np.eye(3, dtype=int)[1])]
    record = comparison.comparison_record(plan, TEXT, cases, dict(zip(cases, trained)), {})
    wrong = [check.quantity for check in record.checks if not check.passed]
    assert wrong == [f"experts chosen by {cases[1]}"]


def test_a_comparison_that_proves_nothing_is_refused():
    experts = replace(COMPARED, experts=Experts(4))
    for plan, said in ((experts, "on 1 rank"), (replace(experts, dtype="float32"), "float64 wo")):
        with pytest.raises(UsageError, match=f"--compare with --experts .*{said}"):
            comparison.compare_meshes(MPI.COMM_SELF, plan, TEXT)


def test_a_wrong_balance_loss_is_not_trained(monkeypatch):
    plan = replace(PLAN, experts=Experts(4, balance=1.0))
    training = TrainingRun(MPI.COMM_SELF, plan, Division(), TEXT)
    right = layer.balance_loss
    monkeypatch.setattr(layer, "balance_loss",
                        lambda *given: (right(*given)[0], 1.01 * right(*given)[1]))
    with pytest.raises(WrongResult, match="gradient is off by"):
        training.verify()
    training.free()


def test_progress_warns_of_experts_that_get_nothing():
    line = progress_line(1, History(
        {0: 2.0}, {0: 0.1}, {}, {0: 0.4}, {0: 0.25}), 9, 10)
    assert line.endswith("experts' entropy 0.400, 25.0 % dropped, FEW EXPERTS GET MOST TOKENS")


@pytest.mark.parametrize("options, expected", [
    ([], {}),
    (["--capacity", "none"], {"capacity": None}),
    (["--convention", "huggingface"], {"capacity": None, "convention": "huggingface"}),
    (["--convention", "deepspeed", "--expert-top", "1", "--min-capacity", "0", "--expert-order",
      "choice"],
     {"convention": "deepspeed", "top": 1, "min_capacity": 0, "order": "choice"}),
    (["--gate", "sigmoid-bias", "--bias-rate", "0.01", "--z-loss", "0", "--expert-every", "1"],
     {"gate": "sigmoid-bias", "bias_rate": 0.01, "z": 0.0, "every": 1})])
def test_every_option_of_experts_can_be_given(options, expected):
    plan = train.make_plan(parser(["train"]).parse_args(["train", "--experts", "4", *options]))
    assert plan.experts == Experts(4, **{"gate": "mixtral", **expected})


def test_a_balance_loss_that_the_number_of_layers_divides_is_verified():
    """That of "megablocks"; test_experts has the other conventions."""
    experts = Experts(4, capacity=0.5, balance=0.5, convention="megablocks", every=1)
    training = TrainingRun(MPI.COMM_SELF, replace(PLAN, experts=experts), Division(), TEXT)
    assert all(check.passed for check in training.verify())
    training.free()


@pytest.mark.parametrize("options, message", [
    (["--compare", "--experts", "4", "--data", "2", "--expert-parallel", "2"],
     "--compare with --data"),
    (["--experts", "2", "--expert-top", "3"], "top=3 experts cannot be chosen among count=2"),
    (["--expert-top", "2"], "--expert-top 2 would do nothing here: --experts 8 would do"),
    (["--experts", "4", "--bias-rate", "0.1"], "--bias-rate 0.1 .* --gate sigmoid-bias would do"),
    (["--experts", "4", "--capacity", "none", "--min-capacity", "4"], "--min-capacity 4 would"),
    (["--experts", "4", "--convention", "huggingface", "--expert-order", "choice"],
     "--expert-order choice"),
    (["--experts", "4", "--convention", "huggingface", "--capacity", "1"], "drops no token")])
def test_options_of_experts_that_do_not_fit_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        train.make_plan(parser(["train"]).parse_args(["train", *options]))
