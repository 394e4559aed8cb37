"""``bench experts`` verifies a layer of experts, and measures its parts, words and balance."""
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from bench.errors import UsageError, WrongResult
from bench.experiments.experts import measured, verification
from bench.experiments.experts.measured import PARTS
from bench.experiments.experts.plain import PlainExperts
from bench.experiments.experts.problem import (ROUTINGS, ExpertsCase, ExpertsSubject, make_mesh,
                                               routing_settings)
from bench.experiments.torch import models
from bench.instruments.timing import Limits
from bench.records import folder, run_file
from bench.records.measurements import Measurements, Variable
from bench.reports.figures import style, training as figures
from bench.validation.files import check_file
from made_up_torch import make_up
from mm3d.model.experts.layer import Experts
from records import format_record, invented, written
from support import ROOT, run_python

LIMITS = Limits(2, 2, 1.0)
CASE = ExpertsCase(Experts(5, capacity=1.1, gate="mixtral"), 12, 20, 4, 7, "float64")


def measure(comm=MPI.COMM_SELF, case=CASE, data=1, scheme="1d", grid=None, parts=None,
            torch=None, subject=ExpertsSubject):
    mesh = make_mesh(comm, scheme, grid, data, "numpy")
    try:
        return measured.measure_experts(subject(mesh, case, parts), torch, LIMITS)
    finally:
        mesh.free()


@pytest.fixture(scope="module")
def record():
    return measure()


def test_a_record_says_how_tokens_were_routed(record, tmp_path):
    """It can be checked, printed and drawn."""
    found = {name: variable.values
             for name, variable in written(record, tmp_path).variables.items()}
    assert found["part_samples"].shape == (len(ROUTINGS), 2, len(PARTS), 1, 2)
    uniform, skewed, collapsed = found["entropy"]
    assert 1 > uniform > skewed > collapsed and np.isclose(collapsed, np.log(2) / np.log(5))
    assert found["tokens"][2].sum(0).tolist() == [28, 28, 0, 0, 0]
    assert found["dropped"][2].tolist() == [28 - 13, 28 - 13, 0, 0, 0]    # ceil(1.1 * 56 / 5)
    assert np.isclose(found["balance_loss"][2], 0.01 * 5 / 2) and not found["words"].any()
    text = format_record(record)
    assert "collapsed" in text and "53.6" in text
    assert "50 %" in text    # the confidence that two repetitions give
    with style.figure_style():
        assert len(figures.draw_parts(record).axes) == 2


# In the place of PyTorch: the plain computation, and a version without grouped products.
SUBJECT = """
from bench.experiments.experts.plain import PlainExperts
from mm3d.model.experts.layer import Experts

class Subject:
    def __init__(self, torch, case, arrays):
        self.arrays = arrays

    def ways(self):
        return {"loop": "", "padded": "", "grouped": "there is no such product"}

    def step(self, way, routing):
        return {"begin": 7.0, "end": {"loop": 7.5, "padded": 7.25}[way]}

    def check(self, way, routing):
        given = {**self.arrays, "router.weight": self.arrays["router.weight " + routing]}
        x, dy = (given[name].reshape(-1, 12) for name in ("input", "output gradient"))
        plain = PlainExperts(Experts(5, capacity=1.1, gate="mixtral"), given, x)
        found = plain.gradients(dy)
        return {"output": plain.output() * FACTOR.get(way, 1),
                "input gradient": found.pop("input"),
                **{"gradient of " + name: a for name, a in found.items()}}
"""


def test_pytorch_is_verified_and_measured_in_each_way_that_it_has(tmp_path):
    python = make_up(tmp_path, f"FACTOR = {{}}\n{SUBJECT}")
    record = measure(torch=python)
    found = {name: variable.values for name, variable in record.variables.items()}
    assert (found["samples"][:, 3] == 0.5).all() and (found["samples"][:, 4] == 0.25).all()
    assert np.isnan(found["samples"][:, 5]).all() and (found["samples"][:, :3] > 0).all()
    assert found["torch_flops"] == 3 * CASE.flops
    assert record.configuration["left_out"] == "PyTorch grouped: there is no such product"
    assert sum("PyTorch padded" in check.quantity for check in record.checks) == 3 * 7
    text = " ".join(format_record(written(record, tmp_path)).split())
    assert "Not measured: PyTorch grouped: there is no such product." in text
    assert "(PyTorch loop, uniform)" in text and "(PyTorch grouped" not in text
    with pytest.raises(WrongResult, match="uniform, PyTorch padded: output"):
        measure(torch=make_up(tmp_path, f"FACTOR = {{'padded': 1.001}}\n{SUBJECT}", "wrong"))


