"""Trainings: verified, stopped and continued to the bit, recorded; and the same on every mesh."""
import contextlib
import errno
import gc
import os
import re
import signal
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from bench.__main__ import main, parser
from bench.errors import StoreError, UsageError, WrongResult
from bench.experiments.training import comparison, history, plain_gpt, record, trainer
from bench.experiments.training.history import History
from bench.experiments.training.meshes import list_mesh_cases, ranks_of_mesh, reference_of
from bench.experiments.training.plan import Plan
from bench.experiments.training.record import expected_peak_bytes
from bench.experiments.training.text import read_training_text
from bench.experiments.training.trainer import Course, TrainingEnd, TrainingRun
from bench.records import run_file
from bench.records.kinds.training_meshes import allowed_differences
from bench.records.measurements import Check
from bench.reports.figures import training as figures
from bench.reports.micro_tables import make_parts
from bench.verbs import train
from mm3d import schemes
from mm3d.checkpoints.folder import checkpoints, step_of
from mm3d.config import Division
from mm3d.training.gpt import GPT
from records import format_record, only_record, written
from support import ROOT, run_ranks
from training_kills import OPTIONS, train_and_kill

PLAN = Plan(layers=1, hidden=8, heads=2, batch=4, seq=6, steps=7, lr=0.01, warmup=2, dropout=0.1)
COMPARED = replace(PLAN, layers=4, batch=24, steps=2, dtype="float64", optimizer="sgd", clip=0.0,
                   weight_decay=0.0)
COURSE = Course(validate_every=3, validation_batches=1, save_every=4)
TEXT = read_training_text()
DIVISIONS = {1: Division(), 2: Division(grid=(1, 2, 1)),
             4: Division(stages=2, scheme="1d", microbatches=2)}


def run(comm, course: Course, plan: Plan = PLAN, stop_after: int | None = None):
    """A training and its outcome; rank 0 gets a signal after so many steps."""
    def report(done, history):
        if done == stop_after and done - 1 in history.losses:
            os.kill(os.getpid(), signal.SIGINT)
    division = DIVISIONS[comm.size]
    plan = replace(plan, layers=max(plan.layers, division.stages))
    training = TrainingRun(comm, plan, division, TEXT)
    return training, trainer.run_training(training, course, report)


@pytest.mark.ranks(1, slow=(2, 4))
def test_a_stopped_training_goes_on_to_the_bit(comm, shared_tmp_path):
    """By Ctrl-C between two checkpoints, and by its time; the steps, moments and masks go on."""
    whole, expected = run(comm, COURSE)
    course = replace(COURSE, checkpoints=str(shared_tmp_path / "saved"))
    for number, (stop, limit, ended) in enumerate(((2, None, "signal"), (None, 0.0, "max_seconds"),
                                                   (None, None, "steps"))):
        before = signal.getsignal(signal.SIGINT)
        training, found = run(comm, replace(course, max_seconds=limit), stop_after=stop)
        assert (found.began, found.ended_by) == ((0, 3, 4)[number], ended)
        assert signal.getsignal(signal.SIGINT) is before
        if ended != "steps":
            training.free()
    assert found.steps == 7 and found.history.losses == expected.history.losses
    assert found.history.validation == expected.history.validation
    assert list(found.history.validation) == [0, 3, 6, 7] * (comm.rank == 0)
    for name, a in whole.model.state().items():
        assert np.array_equal(training.model.state()[name], a), name
    for one in (whole, training):
        one.free()
    with pytest.raises(UsageError, match="another training: lr 0.01, not 0.02"):
        run(comm, course, replace(PLAN, lr=0.02))
    with pytest.raises(UsageError, match="another training: validation_batches 1, not 2"):
        run(comm, replace(course, validation_batches=2))


