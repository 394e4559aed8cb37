"""The benchmark of one layer, at a tiny size, and beside a made-up reference."""
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from bench.errors import UsageError, WrongResult
from bench.experiments.layer.layer import (COLOSSAL, KINDS, MeasuredLayer, count_sides,
                                           measure_layer)
from bench.instruments.timing import Limits
from bench.records.kinds.layer import tables
from mm3d.tracing import dry_run
from made_up_torch import make_up
from records import read_valid
from refused import refused, run_verb

QUICK = ("--hidden", "32", "--head-size", "8", "--batch", "4", "--seq", "8", "--repetitions", "2",
         "--max-repetitions", "2", "--grid", "1x2x2", "--dtype", "float64")

# In the place of PyTorch: the serial scheme, and FACTOR times its output.
SUBJECT = """
class Subject:
    def __init__(self, torch, case, arrays):
        self.case, self.arrays = case, arrays

    def step(self):
        return {"begin": 7.0, "end": 7.25}

    def check(self):
        import mm3d
        from mpi4py import MPI
        x = self.arrays["input"]
        model = mm3d.Transformer(
            mm3d.scheme("serial", MPI.COMM_SELF), layers=1, hidden=x.shape[2],
            heads=self.case["heads"], batch=x.shape[0], seq=x.shape[1], dtype=str(x.dtype))
        model.load({name: a for name, a in self.arrays.items() if name.startswith("layers.")})
        y, saved = model.forward(x)
        dx = model.backward(self.arrays["output gradient"], saved)
        return {"output": FACTOR * y, "input gradient": dx} | {
            "gradient of " + name: a for name, a in model.gradients().items()}
"""


def made_up(comm, folder, subject) -> str:
    """The path of an interpreter that rank 0 writes."""
    if comm.rank == 0:
        make_up(folder, subject)
    comm.Barrier()
    return str(folder / "python")


def reference(comm, folder, factor):
    return made_up(comm, folder, f"FACTOR = {factor}\n{SUBJECT}")


def measured(comm, folder, *options):
    """The status, what is printed, and the record, if there is one."""
    status, said = run_verb(comm, "measure", "layer", *options, "--out", str(folder / "out"))
    files = list((folder / "out").glob("*.h5"))
    return status, " ".join(said.split()), read_valid(files[0]) if files else None


@pytest.mark.ranks(4)
def test_a_layer_is_measured_beside_a_reference(comm, shared_tmp_path, monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "3")
    monkeypatch.setenv("LD_PRELOAD", "/nowhere/here/fake.so")
    status, text, run = measured(comm, shared_tmp_path, *QUICK, "--torch",
                                 reference(comm, shared_tmp_path, 1), "--overlap")
    assert status == 0, text
    found = {name: variable.values for name, variable in run.variables.items()}
    assert run.kind == "layer" and len(run.checks) == 2 * 14
    assert all(check.passed for check in run.checks)
    assert found["times"].shape == (2, len(KINDS), 4, 2)
    assert (found["times"][:, 2, 0, 1] == 0.25).all() and np.isnan(found["times"][:, 2, 1:]).all()
    own, products, other, overlapped = found["seconds"][:, 0]
    assert min(own, products, overlapped) > 0 and other == 0.25 and found["hidden"] < 1
    makespans = found["times"][:, 0, :, 1].max(axis=1)
    assert found["ratio"][2, 0] == pytest.approx(np.median(0.25 / makespans))
    assert found["flops"] == 3 * (24 * 32 * 32 ** 2 + 4 * 32 * 8 * 32)
    assert (found["memory"][0] > 0).all()
    assert found["product_samples"].shape[0] == 2 and found["product_flops"] < found["flops"]
    assert found["torch_flops"] == found["flops"] and (found["product_samples"] > 0).all()
    assert "other / layer" in text and "one thread multiplies at" in text
    # What a user sets for PyTorch, without folders, which may name a person.
    settings = "LD_PRELOAD=fake.so MALLOC_ARENA_MAX=3"
    assert run.configuration["reference"].startswith("PyTorch made up, ")
    assert run.configuration["reference"].endswith(settings) and settings in text
    assert settings in run.environment["tuning_variables"]
    table = tables([run])[0]
    assert table.rows[0][0] == 32 and table.title.endswith(", beside another library")


@pytest.mark.ranks(4)
def test_alone_it_is_verified_with_the_serial_scheme(comm, shared_tmp_path):
    status, text, run = measured(comm, shared_tmp_path, *QUICK)
    assert status == 0, text
    assert len(run.checks) == 2 * 14 and run.configuration["reference"] == "none"
    assert np.isnan(run.variables["ratio"].values[2:, 0]).all()
    counted, parameters = run.variables["memory"].values[0], 8 * 2 * (12 * 32 ** 2 + 13 * 32) / 4
    assert (counted > parameters).all() and run.configuration["transport"] == "mpi"


@pytest.mark.ranks(4)
def test_what_differs_from_the_reference_gets_no_times(comm, shared_tmp_path):
    status, text, run = measured(comm, shared_tmp_path, *QUICK, "--torch",
                                 reference(comm, shared_tmp_path, 1.001))
    assert status == 1 and run is None
    assert "differs from PyTorch: output is off by 0.001" in text


