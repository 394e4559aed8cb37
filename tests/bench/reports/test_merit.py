"""Figures of merit from known numbers, and speed-ups over several runs of two rows."""

import math
from dataclasses import astuple

import numpy as np
import pytest

from bench.cases.case import make_case
from bench.cases.selection import select_rows
from bench.instruments.spans import part_names
from bench.instruments.step_tracing import parts_group
from bench.records import run_file
from bench.records.folder import read_folder
from bench.records.measurements import Group, Variable
from bench.reports import merit
from bench.reports.certainty import SEVERAL_RUNS, SpeedUp, repeated_runs, speed_up
from bench.reports.formats import render
from mm3d.tracing.events import PHASES
from records import format_tables, made_up

ROW = select_rows("weak", "3d")[0]
PARTS = part_names("xyz")


def run_with_everything():
    """A run of 8 ranks, 4 s forward and 8 s backward, with all groups."""
    run = made_up(ROW, forward=4.0, backward=8.0)
    seconds, counts = np.zeros((8, 2, 2, len(PARTS))), np.zeros((8, 2, len(PARTS), 3))
    seconds[..., PARTS.index("gemm")], seconds[..., PARTS.index("all_gather x")] = 0.5, 2.0
    seconds[..., PARTS.index("waiting")] = 2.5
    counts[:, :, PARTS.index("gemm")] = 3, 1000, 8000
    run.groups["parts"] = parts_group(seconds, counts, PARTS)
    run.groups["machine"] = Group({}, {
        name: Variable(np.float64(rate), units, ()) for name, rate, units in (
            ("gemm_together", 5e9, "s-1"), ("gemm_alone", 2e10, "s-1"),
            ("memory_together", 1e9, "byte s-1"), ("memory_alone", 8e9, "byte s-1"))})
    run.groups["memory"] = Group({"rank": range(8)}, {
        "saved": Variable(np.arange(1, 9) * 2.0 ** 20, "byte", ("rank",)),
        "expected_saved": Variable(np.float64(7 * 2 ** 20), "byte", ())})
    return run


def test_figures_of_known_times(tmp_path):
    run = run_file.read_run(run_file.write_run(run_with_everything(), tmp_path, "a"))
    found = {figure.name: figure for figure in merit.figures_of_merit(run)}
    chosen = run.configuration
    batch, tokens = chosen["batch"], chosen["batch"] * chosen["seq"]
    layers, hidden = chosen["layers"], chosen["hidden"]
    flops = 3 * layers * (24 * tokens * hidden ** 2 + 4 * tokens * chosen["seq"] * hidden)
    assert run.values("flops") == flops
    assert found["average step time"].value == pytest.approx(12 / batch)
    assert found["tokens a second"].value == pytest.approx(tokens / 12)
    assert found["useful rate a rank"].value == pytest.approx(flops / 12 / 8 / 1e9)
    shares = [f.value for f in merit.figures_of_merit(run) if f.name.endswith("(MFU)")]
    assert shares == pytest.approx([100 * flops / 12 / 8 / 5e9, 100 * flops / 12 / 8 / 2e10])
    # Rank r of the made-up run moves r words of 4 bytes along x in each phase.
    words, moved = (
        found[f"{unit} a rank along x, counted"] for unit in ("words", "bytes"))
    assert words.value == words.expected == 7 and moved.value == moved.expected == 28
    assert found["  bandwidth in collectives along x"].value == pytest.approx(
        2 * 112 / (8 * 2 * 2.0) / 1e9)
    assert "words a rank along y" not in found
    assert merit.roofline_points(run) == {name: (8.0, 16000.0) for name in (
        *PHASES, "step")}
    name = "memory: saved activations"
    assert found[name] == merit.Figure(name, 8.0, "MiB", 7.0)


def test_figures_that_were_not_measured_are_missing_not_zero():
    run = made_up(ROW)
    found = {figure.name: figure.value for figure in merit.figures_of_merit(run)}
    assert math.isnan(found["peak of products, all ranks at once"])
    assert merit.roofline_points(run) is None and not any("memory:" in name for name in found)
    assert "was not traced" in render(merit.run_parts(run))


