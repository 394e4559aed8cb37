"""Pipelines that are measured, also beside a made-up PyTorch: verification, files, refusals."""
import json
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from bench.errors import UsageError, WrongResult
from bench.experiments.pipeline import subject
from bench.experiments.pipeline.action_trace import make_action_trace
from bench.experiments.pipeline.measured import TorchPipeline, measure_pipeline
from bench.instruments.chrome_trace import find_problems
from bench.instruments.timing import Limits
from bench.records import run_file
from bench.records.kinds import pipeline as derived
from bench.reports.figures import every_figure, measured_timelines
from bench.validation.files import check_file
from made_up_torch import make_up
from mm3d import ModelSizes
from mm3d.training.schedules import Times, build, time_actions
from mm3d.training.worker import Worker
from records import format_record, written
from refused import refused

SIZES = ModelSizes(layers=4, hidden=8, heads=2, batch=2, seq=2)
LIMITS = Limits(2, 2)
WAITS = (Fraction(1, 1000),) * 3
SECONDS = 0.004    # of an action of the made-up library


def times_of(timeline, places: int = 2) -> np.ndarray:
    """A timeline as if measured twice by stages of some ranks, later and slightly apart."""
    schedule = timeline.schedule
    most = max(map(len, schedule.rows))
    found = np.full((2, schedule.ranks, places, most, 2), np.nan)
    for rank, row in enumerate(schedule.rows):
        for index in range(len(row)):
            for edge, every in enumerate((timeline.starts, timeline.ends)):
                found[:, rank, :, index, edge] = float(every[rank][index]) + 7
    found[:, :, 0] += 0.01
    return found.reshape(2, -1, most, 2)


@pytest.mark.parametrize("name", ["1f1b", "interleaved:2", "zb-h1", "zb-v"])
def test_a_run_like_the_clock_s_has_the_clock_s_bubble(name):
    schedule = build(name, 3, 6)
    count = schedule.stage_count
    timeline = time_actions(schedule, Times.equal(count, 1, "1.5", "0.5", hop="0.25"))
    times = times_of(timeline)
    assert np.allclose(derived.bubble_rates(times, schedule), float(timeline.bubble_rate))
    assert np.allclose(derived.repetition_seconds(times), float(timeline.makespan) + 0.01)
    steps = derived.durations(times, schedule)
    split = any(action.kind == "W" for row in schedule.rows for action in row)
    assert np.allclose(steps.T, (1, 1.5, 0.5) if split else (1, 2, 0))
    again = derived.clock_timeline(schedule, steps.round(6), 0.25)
    assert again.bubble_rate == timeline.bubble_rate
    measured = measured_timelines.measured_timeline(schedule, times, again)
    assert abs(measured.bubble_rate - timeline.bubble_rate) < 1e-9
    assert min(start for starts in measured.starts for start in starts) == 0


def make(comm, name="zb-h1", microbatches=3, **more):
    mesh = mm3d.Mesh(comm, comm.size, "serial")
    return mesh, subject.make_pipeline_case(name, comm.size, microbatches, SIZES, **more)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("waits", [None, WAITS], ids=["compute", "wait"])