def test_a_layer_that_cannot_overlap_is_refused():
    subject = MeasuredLayer(mm3d.scheme("1d", MPI.COMM_SELF), mm3d.ModelSizes(1, 8, 2, 1, 2))
    with pytest.raises(UsageError, match="--scheme 1d: only products of 3d can overlap"):
        measure_layer(subject, None, 2, Limits(2, 2))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("options, message", [
    (("--torch", "/nowhere/python"), "--torch /nowhere/python: No such file"),
    (("--torch", "false"), "could not do the layer"),
    (("--overlap", "--scheme", "1d"), "--overlap --scheme 1d: only products of 3d can overlap"),
    (("--hidden", "32,33"), "--hidden 33 --head-size 8: a head of at least 1 feature"),
    (("--hidden", "4"), "--hidden 4 --head-size 8: a head of at least 1 feature"),
    (("--scheme", "4d"), "scheme '4d' is unknown")])
def test_wrong_arguments_get_one_message(comm, shared_tmp_path, options, message):
    said = refused(comm, "measure", "layer", *QUICK, *options, "--out", str(shared_tmp_path))
    assert said.count(message) == 1 and not list(shared_tmp_path.glob("*.h5")), said


# In the place of ColossalAI: the serial scheme on rank 0, and made-up counts.
COUNTED = f"""{SUBJECT}
    about, whole = {{"colossal": "0.0"}}, check

    def check(self):
        return {{}} if self.case["rank"] else self.whole()

    def count(self):
        return {{"calls": 36, "words": WORDS + self.case["rank"], "saved": 3000000}}
"""


@pytest.mark.ranks(8)
def test_calls_and_words_stand_beside_those_of_colossalai(comm, shared_tmp_path):
    """A block, 32 features, 8 sequences of 16: what was counted of ColossalAI 0.5.0, too."""
    python = made_up(comm, shared_tmp_path, f"FACTOR, WORDS = 1, 20024 - 3.5\n{COUNTED}")
    status, text, run = measured(
        comm, shared_tmp_path, "--hidden", "32", "--head-size", "8", "--batch", "8", "--seq", "16",
        "--repetitions", "2", "--max-repetitions", "2", "--dtype", "float64", "--keep", "both",
        "--colossal", python)
    assert status == 0, text
    assert run.configuration["reference"].startswith("ColossalAI 0.0, PyTorch made up, gloo")
    assert run.configuration["keep"] == "both" and run.scales["kind"][2] == "ColossalAI"
    words, calls, saved = (run.raw[name].values for name in ("words", "calls", "saved"))
    assert words[0].mean() == 20024 and (words[1] == 20020.5 + np.arange(8)).all()
    assert (calls == 36).all() and (saved[1] == 3e6).all()
    trace = dry_run.trace_step("3d", 8, (2, 2, 2), options={"keep": "both"}, layers=1, hidden=32,
                               heads=4, batch=8, seq=16, dtype="float64")
    assert saved[0, 0] == trace.saved > 0
    assert run.variables["expected_memory"].values == trace.pool_peak
    said = " ".join(text.split())
    ratio = f"{run.values('ratio')[2, 0]:.2f}"    # as the table has it, too
    assert f"instead of {ratio} (ColossalAI), with ColossalAI's" in said
    assert "ColossalAI / mm3d would be" in said and "with PyTorch's" not in said
    (row,) = tables([run])[0].rows
    assert {"ColossalAI", "both", "36.0", "20024", "3"} <= set(map(str, row))


@pytest.mark.ranks(2)
def test_other_words_than_those_of_colossalai_are_refused(comm):
    """On all ranks, where both keep what they gather; and other words than the closed form."""
    scheme = mm3d.scheme("3d", comm, grid=(2, 1, 1), keep="both")
    subject = MeasuredLayer(scheme, mm3d.ModelSizes(1, 8, 2, 2, 4))
    words = sum(mm3d.cost.step_words(subject.model).values())
    theirs = {"calls": 36, "words": words + 1 + comm.rank, "saved": 0}
    reference = SimpleNamespace(take_turn=lambda what: theirs)
    with pytest.raises(WrongResult, match=f"a rank of ColossalAI moves {words + 1.5} words in the "
                                          f"mean: they should be the {words} of the closed form"):
        count_sides(subject, COLOSSAL, reference)
    subject.count = lambda: [0, words - 2, 0]
    with pytest.raises(WrongResult, match=f"a rank of mm3d moves {words - 2} words"):
        count_sides(subject, "", None)
    scheme.grid.free()


@pytest.mark.ranks(8)
@pytest.mark.parametrize("options, message", [
    (("--scheme", "1d"), "--scheme 1d --grid 8: ColossalAI has the 3-D layers on a cube"),
    (("--grid", "4x2x1"), "--grid 4x2x1: ColossalAI has the 3-D layers on a cube"),
    (("--batch", "6"), "batch 6 on 2x2x2 ranks: ColossalAI needs a multiple of 4"),
    (("--torch", "python"), "a layer is measured beside one of them")])
def test_what_colossalai_cannot_do_is_refused(comm, shared_tmp_path, options, message):
    said = refused(comm, "measure", "layer", "--hidden=32", "--head-size=8", "--batch=4",
                   "--seq=8", "--colossal=/nowhere/python", *options, "--out",
                   str(shared_tmp_path))
    assert said.count(message) == 1 and not list(shared_tmp_path.glob("*.h5")), said