def test_a_record_that_contradicts_itself_is_not_valid(record, tmp_path):
    for name in ("words", "tokens"):
        values = record.variables[name].values
        values[...] += values.dtype.type(1)
        errors, _ = check_file(run_file.write_run(record, tmp_path, name))
        values[...] -= values.dtype.type(1)
        assert len(errors) >= 1, name


@pytest.mark.ranks(4)
@pytest.mark.parametrize("top", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_words_between_replicas_are_those_of_the_choices(comm, shared_tmp_path, top):
    """On replicas of a grid that divides rows and features; many choices of all are gathered."""
    case = replace(CASE, experts=replace(CASE.experts, top=top))
    record = measure(comm, case, data=2, scheme="3d", grid=(2, 1, 1))
    if record is not None:
        words = record.variables["words"].values
        assert (words > 0).all() and record.variables["bandwidth"].values.min() > 0
        assert (words == record.variables["expected_words"].values).all()
        assert record.variables["gathered"].values[0] == (top == 4)
        assert all(check.passed for check in record.checks) and len(record.checks) == 3 * 10
        written(record, shared_tmp_path)


@pytest.mark.ranks(4, slow=(8,))
@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_experts_that_some_replicas_divide_are_copied_to_the_others(comm, shared_tmp_path, parts):
    """Gradients are sums over the copies, and no row leaves the replicas that divide experts."""
    grid = (comm.size // 4, 1, 1)
    case = replace(CASE, batch=comm.size)
    record = measure(comm, case, 4, "3d", grid, parts)
    if record is not None:
        assert all(check.passed for check in record.checks) and len(record.checks) == 3 * 10
        words = record.variables["words"].values
        counts = 2 * 5 * 3 * grid[0]    # of choices by expert, of each rank with other tokens
        assert (words == counts).all() == (parts == 1) and (words >= counts).all()
        assert record.configuration["expert_parallel"] == parts
        assert "experts divided among each" in format_record(written(record, shared_tmp_path))


@pytest.mark.parametrize("chosen", [
    *({"gate": gate, "top": 3} for gate in ("switch", "gshard", "sigmoid-bias")),
    *({"convention": name} for name in ("megatron", "deepspeed", "megablocks")),
    {"convention": "huggingface", "capacity": None},
    {"order": "choice", "capacity": 0.5, "min_capacity": 4}])
def test_every_gate_and_convention_is_verified(chosen):
    experts = Experts(4, **{"capacity": 0.7, "balance": 0.5, **chosen})
    case = ExpertsCase(experts, 6, 8, 2, 5, "float64")
    mesh = make_mesh(MPI.COMM_SELF, "serial", None, 1, "numpy")
    subject = ExpertsSubject(mesh, case)
    for routing in ROUTINGS:
        subject.set_routing(routing)
        checks, found = verification.verify_experts(subject, routing, {})
        assert [check for check in checks if not check.passed] == []
        assert (found["dropped"].sum() > 0) == (experts.capacity is not None)
    mesh.free()


def test_what_is_wrong_is_not_timed():
    """A gradient, and the number of words."""
    class WrongGradient(ExpertsSubject):
        def step(self):
            found = super().step()
            for p in self.layer.parameters:
                p.grad *= 1.001 if p.name.endswith("router.weight") else 1
            return found

    class WrongWords(ExpertsSubject):
        def words(self):
            between, inside = super().words()
            return between + 1, inside

    for subject, said in ((WrongGradient, "gradient of router.weight"),
                          (WrongWords, "words between replicas")):
        with pytest.raises(WrongResult, match=said):
            measure(subject=subject)


def test_what_cannot_be_divided_is_refused():
    mesh = make_mesh(MPI.COMM_SELF, "serial", None, 1, "numpy")
    with pytest.raises(UsageError, match="drops every"):
        ExpertsSubject(mesh, ExpertsCase(Experts(4, capacity=0.0), 6, 8, 2, 5))
    with pytest.raises(UsageError, match="expert_parallel=2 does not divide 1 replicas"):
        ExpertsSubject(mesh, CASE, 2)
    mesh.free()
    with pytest.raises(UsageError, match="data=2 does not divide 1 ranks"):
        make_mesh(MPI.COMM_SELF, "serial", None, 2, "numpy")


def made_up_training(balance: float, created: str, seed: int = 0, last: float = 1.0,
                     done: int = 3) -> Measurements:
    variables = {"validation_loss": Variable(np.array([2.0, last]), "1", ("validated",)),
                 "entropy": Variable(np.array([0.9, 0.8, 0.7]), "1", ("step",))}
    chosen = {"layers": 2, "hidden": 8, "seed": seed, "experts_count": 4, "experts_every": 2,
              "heads": 2, "batch": 4, "seq": 6, "steps": 3, "lr": 0.1, "experts_z": 0.0,
              "experts_top": 2, "experts_gate": "mixtral", "experts_balance": balance}
    return invented("training", chosen, {}, {"step": range(done), "validated": [0, done]},
                    variables, [], created)


def test_trainings_that_differ_in_balance_and_seed_are_drawn_together():
    first, again, other, seed = (made_up_training(0.1, "2"), made_up_training(0.1, "3"),
                                 made_up_training(0.0, "1"), made_up_training(0.1, "1", 1, 1.5))
    assert figures.comparable_trainings([first, seed]) == []
    stopped = made_up_training(0.0, "4", done=2)
    found = figures.comparable_trainings([first, seed, again, other, stopped])
    assert found == [other, again, seed]
    assert len({folder.run_identity(one) for one in found}) == 3
    with style.figure_style():
        drawn = figures.draw_balance(found)
    losses, entropies = ([list(line.get_ydata()) for line in panel.lines] for panel in drawn.axes)
    assert losses[0] == [1.0, 1.25] and losses[1] == [1.0, 1.0] and losses[2][1] == 1.5
    assert entropies[0] == [0.7, 0.7]    # of the last tenth of the steps
    assert [one.get_text() for one in drawn.axes[0].get_xticklabels()] == ["0", "0.1"]


@pytest.mark.parametrize("chosen", [
    {}, {"capacity": 0.6}, {"capacity": 0.6, "order": "choice", "gate": "switch"},
    {"gate": "sigmoid-bias", "top": 3, "convention": "megablocks"}])
def test_pytorch_s_ways_compute_the_same(chosen):
    """Where PyTorch is installed: outputs and gradients in float32, as its grouped products are.
    """
    torch = pytest.importorskip("torch")
    case = replace(CASE, experts=Experts(5, **{"gate": "mixtral", **chosen}), dtype="float32",
                   hidden=16, wide=32)
    arrays = {**case.activations(), **case.parameters()}
    arrays |= {f"router.weight {name}": case.router_weight(name) for name in ROUTINGS}
    layer = models.TorchExpertsLayer(torch,
                                     {"routing": routing_settings(case.experts, case.tokens)},
                                     arrays)
    ways = [way for way, problem in layer.ways().items() if not problem]
    assert ways[:2] == ["loop", "padded"]
    for routing in ROUTINGS:
        weights = {**case.parameters(), "router.weight": case.router_weight(routing)}
        x, dy = (arrays[name].reshape(case.tokens, -1) for name in ("input", "output gradient"))
        plain = PlainExperts(case.experts, weights, x)
        slopes = plain.gradients(dy.astype(np.float64))
        for way in ways:
            found = layer.check(way, routing)
            expected = {"output": plain.output(), "input gradient": slopes["input"],
                        **{f"gradient of {name}": slopes[name] for name in weights}}
            for name, a in expected.items():
                error = np.linalg.norm(found[name] - a) / np.linalg.norm(a)
                assert error < 1e-4, (way, routing, name)


def test_subjects_of_pytorch_s_processes_are_there():
    """Their names are texts where they are started; without PyTorch nothing asks for them."""
    folder = Path(models.__file__).parent
    named = sorted({name for path in (ROOT / "bench").rglob("*.py") for name in re.findall(
        r'"((?:models|parallel|pipeline|colossal):\w+)"', path.read_text())})
    done = run_python("-c", f"from pkgutil import resolve_name\n"
                      f"assert all(isinstance(resolve_name(name), type) for name in {named})",
                      cwd=folder)
    assert done.returncode == 0 and len(named) >= 5, done.stderr
