"""Training steps of GPT on meshes, whose ranks wait for modelled work, or compute."""
from dataclasses import replace

import msgspec
import pytest

import mm3d
from bench.__main__ import main
from bench.cases.combined import TrainingCase, cases_by_name, list_cases, load_rows
from bench.cluster.spec import Cluster
from bench.errors import Failed, UsageError
from bench.experiments.rows import training_row
from bench.experiments.rows.dilation import Dilation
from bench.experiments.rows.settings import ModelledWork
from bench.instruments.timing import Limits
from bench.prediction.machine_model import Curve, load_machine
from bench.prediction.pipelines.waited_step import PARTS, find_machine, predict_waited
from bench.prediction.seconds import work_seconds
from bench.prediction.similarity import emulating_machine
from bench.records import run_file
from bench.records.folder import read_folder
from bench.records.kinds import combined as kind
from bench.reports.figures.every_figure import draw_figures
from machine_files import format_machine
from mm3d import launcher
from mm3d.config import Config, Division, Model
from records import computed_step, format_tables, waited_step

SIZES = {"layers": 4, "hidden": 16, "heads": 4, "batch": 8, "seq": 4, "vocab": 24}
SCALE = 20.0
MESHES = {
    2: [Division(data=2, zero=1), Division(stages=2, microbatches=2), Division(grid=(2, 1, 1))],
    4: [Division(data=4, zero=1, scheme="serial", expert_parallel=2),
        Division(data=2, zero=3, grid=(1, 2, 1)),
        Division(data=2, stages=2, zero=2, scheme="serial", schedule="zb-h1", microbatches=2),
        Division(stages=2, scheme="1d", grid=(2,), microbatches=2, recompute="full")]}


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


@pytest.mark.parametrize("number", [
    0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2, 3))])
@pytest.mark.ranks(4, slow=(2,))
def test_a_step_waits_for_all_of_its_work(comm, number):
    """Also for embedding, head, loss and optimizer: as much as a dry run of the rank has."""
    if number >= len(MESHES[comm.size]):
        pytest.skip(f"{comm.size} ranks have {len(MESHES[comm.size])} meshes")
    division = MESHES[comm.size][number]
    found = training_row.measure_training(case(comm.size, division), settings(), comm)
    assert (found is None) == (comm.rank > 0)
    if found is not None:
        values = {name: one.values for name, one in found.raw.items()}
        waited = values["slept"] + values["overlapped"]
        assert (waited >= values["modelled"] * (1 - 1e-9)).all() and (waited > 0).all()
        # In all: a sleep that lasts too long shortens those of the next step.
        least = len(values["samples"]) * values["modelled"].max()
        assert values["samples"].sum() >= least * (1 - 1e-9)
        assert {"loss", "loss after a step"} < {one.quantity for one in found.checks}
        assert found.configuration["mesh"] == str(division)


@pytest.mark.parametrize("preset, predicted", [("tiny", {}), ("paper", {"actions": 1.0})])
@pytest.mark.ranks(2)
def test_a_step_that_computes_is_timed_at_its_own_lengths(comm, preset, predicted):
    """A model of the file's lengths is verified; nothing is waited for."""
    sizes = Model(layers=1, hidden=4, heads=2, batch=4, seq=2, vocab=8)
    one = TrainingCase("tiny", 2, 1, Config(sizes, Division(data=2, zero=1)), preset)
    how = replace(settings(predict=lambda config, ranks: predicted), work=None, dilation=None,
                  predicted_by="a machine" * bool(predicted),
                  unpredicted="no machine given" * (not predicted))
    found = training_row.measure_training(one, how, comm)
    if found is not None:
        factor = int(load_rows().shrink) if preset == "paper" else 1
        assert (found.configuration["hidden"], found.configuration["seq"]) == (
            4 * factor, 2 * factor)
        assert found.configuration["work"] == "compute" and found.checks
        assert set(found.raw) == {"samples", "words", *["predicted"] * bool(predicted)}
        matrices = 12 * (4 * factor) ** 2
        assert found.raw["words"].values.sum() >= 2 * matrices    # of gradients, and of values


@pytest.mark.ranks(4)
def test_words_between_experts_are_for_the_tokens_to_say(comm):
    """A dry run supposes equal choices: its calls alone are those of a step."""
    how = replace(settings(), work=None, dilation=None)
    one = replace(case(4, Division(data=2, zero=1, grid=(1, 2, 1), expert_parallel=2)),
                  preset="tiny")
    found = training_row.measure_training(one, how, comm)
    assert (found is None) == (comm.rank > 0)


@pytest.mark.ranks(2)
def test_a_step_that_computes_moves_the_words_of_its_dry_run(comm, monkeypatch):
    one = TrainingCase("tiny", 2, 1, Config(Model(**SIZES), MESHES[2][0]), "tiny")
    dry = training_row.trace_rank
    other = replace(one.config, division=Division(data=2, zero=3))
    monkeypatch.setattr(training_row, "trace_rank", lambda config, *more: dry(other, *more))
    with pytest.raises(Failed, match="moves other words than its dry run"):
        training_row.measure_training(one, replace(settings(), work=None, dilation=None), comm)