def test_parts_and_figures_are_printed(tmp_path):
    run_file.write_run(run_with_everything(), tmp_path, "a")
    printed = render(merit.merit_document(read_folder(tmp_path)))
    lines = [line.split() for line in printed.splitlines()]
    assert ["forward", "0.5", "2", "0", "0", "0", "2.5", "0", "5", "4", "1.25"] in lines
    assert ["backward,", "%", "10.0", "40.0", "0.0", "0.0", "0.0", "50.0", "0.0"] in lines
    assert ["memory:", "saved", "activations", "8", "7", "MiB"] in lines


@pytest.mark.parametrize("sizes, known", [
    ({}, False), ({"memory_arrays": 2.0 ** 26}, True),
    ({"memory_arrays": 2.0 ** 26, "last_level_caches": 2.0 ** 25}, True),
    ({"memory_arrays": 2.0 ** 26, "last_level_caches": 2.0 ** 26}, False)])
def test_a_rate_of_the_caches_is_no_rate_of_memory(sizes, known):
    """As in files of before, which do not say how large the arrays were."""
    run = run_with_everything()
    run.groups["machine"].variables.update(
        {name: Variable(np.float64(size), "byte", ()) for name, size in sizes.items()})
    found = {figure.name: figure.value for figure in merit.figures_of_merit(run)}
    assert found["memory bandwidth, one rank alone"] == 8 or not known
    assert math.isnan(found["memory bandwidth, all ranks at once"]) != known
    assert math.isnan(found["memory bandwidth, one rank alone"]) != known
    assert found["peak of products, all ranks at once"] == 5


T_OF_2 = 4.302652729749462    # Student's t of two degrees of freedom, 97.5 %
CUBE, LINE = (next(row for row in select_rows("weak", scheme) if row.gpus == 8)
              for scheme in ("3d", "1d"))


def test_pairs_of_runs():
    """The latest with the latest; earlier runs of one side alone are left out."""
    found = speed_up([100, 6, 3, 12], [2, 2, 2])
    half = T_OF_2 * math.log(2) / math.sqrt(3)
    assert found.ratio == pytest.approx(3) and found.runs == 3
    assert (found.low, found.high) == pytest.approx((3 * math.exp(-half), 3 * math.exp(half)))


def test_one_and_two_runs():
    """Of two the geometric mean, as of more."""
    for slow, found in (([6], SpeedUp(3, 3, 3, 1)), ([4, 16], SpeedUp(4, 2, 8, 2))):
        assert astuple(speed_up(slow, [2] * len(slow))) == pytest.approx(astuple(found))
    with pytest.raises(ValueError, match="a run of both rows"):
        speed_up([], [2])


def write_runs(folder, seconds, **changes):
    """Write a run of 1-D for each number of seconds a sequence, and of 3-D with a second each."""
    for k, each in enumerate(seconds):
        for row, average in ((LINE, each), (CUBE, 1.0)):
            whole = average * make_case(row, "laptop").sizes.batch
            run = made_up(row, whole / 4, 3 * whole / 4,
                          created=f"2030-01-02T03:04:{10 * len(changes) + k:02d}+00:00")
            run.configuration["order"] = k    # another order is no other setting
            run.environment.update(changes)
            run_file.write_run(run, folder, f"{row.scheme}-{k}-{len(changes)}")


def lines_of(folder):
    """The words of lines of speed-ups over 1-D that were measured."""
    return [line.split("|")[1].split() for line in format_tables(folder).splitlines()
            if line.startswith("over 1-D") and "missing" not in line]


def test_runs_of_another_commit_do_not_count(tmp_path):
    write_runs(tmp_path, [2, 8, 4])
    write_runs(tmp_path, [3, 5], git_commit="another")
    assert [words[4:8] for words in lines_of(tmp_path)] == [["3.87x", "3.00x", "5.00x", "2"]]
    results, = read_folder(tmp_path).results
    assert len(repeated_runs(results, LINE)) == 2 and results.earlier == 8


def test_one_run_has_no_interval_over_runs(tmp_path):
    write_runs(tmp_path, [2])
    assert [words[4:6] for words in lines_of(tmp_path)] == [["2.00x", "1"]]
    assert SEVERAL_RUNS not in " ".join(format_tables(tmp_path).split())
