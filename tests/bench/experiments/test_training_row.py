"""Training steps of GPT on meshes, whose ranks wait for the modelled seconds of their work."""
import numpy as np
import pytest

import mm3d
from bench.__main__ import main
from bench.cases.combined import TrainingCase, cases_by_name, list_cases, load
from bench.cluster.spec import Cluster
from bench.errors import Failed, UsageError
from bench.experiments.rows import training_row
from bench.experiments.rows.dilation import Dilation
from bench.experiments.rows.settings import ModelledWork
from bench.instruments.timing import Limits
from bench.prediction.machine_model import load_machine
from bench.prediction.seconds import collective_terms, work_seconds
from bench.prediction.similarity import emulating_machine
from bench.prediction.waited_step import PARTS, predict_waited
from bench.records import run_file
from bench.records.kinds import combined as kind
from bench.records.measurements import Check, Measurements, Variable
from bench.reports.figures.every_figure import draw_figures
from mm3d import launcher
from mm3d.config import Config, Division, Model
from mm3d.tracing.events import Collective
from mm3d.tracing.trace import Trace
from records import format_tables

SIZES = {"layers": 4, "hidden": 16, "heads": 4, "batch": 8, "seq": 4, "vocab": 24}
SCALE = 20.0
MESHES = {
    2: [Division(data=2, zero=1), Division(stages=2, microbatches=2), Division(grid=(2, 1, 1))],
    4: [Division(data=2, zero=3, grid=(1, 2, 1)),
        Division(data=2, stages=2, zero=2, scheme="serial", schedule="zb-h1", microbatches=2),
        Division(stages=2, scheme="1d", grid=(2,), microbatches=2, recompute="full"),
        Division(data=4, zero=1, scheme="serial", expert_parallel=2)]}


def case(ranks: int, division: Division) -> TrainingCase:
    """A small row; with experts where replicas divide them."""
    experts = mm3d.Experts(count=4, top=2, every=2) if division.expert_parallel > 1 else None
    return TrainingCase("tiny", ranks, 1, Config(Model(**SIZES, experts=experts), division))


def settings(link=None, predict=lambda config, ranks: {"actions": 1.0}):
    machine = load_machine("longhorn")
    work = ModelledWork("longhorn", lambda event: SCALE * work_seconds(machine, event),
                        machine.elementwise_block, SCALE)
    return training_row.TrainingSettings(
        Limits(2, 2), 0, work, Dilation(0.0, link, None, lambda rate: None), predict)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.ranks(2, 4)
def test_a_step_waits_for_all_of_its_work(comm, number):
    """Also for embedding, head, loss and optimizer: as much as a dry run of the rank has."""
    division = MESHES[comm.size][number % len(MESHES[comm.size])]
    found = training_row.measure_training(case(comm.size, division), settings(), comm)
    assert (found is None) == (comm.rank > 0)
    if found is not None:
        values = {name: one.values for name, one in found.raw.items()}
        waited = values["slept"] + values["overlapped"]
        assert (waited >= values["modelled"] * (1 - 1e-9)).all() and (waited > 0).all()
        assert (values["samples"] >= values["modelled"].max()).all()
        assert {"loss", "loss after a step"} < {one.quantity for one in found.checks}
        assert found.configuration["mesh"] == str(division)


@pytest.mark.ranks(2)
def test_work_that_is_not_waited_for_writes_no_times(comm, monkeypatch):
    found = Trace.work
    wrong = 1.001 if comm.rank == 1 else 1
    monkeypatch.setattr(Trace, "work", lambda *given: wrong * found(*given))
    with pytest.raises(Failed, match="s for its work, which takes .* s by the model"):
        training_row.measure_training(case(2, MESHES[2][0]), settings(), comm)


@pytest.mark.ranks(2)
def test_a_wrong_step_writes_no_times(comm, monkeypatch):
    wanted = training_row.losses_and_gradients

    def wrong(training):
        found = wanted(training)
        if training.model.comm.size > 1:
            name = next(name for name in found if name.endswith("weight"))
            found[name] = 1.001 * found[name]
        return found
    monkeypatch.setattr(training_row, "losses_and_gradients", wrong)
    with pytest.raises(Failed, match="differs from the serial scheme: gradient of "):
        training_row.measure_training(case(2, MESHES[2][2]), settings(), comm)