@pytest.mark.ranks(2)
def test_what_goes_wrong_with_its_files_is_one_line_on_every_rank_and_nothing_is_lost(
        comm, shared_tmp_path, monkeypatch):
    """A full disk for the history and for a checkpoint, and a torn one; then it goes on."""
    course = replace(COURSE, checkpoints=str(shared_tmp_path / "saved"))

    def refused(said: str, course: Course = course) -> None:
        with pytest.raises(StoreError, match=said) as caught:
            run(comm, course)
        text = comm.allgather(str(caught.value))
        assert len(set(text)) == 1 and "\n" not in text[0]

    def full(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    refused("rank 1 does not see what rank 0 has written", replace(
        course, checkpoints=str(shared_tmp_path / f"of-{comm.rank}")))
    wrote = []
    with monkeypatch.context() as patch:
        patch.setattr(history, "append_entry", lambda file, entry: (
            full() if len(wrote) == 5 else wrote.append(entry)))
        refused("history.jsonl could not be written .No space left on device.; the checkpoints")
    with monkeypatch.context() as patch:
        if comm.rank:
            patch.setattr(os, "pwrite", full)
        refused("step 4.*No space left on device .rank 1")
    for one in run(comm, replace(course, max_seconds=0.0)):
        assert getattr(one, "steps", 1) == 1
    block = shared_tmp_path / "saved" / "step-00000001" / "blocks-00001.h5"
    kept = block.read_bytes()
    comm.Barrier()
    if comm.rank == 0:
        block.write_bytes(kept[:100])
    comm.Barrier()
    refused("step-00000001.*blocks-00001.h5.* too short")
    if comm.rank == 0:
        block.write_bytes(kept)
    comm.Barrier()
    training, outcome = run(comm, course)
    assert (outcome.began, outcome.ended_by) == (1, "steps")
    training.free()
    whole, expected = run(comm, COURSE)
    assert outcome.history.losses == expected.history.losses
    whole.free()


@pytest.mark.filterwarnings("ignore:whether:UserWarning")
@pytest.mark.parametrize("name, ended", [("stop", (1, "stop_file")), ("s" * 300, (7, "steps"))])
def test_it_stops_when_a_file_is_there(comm, tmp_path, name, ended):
    """One whose name is too long cannot be looked for: rank 0 alone does, and stops nothing."""
    (tmp_path / "stop").touch()
    training, found = run(comm, replace(COURSE, stop_file=str(tmp_path / name)))
    assert (found.steps, found.ended_by) == ended
    training.free()


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_float16_skips_steps_that_overflow_and_says_so(comm, monkeypatch):
    """Masters are float32; the scale of the loss begins too large for gradients of two tokens."""
    few = replace(PLAN, batch=1, seq=2, hidden=32)
    training, outcome = run(comm, COURSE, replace(few, dtype="float16", lr=0.05, steps=12))
    found = record.training_record(training, COURSE, outcome)
    assert training.model.trained[0].master.dtype == np.float32
    assert outcome.history.losses[11] < outcome.history.losses[0]
    skipped = found.configuration["skipped_steps"]
    assert 0 < skipped < 6 and training.optimizer.steps == 12 - skipped
    assert f"{skipped} steps changed nothing" in format_record(found)
    training.free()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(UsageError, match="'bfloat16' is unknown to backend 'numpy'"):
        run(comm, COURSE, replace(PLAN, dtype="bfloat16"))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_float16_that_ends_with_a_loss_of_nan_fails_with_all_of_it_saved(tmp_path, capsys):
    options = ("train --layers 1 --hidden 8 --heads 2 --batch 4 --seq 6 --steps 3 --dtype float16 "
               "--lr 5000 --clip 0 --checkpoints").split()
    assert main([*options, str(tmp_path / "saved"), "--out", str(tmp_path)]) == 1
    text = capsys.readouterr().err
    assert re.search(r"^failed: train-.*: the loss after 3 steps is not finite, .*: a lower --lr "
                     r"than 5000 would do, or a --clip above 0$", text, re.M)
    assert (tmp_path / "saved" / "step-00000003").is_dir()
    only_record(tmp_path)


@pytest.mark.ranks(1, slow=(2,))
def test_a_record_is_valid_and_shown(comm, shared_tmp_path):
    training, outcome = run(comm, COURSE)
    found = record.training_record(training, COURSE, outcome)
    state = training.model.state()
    training.free()
    assert (found is None) == (comm.rank > 0)
    if comm.rank:
        return
    assert figures.training_picture(shared_tmp_path / "train.png", found).stat().st_size > 10_000
    text = format_record(written(found, shared_tmp_path))
    assert "7 " in text and "Verified before the first step" in text
    assert f"{outcome.history.validation[7]:.4f}" in text
    line = history.progress_line(3, outcome.history, 7, 24)
    assert line.startswith("step 3 of 7, loss ") and "validation loss" in line
    sample = plain_gpt.write_sample(state, training.plan, 5)
    assert len(sample) == 5 and sample == plain_gpt.write_sample(state, training.plan, 5)


def test_speed_is_of_the_steps_of_this_run_alone(comm, tmp_path):
    """Steps before may have been of another mesh, or on another machine."""
    times = [9.0, 9.0, 9.0, 9.0, 9.0, 1.0, 1.0]
    past = History({n: 5.0 for n in range(7)}, dict(enumerate(times)), {7: 5.0})
    training = TrainingRun(comm, PLAN, Division(), TEXT)
    checks = [Check("loss", 0.0, 1e-5), Check("gradient", 0.0, 1e-3)]
    for began, speed, said in ((4, 24.0, "24 tokens a second from step 4, where this run began"),
                               (7, np.nan, "No step was trained in this run")):
        found = record.training_record(training, COURSE,
                                       TrainingEnd(past, began, 7, "steps", checks))
        assert np.array_equal(found.variables["tokens_per_second"].values, speed, equal_nan=True)
        assert said in " ".join(format_record(written(found, tmp_path, str(began))).split())
    training.free()


def test_progress_has_the_speed_of_this_run_alone():
    """Not that of the steps before, nor of no steps; the first of several is warming up."""
    def line(done: int, began: int, first: int = 0) -> str:
        seconds = {n: 9.0 if n < began else 1.0 + 3 * (n == began) for n in range(first, 8)}
        past = History({n: 2.0 for n in seconds}, seconds, {4: 3.0}, began=began)
        return history.progress_line(done, past, 8, 24)
    assert line(4, 4) == "step 4 of 8, loss 2.0000, validation loss 3.0000"
    assert line(4, 4, first=4) == "step 4 of 8, validation loss 3.0000"
    assert line(5, 4) == line(5, 4, first=4) == "step 5 of 8, loss 2.0000, 6 tokens/s"
    assert line(7, 4) == line(7, 4, first=4) == "step 7 of 8, loss 2.0000, 24 tokens/s"
    assert line(0, 0) == "step 0 of 8"


@pytest.mark.ranks(1, slow=(2,))
def test_a_signal_before_the_first_step_is_heard(comm, shared_tmp_path, monkeypatch):
    """While the model is verified, on one rank: none is interrupted, and no step is trained."""
    def interrupted(training):
        if comm.rank == comm.size - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return [Check("loss", 0.0, 1.0)]
    monkeypatch.setattr(TrainingRun, "verify", interrupted)
    training, outcome = run(comm, replace(COURSE, checkpoints=str(shared_tmp_path / "saved")))
    assert (outcome.steps, outcome.ended_by, outcome.history.losses) == (0, "signal", {})
    assert record.beside_checks(History(), History()) == []    # nothing was validated either
    found = record.training_record(training, COURSE, outcome)
    if comm.rank == 0:
        path = run_file.write_run(found, shared_tmp_path, "train")
        text = format_record(run_file.read_run(path))
        assert "STOPPED EARLY (signal): 0 of 7 steps" in " ".join(text.split())
    training.free()


def test_a_training_goes_on_without_its_history(comm, tmp_path):
    """Checkpoints may have been copied alone: what is not known is left out, at its own step."""
    course, said = replace(COURSE, checkpoints=str(tmp_path / "saved")), []
    for one in run(comm, course, stop_after=2):
        assert getattr(one, "steps", 3) == 3
    (tmp_path / "saved" / "history.jsonl").unlink()
    training = TrainingRun(comm, PLAN, DIVISIONS[1], TEXT)
    outcome = trainer.run_training(training, course, lambda done, past: said.append(
        history.progress_line(done, past, 7, 24)))
    assert (outcome.began, sorted(outcome.history.losses)) == (3, [3, 4, 5, 6])
    assert said[0].startswith("step 3 of 7, validation loss ") and "nan" not in "".join(said)
    found = record.training_record(training, course, outcome)
    rows = make_parts([written(found, tmp_path)])[0].rows
    losses = outcome.history.losses
    assert [row[0] for row in rows] == [3, 6, 7] and np.isnan(rows[0][1].value)
    assert rows[1][1].value == pytest.approx(np.mean([losses[n] for n in (3, 4, 5)]))
    training.free()


@pytest.mark.parametrize("name, said", [
    ("step", r"gradients of step 5 are not finite: .* would do, or a --clip above 0$"),
    ("trained", "parameters after step 3 are not finite, and are not saved: .* --clip above 0$"),
    ("clipped", "gradients of step 3 are not finite: a lower --lr than")])
def test_what_is_not_finite_is_not_saved(comm, tmp_path, monkeypatch, name, said):
    """A checkpoint of NaN would be the newest one; the training goes on from one before."""
    plan, right = PLAN if name == "clipped" else replace(PLAN, clip=0.0), GPT.step

    def broken(model, *batch):
        loss, step = right(model, *batch), (model.dropout_step or 0) - 1    # counted already
        if name != "step" and step == 3:
            model.trained[0].grad[...] = np.nan
        return np.nan if name == "step" and step == 5 else loss
    course = replace(COURSE, checkpoints=str(tmp_path / "saved"))
    with monkeypatch.context() as patch:
        patch.setattr(GPT, "step", broken)
        with pytest.raises(WrongResult, match=said):
            run(comm, course, plan)
    training, outcome = run(comm, course, plan)
    assert outcome.began == (4 if name == "step" else 0) and outcome.steps == 7
    assert all(np.isfinite(a).all() for a in training.model.state().values())
    training.free()


@pytest.mark.parametrize("broken, factor", [
    ("layers.0.mlp.up.bias", 0), ("embedding.weight", 0), ("norm.weight", 0),
    ("layers.0.attention.qkv.weight", 0), ("layers.0.mlp.up.bias", 2), ("embedding.weight", 2)])
def test_a_wrong_gradient_is_refused(comm, monkeypatch, broken, factor):
    """Each mistake that scales one gradient, or forgets one, is seen before a step is trained."""
    right = GPT.gradients

    def gradients(model):
        found = right(model)
        return found | {broken: factor * found[broken]}
    monkeypatch.setattr(GPT, "gradients", gradients)
    with pytest.raises(WrongResult, match="gradient.* is off by"):
        run(comm, COURSE, replace(PLAN, dtype="float64"))


def test_a_wrong_loss_is_refused(comm, monkeypatch):
    monkeypatch.setattr(plain_gpt, "gelu", lambda x: x / 2 * (1 + np.tanh(x)))
    with pytest.raises(WrongResult, match="loss is off by"):
        run(comm, COURSE, replace(PLAN, dtype="float64"))


def test_float64_agrees_with_the_plain_model_closely(comm):
    training = TrainingRun(comm, replace(PLAN, dtype="float64", tied=False), Division(), TEXT)
    loss, *gradient = training.verify()
    assert loss.error < 1e-14 and all(check.error < 1e-6 for check in gradient)
    training.free()


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.limit(300)
def test_every_mesh_has_the_same_in_float32(comm, shared_tmp_path):
    """One of each family: equal bits are float64's, too."""
    cases = list_mesh_cases(4)
    of_family = reference_of(cases)
    cases = [case for case in cases if of_family(case) is case]
    assert len(cases) > 12
    check_meshes(comm, shared_tmp_path, "float32", cases)


@pytest.mark.ranks(2, slow=(8,))
@pytest.mark.limit(400)
def test_every_mesh_has_the_same_losses_gradients_and_weights(comm, shared_tmp_path):
    """To the bit where only schedules, stages, ZeRO or recomputation differ.

    Two ranks have compared all meshes that they have.
    """
    cases = list_mesh_cases(comm.size)
    if comm.size > 2:
        cases = [case for case in cases if ranks_of_mesh(case) > 2 or case.given().keys() <= {
            "scheme", "microbatches"}]
    found = check_meshes(comm, shared_tmp_path, "float64", cases)
    assert comm.rank or sum("bits of" in check.quantity for check in found.checks) > 8


def check_meshes(comm, shared_tmp_path, dtype, cases):
    """A comparison of some meshes."""
    found = comparison.compare_meshes(comm, replace(COMPARED, dtype=dtype), TEXT, cases=cases)
    if comm.rank:
        assert found is None
        return None
    assert all(check.passed for check in found.checks), [
        check for check in found.checks if not check.passed]
    assert found.scales["mesh"] == [*map(str, cases)]
    text = format_record(written(found, shared_tmp_path))
    bits = sum("bits of" in check.quantity for check in found.checks)
    assert "DIFFERENT" not in text and text.count("equal") >= bits
    assert "ZeRO 2 and 3 sum in another order" in " ".join(text.split())
    assert figures.meshes_picture(shared_tmp_path / "meshes.png", found).stat().st_size > 10_000
    return found


def test_meshes_that_cannot_be_are_refused_before_the_first_is_trained(comm):
    begun = []
    with pytest.raises(UsageError, match="serial, 4 micro-batches: "):
        comparison.compare_meshes(comm, replace(COMPARED, batch=3), TEXT, begun.append)
    assert begun == []


def test_a_comparison_is_watched_for_stalls(comm, tmp_path):
    """Each mesh has collectives of its own, which the watchdog must see."""
    seen = []

    @contextlib.contextmanager
    def watched(grid):
        seen.append(str(grid.shape))
        yield
    small = "--layers 1 --hidden 8 --heads 2 --batch 12 --seq 6 --steps 1".split()
    arguments = parser(["train"]).parse_args([
        "train", "--compare", *small, "--out", str(tmp_path)])
    arguments.watched = watched
    assert train.run(arguments, comm) == 0 and len(seen) == len(list_mesh_cases(1)) == 3


@pytest.mark.parametrize("options", [
    ["--data", "2"], ["--scheme", "1d"], ["--grid", "1x2x1"], ["--backend", "numpy"],
    ["--recompute", "full"], ["--stop-after", "5"], ["--sample", "3"], ["--checkpoints", "none"],
    ["--validate-every", "50"], ["--validation-batches", "4"], ["--save-every", "9"],
    ["--keep-checkpoints", "2"], ["--stop-file", "stop"]])
def test_what_a_comparison_would_ignore_is_refused(options):
    train.make_plan(parser(["train"]).parse_args(["train", *options]))
    with pytest.raises(UsageError, match=f"--compare with {options[0]}: .*leave one of them out"):
        train.make_plan(parser(["train"]).parse_args(["train", "--compare", *options]))


@pytest.mark.parametrize("words, said", [
    ("--zero 3", "--zero 3 would do nothing here: --data 2 or more"),
    ("--momentum 0.9", "--momentum 0.9 would do nothing here: --optimizer sgd"),
    ("--lr-warmup 5 --optimizer sgd", "--lr-warmup 5 would do nothing here: --optimizer adamw")])
def test_what_would_have_no_effect_is_refused(words, said):
    train.make_plan(parser(["train"]).parse_args([
        "train", *"--zero 3 --data 2 --momentum 0 --lr-warmup 5".split()]))
    with pytest.raises(UsageError, match=said):
        train.make_plan(parser(["train"]).parse_args(["train", *words.split()]))


def test_families_are_what_must_be_equal_to_the_bit():
    cases = list_mesh_cases(8)
    reference = reference_of(cases)
    assert len({str(case) for case in cases}) == len(cases) > 40
    assert {case.scheme for case in cases} == set(schemes.registry())
    for case in cases:
        first = reference(case)
        assert (case.data, case.shards, case.microbatches, case.scheme, case.grid) == (
            first.data, first.shards, first.microbatches, first.scheme, first.grid)
    assert {case.zero for case in cases if reference(case) is not case} == {0, 1, 2, 3}
    for wrong in (PLAN, replace(COMPARED, dtype="float16")):
        with pytest.raises(UsageError, match="sgd in float64 or float32 would do"):
            comparison.compare_meshes(None, wrong, TEXT)


def made_up_comparison(dtype: str, factor: float, rounding: float = 1e-6):
    """The record of one rank and of a mesh whose gradients are larger by a factor.

    In float32 one rank is by `rounding` from float64.
    """
    plan, cases = replace(COMPARED, dtype=dtype), list_mesh_cases(2)[:2]
    *trained, exact = [
        comparison.MeshTraining(np.ones(plan.steps), {"a": g * np.ones(3)}, {"a": np.ones(3)})
        for g in (1.0, factor, 1 + rounding)]
    return comparison.comparison_record(plan, TEXT, cases, dict(zip(cases, trained)), {},
                                        exact if dtype == "float32" else None)


def test_an_array_of_no_numbers_is_no_small_difference():
    """Also behind one that is right, where Python's `max` keeps the first."""
    right, wrong = {"a": np.ones(2), "b": np.ones(2)}, {"a": np.ones(2), "b": np.full(2, np.nan)}
    assert comparison.largest_difference(right, right) == 0
    assert np.isnan(comparison.largest_difference(wrong, right))


def test_what_rounding_may_change_is_stated_and_what_it_may_not_fails():
    """In float64 the bounds are fixed; in float32 they are 4 times what rounding does to one rank.
    """
    for dtype, right, wrong in (("float64", 1e-12, 1e-10), ("float32", 3.9e-6, 4.1e-6)):
        for off, passes in ((right, True), (wrong, False)):
            checks = made_up_comparison(dtype, 1 + off).checks
            assert [check.passed for check in checks] == [
                True, passes, True, *[True] * 3 * (dtype == "float32")]
    plan, unit = replace(COMPARED, dtype="float32"), 2.0 ** -24
    bounds = comparison.rounding_bounds(plan, {"loss": 0.0, "gradients": 1e-6, "weights": 0.0})
    # Of 4 layers: 8 + 4 + 6 + 8 + 8 + 32 + 32 terms each, then 2 x 8 + 8 + 256; 24 x 6 tokens.
    usual = unit * (672 / 144) ** 0.5
    assert bounds == pytest.approx({"loss": 4 * usual, "gradients": 4e-6, "weights": 4 * unit})
    record = made_up_comparison("float32", 1.0)
    assert allowed_differences(record) == pytest.approx(bounds, rel=1e-5)
    assert [check.quantity for check in made_up_comparison("float32", 1.0, 0.01).checks
            if not check.passed] == ["rounding: gradients"]    # it would hide a wrong sum
    assert "difference of one rank to float64" in " ".join(
        format_record(record).split())


@pytest.mark.ranks(1, slow=(4,))
def test_memory_is_that_of_a_dry_run(comm, monkeypatch):
    """With AdamW and clipping, in every stage of ZeRO, and on stages of a pipeline."""
    monkeypatch.setenv("MM3D_TRANSPORT", "mpi")    # shared memory is not Python's to count
    sizes = dict(layers=3, hidden=48, heads=4, batch=2 * comm.size, seq=16, steps=2)
    meshes = [Division(scheme="serial", data=comm.size, zero=zero, microbatches=2)
              for zero in range(4 if comm.size > 1 else 1)]
    if comm.size > 1:
        meshes += [Division(scheme="1d", grid=(comm.size,)), Division(
            scheme="serial", stages=2, data=comm.size // 2, microbatches=2)]
    for division in meshes:
        plan = replace(PLAN, dropout=0.0, **sizes)
        gc.collect()    # the memory of one training is none of the next
        training = TrainingRun(comm, plan, division, TEXT)
        trainer.run_training(training, COURSE)
        assert training.peak_bytes == expected_peak_bytes(
            plan, division, comm.size, comm.rank), division
        training.free()
        del training


# Rank 1 fails in its sixth step, after the checkpoint of step 3.
FAILS = """
import os, sys, time
from bench.__main__ import command
from bench.experiments.training.trainer import TrainingRun
right = TrainingRun.batch

def batch(training, number):
    if number == 5 and training.comm.rank == 1:
        print("fails at", time.time(), file=sys.stderr, flush=True)
        {how}
    return right(training, number)
TrainingRun.batch = batch
command()
"""


@pytest.mark.slow
@pytest.mark.limit(900)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_resumption_after_a_kill_is_on_the_curve(tmp_path, ranks):
    assert train_and_kill(tmp_path, 4, ranks=ranks) > 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise RuntimeError('no more')", "sys.exit(3)", "os._exit(4)",
                                 "os.kill(os.getpid(), 9)"])
def test_a_rank_that_fails_ends_the_job_within_10_seconds(tmp_path, how):
    """The checkpoint before it stays, and the same command goes on from there."""
    program, saved = tmp_path / "program.py", tmp_path / "saved"
    program.write_text(FAILS.format(how=how))
    options = (*OPTIONS, "--checkpoints", str(saved), "--out", str(tmp_path / "out"))
    done = run_ranks(2, str(program), "train", *options, cwd=ROOT)
    end, begin = time.time(), re.search(r"fails at (\S+)", done.stderr)
    assert done.returncode and begin and end - float(begin[1]) < 10, done.stderr
    assert "killed: did not end" not in done.stderr
    assert [step_of(path) for path in checkpoints(saved)] == [3]
    if "kill" in how:    # all of them have left the same checkpoint
        done = run_ranks(2, "-m", "bench", "train", *options, "--steps", "60", cwd=ROOT)
        assert done.returncode == 0 and "step 60 of 60" in done.stdout, done.stderr
