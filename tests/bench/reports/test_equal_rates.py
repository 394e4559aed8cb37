"""What remains of a comparison where both sides multiply equally fast."""
from dataclasses import replace

import numpy as np
import pytest

from bench.records import run_file
from bench.records.kinds import training
from bench.records.measurements import Measurements, Variable
from bench.records.notes import equal_rate_notes
from support import ROOT


def record(own, other, torch_flops=8e9, cores=2):
    numbers = {"product_flops": 1e9, "torch_flops": torch_flops, "torch_cores": cores}
    variables = {name: Variable(np.array(value), "1", ()) for name, value in numbers.items()}
    samples = 1e9 / np.array([[own] * 3, [other] * 3])
    variables["product_samples"] = Variable(samples, "s", ("product_side", "product_round"))
    return Measurements("layer", {}, {}, {"product_side": ["mm3d", "PyTorch"],
                                          "product_round": range(3)}, variables, [])


@pytest.mark.parametrize("own, other, busy, remaining", [
    (4e9, 4e9, 1.0, "1.50 instead of 1.50"),
    # 8e9 operations on 2 cores: 2 of 3 seconds at 2e9 a core, 1 second at 4e9.
    (4e9, 2e9, 1.0, "1.00 instead of 1.50"),
    (1e9, 2e9, 1.0, "2.50 instead of 1.50"),
    # Where they wait for half of the time, all 3 seconds go by while they multiply.
    (4e9, 2e9, 0.5, "0.75 instead of 1.50")])
def test_the_products_take_another_time(own, other, busy, remaining):
    note, = equal_rate_notes(record(own, other), {"PyTorch": (3.0, 1.5),
                                                  "absent": (np.nan, 1.5)}, busy)
    assert f"be {remaining} (PyTorch), with" in note
    assert f"multiplies at {own / 1e9:.1f} GFLOP/s" in note and "absent" not in note


def test_steps_before_a_training_went_on_do_not_count():
    """They may be from another machine."""
    [path] = (ROOT / "results/training").glob("*.h5")
    found, rates = run_file.read_run(path), record(4e9, 4e9)
    steps, names = np.arange(1500), ("step_seconds", "torch_step_seconds")
    seconds = {name: replace(found.raw[name], values=took) for name, took in zip(
        names, (np.where(steps < 1000, 9.0, 0.5), np.ones(1500)))}
    went_on = replace(found, configuration=found.configuration | {"began": 1000},
                      scales=found.scales | rates.scales, raw=found.raw | rates.raw | seconds)
    _, notes = training.tables([went_on])
    assert "would be 2.00 instead of 2.00 (PyTorch)" in " ".join(notes.items)


def test_files_without_rates_have_no_note():
    assert equal_rate_notes(Measurements("layer", {}, {}, {}, {}, []), {"PyTorch": (1, 1)}) == []
