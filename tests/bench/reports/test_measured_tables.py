"""Predicted beside measured; and what remains where both sides multiply equally fast."""

import dataclasses
import functools

import numpy as np
import pytest
from msgspec.structs import replace

from bench.prediction import beside_measured, machine_model, planner
from bench.prediction.beside_measured import Measured
from bench.prediction.work import SIZE_NAMES, Work, predict_seconds
from bench.records import run_file
from bench.records.kinds import training
from bench.records.measurements import Measurements, Variable
from bench.records.notes import equal_rate_notes
from bench.reports.formats import render
from bench.reports.measured_tables import compare_predictions
from mm3d.grid.shape import GridShape
from mm3d.model.stack import Stack
from mm3d.tracing.events import PHASES
from records import invented
from support import ROOT

CPU = machine_model.load_machine("cpu")
UNEVEN = GridShape("xyz", (2, 1, 3))
LAYER = dict(layers=2, hidden=64, heads=4, batch=8, seq=16)


def test_the_table_says_which_direction_is_inside():
    work = Work("layer", "3d", GridShape("xyz", (2, 2, 2)), (64, 4, 8, 16, 2))
    took = dict.fromkeys(PHASES, 1.0)
    found = [Measured(dataclasses.replace(work, order=order), "float32", took)
             for order in ("", "yzx")]
    text = render(compare_predictions(CPU, found))
    assert "2 x 2 x 2  " in text and "2 x 2 x 2, x inside" in text
    assert "planner's" in text    # the two orders are two plans to choose from


@functools.cache
def made(slower=1.25) -> list[Measured]:
    """Grids of 8 ranks, measured as predicted but for a factor; 8 x 1 x 1 far faster."""
    found = []
    for scheme, grid in planner.list_candidates(8):
        if scheme not in ("1d", "1d-sp", "3d"):
            continue
        work = Work("layer", scheme, grid, (64, 4, 8, 16, 2))
        factor = 0.01 if grid.sizes == (8, 1, 1) else slower
        seconds = predict_seconds(CPU, work, "float32")
        found.append(Measured(work, "float32", {p: s * factor for p, s in seconds.items()}))
    return found


def test_the_report_says_how_far_off_predictions_are():
    found = made()
    text = render(compare_predictions(CPU, found))
    assert "error 20% in the median" in text and "9900% at most" in text
    lines = [line for line in text.splitlines() if line.startswith("layer 64 x 4 x 8 x 16 x 2 ")]
    best = planner.rank_plans(8, CPU, Stack(**LAYER))[0]
    assert best.grid.sizes != (8, 1, 1)
    assert len(lines) == 2 and all("3-D 8 x 1 x 1" in line for line in lines)
    for line in lines:    # what the planner would have taken, and then the fastest
        taken, fastest = line.index(str(best.grid)), line.index("3-D 8 x 1 x 1")
        assert taken < fastest


def test_of_several_runs_of_a_plan_the_median_counts():
    """One run in which the planner's choice was slow, or another fast, does not decide."""
    found = [one for one in made(slower=1.0) if one.work.grid.sizes != (8, 1, 1)]
    fast = [dataclasses.replace(one, seconds={p: s * factor for p, s in one.seconds.items()})
            for one, factor in zip(found, 0.1 * np.arange(1, len(found) + 1))]
    text = render(compare_predictions(CPU, [*found, *fast, *found]))
    assert "The planner's choices, by medians of several runs" in text
    [line] = [line for line in text.splitlines()
              if line.startswith("layer 64 x 4 x 8 x 16 x 2 ") and " all " in line]
    assert f" all {len(found)} " in " ".join(line.split()) and "+0%" in line
    assert "by medians" not in render(compare_predictions(CPU, found))