def test_a_measured_pipeline_is_a_valid_file_and_a_table(comm, shared_tmp_path, waits):
    mesh, case = make(comm, waits=waits)
    record = measure_pipeline(mesh, case, LIMITS)
    mesh.free()
    if comm.rank:
        assert record is None
        return
    found = {name: variable.values for name, variable in record.variables.items()}
    assert found["words"].sum() == found["expected_words"] == 2 * 3 * 2 * 2 * 8
    assert found["times"].shape == (2, 2, 9, 2) and found["seconds"][0] > 0
    assert all(check.error == 0 == check.tolerance for check in record.checks)
    text = format_record(written(record, shared_tmp_path))
    assert ("WAITS stand in for layers" in text) == bool(waits)
    assert ("each to the bit" in text) == (not waits) and "emulated" not in text
    for title, timeline in measured_timelines.timelines(record).items():
        assert ("WAITS" in title) == bool(waits) and timeline.makespan > 0
    [drawing] = every_figure.make_measured_drawings([record])
    work = "wait" if waits else "compute"
    assert drawing.name == f"timeline-of-pipeline-{work}-zb-h1-m3-p002"
    assert [("measured in one" in axes.get_title(), "the clock's" in axes.get_title())
            for axes in drawing.make().axes] == [(True, False), (False, True)]
    trace = json.loads(json.dumps(make_action_trace(record), allow_nan=False))
    assert find_problems(trace) == []
    events = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    assert len(events) == 2 * 2 * 9    # measured, and the clock's
    assert {one["name"] for one in events} == {
        f"{kind}{stage}.{micro}" for kind in "FBW" for stage in (0, 1) for micro in range(3)}
    if waits:    # an action takes at least its time
        assert (found["durations"] >= 1e-3).all()
    record.raw["words"].values[0] += 1
    assert any("words" in line for line in check_file(
        run_file.write_run(record, shared_tmp_path, "changed"))[0])
    assert_tolerances_and_clusters_are_named(record)


def assert_tolerances_and_clusters_are_named(record):
    """As if the record were of stages with different grids, in an emulated cluster."""
    record.checks[:] = [replace(check, tolerance=5e-5) for check in record.checks]
    record.environment["emulated_cluster"] = "2x1:1Gbit"
    text = " ".join(format_record(record).split())
    if record.configuration["work"] == "compute":
        assert "one stage, each to a relative error of 5e-05, before" in text
    assert f"{record.environment['cores']} cores, emulated cluster, 2 nodes x 1 rank, 1" in text
    assert all("emulated cluster, 2 nodes x 1 rank, 1 Gbit/s" in title
               for title in measured_timelines.timelines(record))


@pytest.mark.ranks(slow=(4,))
def test_stages_with_different_grids_are_equal_up_to_rounding(comm):
    mesh = mm3d.Mesh(comm, 2, "3d", [(2, 1, 1), (1, 1, 2)])
    record = measure_pipeline(mesh, subject.make_pipeline_case("1f1b", 2, 2, SIZES), LIMITS)
    mesh.free()
    assert comm.rank or {check.tolerance for check in record.checks} == {5e-5}


def test_auto_is_searched_for_with_the_times_of_the_waits():
    waits = (Fraction(1), Fraction(1), Fraction(0))
    case = subject.make_pipeline_case("auto", 3, 5, SIZES, waits=waits)
    assert case.schedule == build("auto", 3, 5, times=Times.equal(3, *waits))
    assert case.schedule != subject.make_pipeline_case("auto", 3, 5, SIZES).schedule


