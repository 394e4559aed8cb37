"""Training steps of GPT on meshes, whose ranks wait for the modelled seconds of their work."""
import numpy as np
import pytest

import mm3d
from bench.cases.combined import TrainingCase, cases_by_name, list_cases, load
from bench.errors import Failed, UsageError
from bench.experiments.rows import training_row
from bench.experiments.rows.dilation import Dilation
from bench.experiments.rows.settings import ModelledWork
from bench.instruments.timing import Limits
from bench.prediction.machine_model import load_machine
from bench.prediction.seconds import work_seconds
from mm3d.config import Config, Division, Model

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