def test_rows_of_a_group_compare_and_can_be_predicted():
    """They are as many ranks, and one model; each has a name of its own."""
    file = load()
    machine = emulating_machine(load_machine(file.machine), file.shrink, SCALE,
                                Cluster.parse(file.cluster))
    cases = list_cases()
    assert len({one.name for one in cases}) == len({one.title for one in cases}) == len(cases)
    assert {one.ranks for one in cases} == {8, 16, 64}
    for one in cases:
        found = predict_waited(one.config, one.ranks, machine)
        assert tuple(found) == PARTS and min(found.values()) >= 0 < found["actions"]
        assert cases_by_name(one.selector) == [one]
    with pytest.raises(UsageError, match="row 'combined:none-3' is unknown: combined:dense-8-1, "):
        cases_by_name("combined:none-3")


def record(number: int, predicted: float, measured: float, ranks: int = 8) -> Measurements:
    """A row that was measured, slowed twice."""
    one = list_cases()[number - 1]
    chosen = one.settings | {
        "dilation": 2.0, "software_share": 0.1, "order": 0, "ended_by": "width",
        "waited_machine": "longhorn", "waited_scale": 1.0, "waited_shrink": 1.0}
    every = Variable(np.ones(ranks), "s", ("rank",))
    return Measurements(
        "combined", chosen, {"ranks": ranks, "cores": 2, "emulated_cluster": "2x4:50Mbit"},
        {"repetition": range(3), "alone": range(3), "part": PARTS, "rank": range(ranks)},
        {"samples": Variable(2 * measured * np.array([1, 1.1, 0.9]), "s", ("repetition",)),
         "software": Variable(np.full(3, 0.1), "s", ("alone",)),
         "predicted": Variable(np.array([predicted, 0, 0, 0]), "s", ("part",)),
         **dict.fromkeys(("modelled", "slept", "overlapped", "words"), every)},
        [Check("loss", 0.0, 1.0)])


def test_the_choice_of_a_planner_is_judged_by_what_was_measured():
    records = [record(1, 2.0, 2.5), record(2, 3.0, 2.0), record(3, 2.5, 2.4)]
    (rows,) = kind.groups(records)
    assert [one.marks for one in rows] == ["chosen", "fastest", ""]
    assert [round(one.error, 3) for one in rows] == [-0.2, 0.5, 0.042]
    assert rows[0].seconds == pytest.approx(2.5) and rows[0].work == 0.5
    first, second = kind.verdicts([rows])
    assert "20 % off in the median, 50 % at most" in first and "MISSED" in first
    assert "chooses data 8, ZeRO 1, serial, 25 % slower than the fastest" in second
    assert "data 8, ZeRO 3, serial; the goal is 5 %, MISSED" in second
    again = kind.groups([*records, record(1, 2.0, 2.0)])[0]    # the latest of a row counts
    assert len(again) == 3 and again[0].marks == "fastest, chosen"


def test_a_record_is_read_and_drawn(tmp_path):
    for number in (1, 2, 3):
        run_file.write_run(record(number, 2.0, 2.1), tmp_path, f"combined-{number}")
    text = format_tables(tmp_path)
    assert "8 ranks: 8 layers" in text and "Predictions and choices:" in text
    drawn, left_out = draw_figures(tmp_path)
    assert [path.name for path in drawn] == ["training-steps-on-meshes.png"] and not left_out


@pytest.mark.skipif(launcher.local_ranks() > 1, reason="reproduce starts mpirun itself")
@pytest.mark.parametrize("words, message", [
    (["--preset", "tiny"], "--table combined --preset: its file bench/cases/combined.toml"),
    (["--recompute", "full"], "--table combined --recompute: "),
    (["--ranks", "7"], "--table combined has no row of these --ranks: 8, 16, 64 would do")])
def test_options_of_other_rows_are_refused(tmp_path, capsys, words, message):
    assert main(["reproduce", "--table", "combined", *words, "--out", str(tmp_path / "a")]) == 2
    assert message in capsys.readouterr().err


def test_sums_of_replicas_between_nodes_are_exchanges():
    """Each of a node's 4 ranks sends half of its array to the other node, through one link."""
    machine = emulating_machine(load_machine("longhorn"), 1.0, SCALE, Cluster.parse("2x4:50Mbit"))

    def seconds(kind: str, direction: str) -> float:
        return collective_terms(machine, Collective(kind, direction, 8, 1, 8000))["network"]
    once = 4 * 8000 / 2 / machine.network.bytes_per_second
    assert seconds("reduce_scatter", "d") == seconds("all_gather", "d") == pytest.approx(once)
    assert seconds("all_reduce", "d") == pytest.approx(2 * once)
    assert seconds("reduce_scatter", "x") < once / 3    # a ring through both nodes