@pytest.mark.ranks(2)
def test_work_that_is_not_waited_for_writes_no_times(comm, wrong_work):
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
    file = load_rows()
    machine = emulating_machine(load_machine(file.machine), file.shrink, SCALE,
                                Cluster.parse(file.cluster))
    cases = list_cases()
    assert len({one.name for one in cases}) == len({one.title for one in cases}) == len(cases)
    assert {one.ranks for one in cases} == {8, 16, 64}
    for one in cases:
        found = predict_waited(one.config, one.ranks, machine)
        assert tuple(found) == PARTS and min(found.values()) >= 0 < found["actions"]
        assert cases_by_name(one.selector) == [one]
    with pytest.raises(UsageError, match="'combined:none-3' is unknown: choose one of combined:d"):
        cases_by_name("combined:none-3")


def test_the_choice_of_a_planner_is_judged_by_what_was_measured():
    records = [waited_step(1, 2.0, 2.5), waited_step(2, 3.0, 2.0), waited_step(3, 2.5, 2.4)]
    (rows,) = kind.row_groups(records)
    assert [one.marks for one in rows] == ["chosen", "fastest", ""]
    assert [round(one.error, 3) for one in rows] == [-0.2, 0.5, 0.042]
    assert rows[0].seconds == pytest.approx(2.5) and rows[0].work == 0.5
    first, second = kind.verdicts([rows])
    assert "20 % off in the median, 50 % at most" in first and "MISSED" in first
    assert "chooses data 8, ZeRO 1, serial, 25 % slower than the fastest" in second
    assert "data 8, ZeRO 3, serial; the goal is 5 %, MISSED" in second
    # The latest of a row counts.
    again = kind.row_groups([*records, waited_step(1, 2.0, 2.0)])[0]
    assert len(again) == 3 and again[0].marks == "fastest, chosen"


def test_rows_that_computed_stand_beside_those_that_waited(tmp_path):
    """Without a machine their prediction is none, and no planner is said to choose."""
    every = [waited_step(1, 2.0, 2.5), waited_step(2, 3.0, 2.0), computed_step(1), computed_step(
        2, predicted_by="longhorn", unpredicted="")]
    every[0].configuration["software_share"] = 0.01    # of 2 % that it takes
    for number, one in enumerate(every):
        run_file.write_run(one, tmp_path, f"combined-{number}")
    text = format_tables(tmp_path)
    assert "8 ranks: 8 layers" in text and "Predictions and choices:" in text
    assert "2 nodes; computed on numpy" in text and "2x4" not in text.partition("computed")[2]
    line = next(line for line in text.splitlines() if "cannot tell: no machine given" in line)
    assert "data 8, ZeRO 1, serial" in line and "chosen" not in line
    assert "1 row that computed: nothing was predicted" in text and "by machine longhorn" in text
    assert text.count("a planner chooses") == 1
    assert ("It is allowed 1 % of a step on 8 ranks, and takes more in 1 of 1 row; 10 % of a step "
            "on 8 ranks, and takes more in 0 of 1 row.") in " ".join(text.split())
    drawn, left_out = draw_figures(read_folder(tmp_path))
    assert [path.name for path in drawn] == ["training-steps-on-meshes.png"] and not left_out


@pytest.mark.parametrize("change, reason", [
    (None, "no machine given"),
    ({"ranks": 4, "passes": {"other": Curve([1.0], [1.0])}},
     "--machine FILE was measured with 4 ranks, not 8"),
    ({"gemm_rate": {"float16": 1e12}}, "machine longhorn has no rate for float32: it has float16"),
    ({}, "")])
def test_a_machine_that_is_no_model_predicts_nothing(tmp_path, change, reason):
    file = tmp_path / "mine.toml"
    if change is not None:
        machine = msgspec.structs.replace(load_machine("longhorn"), **change)
        file.write_text(format_machine(machine))
    machine, found = find_machine(str(file) if change is not None else None, 8)
    assert found == reason.replace("FILE", str(file)) and (machine is None) == bool(reason)
    with pytest.raises(UsageError, match="nowhere"):
        find_machine("nowhere.toml", 8)


@pytest.mark.parametrize("words, message", [
    (["combined:dense-8-1", "--machine", "longhorn"], "--machine longhorn: ranks wait for"),
    (["combined:dense-8-1,combined:dense-8-2:tiny"], "give all of them one preset, or none"),
    (["combined:dense-8-1:tiny", "--software-share", "0.1"], "only waits are slowed"),
    (["combined:dense-8-1:tiny", "--machine", "nowhere"], "nowhere"),
    (["combined:dense-8-1:tiny", "--backend", "jax"], "jax")])
@pytest.mark.ranks(8)
def test_options_of_meshes_that_contradict_each_other(comm, tmp_path, capsys, words, message):
    assert main(["measure", "meshes", *words, "--out", str(tmp_path / "a")]) == 2
    assert (message in capsys.readouterr().err) == (comm.rank == 0)


@pytest.mark.skipif(launcher.local_ranks() > 1, reason="reproduce starts mpirun itself")
@pytest.mark.parametrize("words, message", [
    (["--preset", "tiny"], "--table combined --preset: its file bench/cases/combined.toml"),
    (["--recompute", "full"], "--table combined --recompute: "),
    (["--ranks", "7"], "--table combined has no row of these --ranks: 8, 16, 64 would do")])
def test_options_of_other_rows_are_refused(tmp_path, capsys, words, message):
    assert main(["reproduce", "--table", "combined", *words, "--out", str(tmp_path / "a")]) == 2
    assert message in capsys.readouterr().err
