"""A training step beside PyTorch's own: what is compared and refused, by a made-up library."""
import numpy as np
import pytest

from bench.errors import UsageError, WrongResult
from bench.experiments.training import beside
from bench.experiments.training.timed_step import STEP_PARTS, TimedTraining
from bench.instruments.timing import Limits
from bench.statistics import elapsed
from made_up_torch import make_up
from mm3d.config import Config, Division, Model
from mm3d.training.gpt import GPT
from records import format_record, written
from refused import refused

CASE = Model(layers=1, hidden=8, heads=2, vocab=12, batch=4, seq=6)

# In the place of PyTorch: the serial model, and factors of the loss of one step and of the norm.
SUBJECT = """
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


def made_up(folder, at=0, loss=0.0, norm=0.0) -> str:
    """Write a made-up interpreter, whose loss of one step and norm are off by these factors."""
    return make_up(folder, f"AT, LOSS, NORM = {at}, {loss}, {norm}\n{SUBJECT}",
                   f"python-{at}-{loss}-{norm}")


def measured(comm, python, kinds):
    subject = TimedTraining(GPT(Config(CASE, Division(data=comm.size)), comm))
    try:
        return beside.measure_beside(subject, python, kinds, Limits(2, 2))
    finally:
        subject.model.free()


@pytest.mark.ranks(1, slow=(2,))
def test_all_sides_are_measured_in_turns(comm, shared_tmp_path):
    python = made_up(shared_tmp_path) if comm.rank == 0 else None
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
        measured(comm, made_up(shared_tmp_path, **wrong), ("one",))


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