@pytest.mark.ranks(2)
@pytest.mark.parametrize("waits", [None, WAITS], ids=["compute", "wait"])
def test_a_wrong_result_is_not_measured(comm, monkeypatch, waits):
    """A rank that takes the input of another micro-batch."""
    step = Worker.step
    monkeypatch.setattr(Worker, "step", lambda self, inputs, output, *more: step(
        self, inputs, lambda micro, y: output(micro // 2, y), *more))
    mesh, case = make(comm, waits=waits)
    with pytest.raises(WrongResult, match="results that arrived" if waits else "gradient of"):
        measure_pipeline(mesh, case, LIMITS)
    mesh.free()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("words, said", [
    ("--stages 3", "error: 3 stages do not divide 2 ranks into equal groups: 1, 2 would do"),
    ("--stages 2 --grid 2x1x1", "a grid of 2 x 1 x 1 has 2 ranks, but stage 0 has 1"),
    ("--stages 2 --schedule 1f1b,2f2b", "schedule '2f2b' is unknown: choose one of 1f1b"),
    ("--stages 2 --schedule interleaved:8", "8 layers cannot be divided among 16 stages"),
    ("--stages 2 --schedule dualpipe-v --microbatches 3", "at least 4 micro-batches are needed"),
    ("--stages 2 --times 1,1", "numbers F,B,W would do"),
    ("--stages 2 --unit 10", "a time such as 10ms, 500us or 1s would do"),
    ("--stages 2 --times 1,2,3", "--times is for --work wait, and --work compute computes layers"),
    ("--stages 2 --unit 10ms", "--unit is for --work wait, and --work compute computes layers"),
    ("--stages 2 --work wait --recompute full", "--recompute full is for --work compute"),
    ("--stages 2 --heads 3", "hidden=128 cannot be divided among heads=3"),
    ("--stages 2 --scheme 4d", "scheme '4d' is unknown"),
    ("--stages 2 --trace /dev/null/a/b.json", "--trace's folder /dev/null/a cannot be written")])
def test_what_cannot_be_is_refused_before_anything_is_measured(comm, words, said):
    assert said in refused(comm, "measure", "pipeline", *words.split(), "--out", "/dev/null/none")


# In the place of PyTorch: what it answers lies beside it.
SUBJECT = """
import json
from pathlib import Path

class Subject:
    def __init__(self, torch, case, arrays):
        assert case["ranks"] == 2 and len(case["layers"]) == sum(map(len, case["stages"]))
        assert ("inputs" in arrays) == (case["rank"] == 0)
        assert ("output gradients" in arrays) == (case["rank"] == 1)
        self.answer = json.loads(Path(HERE, "answer.json").read_text())[case["rank"]]

    def step(self):
        return self.answer

    def check(self):
        return {**self.answer, **np.load(Path(HERE, "answer.npz"))}
"""


def write_answers(folder, case, change=lambda rows, arrays: None):
    """Write a made-up interpreter that has the right answers, after `change`."""
    schedule, slept = case.schedule, dict(zip("FBW", case.chunk_seconds or ()))
    rows = [[(a.kind, schedule.stage_of(rank, a.chunk), a.micro) for a in row]
            for rank, row in enumerate(schedule.rows)]
    arrays = gradients(case) if case.waits is None else {"wrong": np.array([0, 6])}
    change(rows, arrays)
    (folder / "answer.json").write_text(json.dumps([
        {"processor": 0.001, "slept": slept, "actions": [
            (*action, SECONDS * n, SECONDS * (n + 1)) for n, action in enumerate(row)]}
        for row in rows]))
    np.savez(folder / "answer.npz", **arrays)
    make_up(folder, SUBJECT)


def gradients(case):
    """The gradients of all layers, by the model in one stage."""
    micros = case.schedule.microbatches
    sizes = ModelSizes(**{**case.sizes, "batch": case.sizes.batch // micros})
    model = mm3d.Transformer(mm3d.scheme("serial", MPI.COMM_SELF), **sizes)
    for micro in range(micros):
        _, saved = model.forward(model.random(f"input {micro}"))
        model.backward(model.random(f"output gradient {micro}"), saved)
    return model.gradients()


def measured(comm, folder, change=lambda rows, arrays: None, waits=None):
    """Measure 1F1B on two ranks beside the made-up library."""
    mesh, case = make(comm, "1f1b", waits=waits)
    if comm.rank == 0:
        write_answers(folder, case, change)
    comm.Barrier()
    try:
        return measure_pipeline(mesh, case, LIMITS, str(folder / "python"))
    finally:
        mesh.free()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("waits", [None, WAITS], ids=["compute", "wait"])
def test_both_are_measured_in_turns(comm, shared_tmp_path, waits):
    record = measured(comm, shared_tmp_path, waits=waits)
    if comm.rank:
        return
    found = {name: variable.values for name, variable in record.variables.items()}
    assert found["reference_times"].shape == found["times"].shape == (2, 2, 6, 2)
    assert np.allclose(found["reference_seconds"][:3], 6 * SECONDS)
    own = derived.repetition_seconds(found["times"])
    assert found["ratio"][0] == pytest.approx(np.median(6 * SECONDS / own))
    assert np.allclose(found["processor"][1], 0.001) and ("slept" in found) == bool(waits)
    assert record.configuration["reference_order"] == "the same actions in the same order"
    assert any(check.quantity.startswith("PyTorch's") for check in record.checks)
    text = format_record(written(record, shared_tmp_path))
    words = " ".join(text.split())
    assert "PyTorch made up, gloo, " in words
    assert "; the same actions in the same order" in words
    assert ("product_samples" in found) == ("At equal rates" in words) == (not waits)
    assert ("overhead of an action" in text) == bool(waits) == ("tokens a second" not in text)
    assert waits or "each to the bit" in text    # mm3d's own, not PyTorch's


@pytest.mark.ranks(2)
def test_another_gradient_gets_no_times(comm, shared_tmp_path):
    def change(rows, arrays):
        arrays["layers.1.mlp.up.weight"] *= 1.01
    with pytest.raises(WrongResult, match="PyTorch's gradient of layers.1.mlp.up.weight"):
        measured(comm, shared_tmp_path, change)


def test_other_actions_are_refused_and_another_order_is_stated():
    case = subject.make_pipeline_case("1f1b", 1, 2, SIZES)
    pipeline = object.__new__(TorchPipeline)
    pipeline.case, pipeline.mesh = case, SimpleNamespace(stage=0, comm=MPI.COMM_SELF)
    for found, said in (("F0 BW0 F1 BW1", "in the same order"),
                        ("F0 F1 BW0 BW1", "in another order on 1 of 1 ranks")):
        pipeline._compare_order([(word[:-1], 0, int(word[-1])) for word in found.split()])
        assert said in pipeline.order
    with pytest.raises(UsageError, match="takes other actions than this schedule"):
        pipeline._compare_order([("F", 0, 0), ("BW", 0, 0)])


def test_overhead_is_what_exceeds_the_clock():
    """The longest chain of the step has 8 actions, and each of them takes 0.25 too long."""
    schedule = build("1f1b", 2, 3)
    timeline = time_actions(schedule, Times.equal(2, "1.25", 1, "1.25"))
    times = np.full((1, 2, 6, 2), np.nan)
    for rank, row in enumerate(schedule.rows):
        for index in range(len(row)):
            times[0, rank, index] = [float(each[rank][index])
                                     for each in (timeline.starts, timeline.ends)]
    slept = np.ones((1, 2, 3))
    found = derived.overheads(times, slept, schedule)
    exact = time_actions(schedule, Times.equal(2, 1, 1, 1))
    assert found == pytest.approx(float(timeline.makespan - exact.makespan)
                                  / len(exact.critical_path()))
    assert found == pytest.approx(0.25)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("words, said", [
    ("--stages 2 --schedule zb-h2", "PyTorch has no such schedule: gpipe, 1f1b, interleaved"),
    ("--stages 2 --schedule interleaved:1", "two chunks a rank or more"),
    ("--stages 1 --grid 2x1x1", "a stage of PyTorch's is one process: a grid of 1 rank"),
    ("--stages 2 --recompute full", "--recompute full is not PyTorch's"),
    pytest.param("--stages 2 --torch /nowhere/python --layers 2",
                 "--torch /nowhere/python: No such file", marks=pytest.mark.slow),
    ("--stages 2 --torch false --layers 2", "could not execute the pipeline")])
def test_what_cannot_be_compared_is_refused(comm, shared_tmp_path, words, said):
    every = ["--torch", "false", *words.split(), "--hidden", "8", "--heads", "2"]
    assert said in refused(comm, "measure", "pipeline", *every, "--out", str(shared_tmp_path))
    assert not list(shared_tmp_path.glob("*.h5"))