def test_layers_and_products_of_other_verbs_are_read():
    """Of `bench layer` the whole step, of `bench matmul` the phases that it measured."""
    sizes = dict(zip(SIZE_NAMES["layer"], (64, 4, 8, 16, 1)))
    both = dict(scheme="3d", grid="2 x 1 x 3", grid_axes="x y z", dtype="float64")
    layer = invented("layer", both | sizes, {}, {}, {"seconds": Variable(
        np.array([[0.5, 0, 0, 0], [0.1, 0, 0, 0]]), "s", ("kind", "bound"))}, [])
    product = invented("matmul", both | dict(M=4, N=5, K=6, form="abt"), {},
                       {"phase": ["forward"]}, {"seconds": Variable(
                           np.array([[[0.2, 0, 0, 0], [0.1, 0, 0, 0]]]), "s",
                           ("phase", "kind", "bound"))}, [])
    (one,), (other,) = map(list, map(beside_measured.read_measured, (layer, product)))
    assert one == Measured(Work("layer", "3d", UNEVEN, (64, 4, 8, 16, 1)), "float64",
                           {"step": 0.5})
    assert other == Measured(Work("matmul", "3d", UNEVEN, (4, 5, 6), "abt"), "float64",
                             {"forward": 0.2})
    guess = predict_seconds(CPU, one.work, "float64")
    off = f"{sum(guess.values()) / 0.5 - 1:+.0%}"
    text = render(compare_predictions(CPU, [one]))
    assert off in text and ": 1 run, error " in text


def test_a_measured_machine_is_for_its_own_ranks():
    curve = machine_model.Curve([1.0, 2.0], [1e-6, 2e-6])
    other = replace(CPU, passes={"other": curve}, ranks_per_node=2)
    assert "12 runs of other numbers of ranks or another transport left out" in render(
        compare_predictions(other, made()))


def test_a_measured_machine_is_for_its_own_transport():
    """What a file does not say of its transport is taken on trust."""
    shared, unknown, nodes = (replace(CPU, transport=name)
                              for name in ("shared", "", "mpi shared"))
    one = made()[0]
    other, same = (dataclasses.replace(one, transport=name) for name in ("mpi", "shared"))
    assert one.matches(shared) and same.matches(shared) and other.matches(unknown)
    assert not other.matches(shared)
    assert other.matches(nodes) and same.matches(nodes)
    assert not dataclasses.replace(one, transport="mpi shared").matches(shared)


def test_what_a_machine_has_no_rate_for_is_left_out():
    few = replace(CPU, gemm_rate={"float32": 1e11})
    double = dataclasses.replace(made()[0], dtype="float64")
    text = render(compare_predictions(few, [*made(), double]))
    assert text == render(compare_predictions(few, made())) + (
        "\n\nLeft out\n  - 1 run of dtypes without a rate of products left out")


def test_the_median_of_the_rounds_stands_for_them():
    """Of each phase; the least of many rounds would depend on their number."""
    label = "matmul 3d 2x1x1 8x8x8 ab"
    record = Measurements("check", {"dtype": "float32", "transport": "mpi"}, {},
                          {"work": [label], "phase": PHASES, "repetition": range(3)},
                          {"samples": Variable(np.array([[[3, 1, 2], [9, 8, 70]]], float), "s",
                                               ("work", "phase", "repetition"))}, [])
    (one,) = beside_measured.read_measured(record)
    assert one.seconds == {"forward": 2, "backward": 9} and one.work.label == label


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
    seconds = {name: dataclasses.replace(found.raw[name], values=took) for name, took in zip(
        names, (np.where(steps < 1000, 9.0, 0.5), np.ones(1500)))}
    went_on = dataclasses.replace(
        found, configuration=found.configuration | {"began": 1000},
        scales=found.scales | rates.scales, raw=found.raw | rates.raw | seconds)
    _, notes = training.tables([went_on])
    assert "would be 2.00 instead of 2.00 (PyTorch)" in " ".join(notes.items)


def test_files_without_rates_have_no_note():
    assert equal_rate_notes(Measurements("layer", {}, {}, {}, {}, []), {"PyTorch": (1, 1)}) == []
