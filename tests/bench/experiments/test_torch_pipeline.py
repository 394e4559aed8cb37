"""A pipeline beside PyTorch's own: what is compared, and what is refused; by a made-up library."""
import json
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from bench.errors import UsageError, WrongResult
from bench.experiments.pipeline import subject
from bench.experiments.pipeline.measured import measure_pipeline
from bench.experiments.pipeline.reference import TorchPipeline
from bench.instruments.timing import Limits
from bench.records.kinds import pipeline as derived
from made_up_torch import make_up
from mm3d import ModelSizes
from mm3d.training.schedules import Times, build, time_actions
from records import format_record, written
from refused import refused

SIZES = ModelSizes(layers=2, hidden=8, heads=2, batch=2, seq=2)
SECONDS = 0.004    # of an action of the made-up library

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
    mesh = mm3d.Mesh(comm, 2, "serial")
    case = subject.make_pipeline_case("1f1b", 2, 3, SIZES, waits=waits)
    if comm.rank == 0:
        write_answers(folder, case, change)
    comm.Barrier()
    try:
        return measure_pipeline(mesh, case, Limits(2, 2), str(folder / "python"))
    finally:
        mesh.free()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("waits", [None, (Fraction(1, 1000),) * 3], ids=["compute", "wait"])
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
