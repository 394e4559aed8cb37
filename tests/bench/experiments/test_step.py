"""A training step beside PyTorch's own: what is compared and refused, by a made-up library."""
import stat
import sys

import numpy as np
import pytest

from bench.errors import UsageError, WrongResult
from bench.experiments.training import beside
from bench.experiments.training.plan import Placement
from bench.experiments.training.timed_step import PARTS, MeasuredTraining, StepCase
from bench.instruments.timing import Limits
from bench.records import run_file
from bench.reports import training_tables
from bench.reports.formats import render
from bench.validation.files import check_file
from refused import refused

CASE = StepCase(layers=1, hidden=8, heads=2, vocab=12, batch=4, seq=6)

# In the place of an interpreter with PyTorch: the serial model, and FACTOR times its loss.
REFERENCE = """#!{python}
import json, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
import numpy as np
import mm3d
from mpi4py import MPI
_, _, folder, kind, rank, ranks, threads = sys.argv
case = json.loads(Path(folder, "case.json").read_text())
arrays = dict(np.load(Path(folder, "case.npz")))
batch = arrays.pop("tokens"), arrays.pop("targets")
sizes = [case[name] for name in ("layers", "hidden", "heads", "vocab", "batch", "seq")]
model = mm3d.GPT(mm3d.Mesh(MPI.COMM_SELF, scheme="serial"), *sizes, seed=7)
model.load(arrays)
optimizer = mm3d.AdamW(model, case["lr"], case["betas"], case["eps"], case["weight_decay"])
print("made up", kind, threads, flush=True)
for n, line in enumerate(sys.stdin):
    begin = time.perf_counter()
    loss = model.step(*batch)
    norm = sum(float((g * g).sum()) for g in model.gradients().values()) ** 0.5
    optimizer.step()
    wrong = {{"loss": n == {at}, "norm": n == 0}}
    print(json.dumps({{"begin": begin, "end": begin + 0.25,
                      "loss": loss * (1 + {loss} * wrong["loss"]),
                      **({{"norm": norm * (1 + {norm})}} if line == "check\\n" else {{}})}}),
          flush=True)
"""


def made_up(folder, at=0, loss=0.0, norm=0.0) -> str:
    """Write a made-up interpreter, whose loss of one step and norm are off by these factors."""
    from support import ROOT
    path = folder / f"python-{at}-{loss}-{norm}"
    path.write_text(REFERENCE.format(python=sys.executable, root=str(ROOT), at=at, loss=loss,
                                     norm=norm))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def measured(comm, python, kinds):
    subject = MeasuredTraining(comm, CASE, Placement(data=comm.size))
    try:
        return beside.measure_beside(subject, python, kinds, Limits(2, 2))
    finally:
        subject.free()


@pytest.mark.ranks(1, slow=(2,))
def test_all_sides_are_measured_in_turns(comm, shared_tmp_path):
    python = made_up(shared_tmp_path) if comm.rank == 0 else None
    record = measured(comm, comm.bcast(python), ("tp", "one"))
    if comm.rank:
        return
    found = {name: variable.values for name, variable in record.variables.items()}
    assert record.scales["side"] == ("mm3d", "tp", "one")
    assert found["times"].shape == (2, 3, comm.size, 2)
    assert found["part_seconds"].shape[::2] == (comm.size, len(PARTS))
    assert np.isnan(found["times"][:, 2, 1:]).all() and (found["part_seconds"] > -1e-3).all()
    assert np.allclose(found["seconds"][2, :3], 0.25)
    assert np.allclose(found["tokens_per_second"][2, :3], 4 * 6 / 0.25)
    own = beside.makespans(found["times"])[:, 0]
    assert found["ratio"][2, 0] == pytest.approx(np.median(0.25 / own))
    # Beside the model in NumPy: three first steps, the last one, and the first gradient.
    beside_own = [check for check in record.checks if check.quantity.endswith((", tp", ", one"))]
    assert len(record.checks) > len(beside_own) == 2 * (3 + 1 + 1)
    assert all(check.passed for check in record.checks)
    path = run_file.write_run(record, shared_tmp_path, "step")
    assert not check_file(path)[0]
    text = " ".join(render(training_tables.step_parts(run_file.read_run(path))).split())
    assert "Beside: made up tp" in text and "waiting" in text


@pytest.mark.parametrize("wrong, named", [
    (dict(at=1, loss=1e-3), "loss of step 2, one"), (dict(norm=1e-3), "norm of the first"),
    pytest.param(dict(at=5, loss=0.1), "last loss, one", marks=pytest.mark.slow)])
@pytest.mark.ranks(1)
def test_another_loss_or_gradient_gets_no_times(comm, shared_tmp_path, wrong, named):
    with pytest.raises(WrongResult, match=named):
        measured(comm, made_up(shared_tmp_path, **wrong), ("one",))


@pytest.mark.ranks(2)
def test_what_cannot_be_divided_is_refused(comm, shared_tmp_path):
    for kind, sizes, named in (("ddp", {"batch": 3}, "--batch 3"),
                               ("tp", {"heads": 1}, "--heads 1"),
                               ("tp", {"vocab": 13}, "--vocab 13"), ("dp", {}, "ddp, fsdp2")):
        with pytest.raises(UsageError, match=named):
            beside.refuse_case(StepCase(**{**vars(CASE), **sizes}), (kind,), comm.size)
    assert "without --torch" in refused(comm, "step", "--torch-parallel", "ddp")
    assert "/nowhere" in refused(comm, "step", "--torch", "/nowhere", "--torch-parallel", "tp",
                                 "--hidden", "8", "--heads", "2", "--vocab", "8", "--layers", "1",
                                 "--batch", "2", "--seq", "2", "--scheme", "1d", "--out",
                                 str(shared_tmp_path / "out"))
