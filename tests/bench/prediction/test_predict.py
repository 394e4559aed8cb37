"""Predictions: the fit finds what was put in, the tables print, the figures are drawn."""
import csv
import io

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from bench.__main__ import main
from bench.cases.selection import select_rows
from bench.prediction import machine_model, planner
from bench.prediction.published import paper_fit, paper_pipelines, scaling
from bench.reports.figures import prediction
from mm3d.model.stack import Stack
from mm3d.training.schedules import build
from support import status_of

LONGHORN = machine_model.load_machine("longhorn")


@pytest.fixture(scope="module")
def outcome():
    return paper_fit.predict_tables(LONGHORN)


@pytest.mark.slow
def test_a_fit_finds_the_parameters_that_made_the_times(outcome):
    """Times made by the model itself, with checkpointing in some schemes: all come back."""
    made = paper_fit.Fit(24, {"1d": False, "2d": True, "3d": True}, machine_model.Achieved(
        gemm=0.6, memory=0.8, node=0.2, network=0.35), 0.0)
    machine = msgspec.structs.replace(LONGHORN, memory_bytes=1e15)
    rows = []
    for row in outcome.rows:
        forward, backward = paper_fit.predict_row(row, made, machine)
        published = msgspec.structs.replace(row.case.row, forward=forward, backward=backward)
        rows.append(replace(row, case=replace(row.case, row=published)))
    found = paper_fit.fit_rows(rows, machine, (24,))
    assert found.recompute == made.recompute and found.residual < 1e-6
    for name in paper_fit.FITTED_FIGURES:
        assert getattr(found.achieved, name) == pytest.approx(getattr(made.achieved, name), 1e-4)


def test_rows_that_need_more_memory_than_there_is_repeat_the_forward(outcome):
    """Of every scheme some row needs more than 16 GiB, even with half the layers."""
    assert all(outcome.fit.recompute.values())
    weak = [row for row in outcome.rows if row.case.row.table == "weak"]
    assert all(row.peak / 2 > LONGHORN.memory_bytes for row in weak)


def test_errors_are_within_what_the_documentation_says(outcome):
    """The rows that were not fitted are predicted about as well as those that were."""
    assert len(outcome.rows) == 18 and len(outcome.chosen) == 9
    assert outcome.mean(fitted=True) < 0.25 and outcome.mean(fitted=False) < 0.30
    assert np.mean(np.abs(outcome.left_out)) < 0.30


@pytest.mark.parametrize("form", ["text", "rst", "latex", "csv"])
def test_the_verb_prints_every_format(form, outcome, monkeypatch, tmp_path, capsys):
    """And names figures on standard error, so that the document stays whole, but of text."""
    monkeypatch.setattr(paper_fit, "predict_tables", lambda *machine: outcome)
    monkeypatch.setattr(prediction, "draw_predicted_scaling",
                        lambda folder, found: f"{folder}/drawn.png")
    options = ["--table", "strong", "--format", form, "--pictures", str(tmp_path)]
    assert main(["predict", *options]) == 0
    said = capsys.readouterr()
    named = f"{tmp_path}/drawn.png\n"
    assert said.out.endswith(named) if form == "text" else said.err == named
    if form != "csv":
        assert "Table 2" in said.out and "Table 1" not in said.out
        assert "does not explain" in said.out and said.out.count("fitted") >= 9
        return
    rows = list(csv.DictReader(io.StringIO(said.out)))
    strong = [row for row in outcome.rows if row.case.row.table == "strong"]
    assert len(rows) == len(strong) == 9
    for row, spent in zip(rows, strong):
        assert float(row["backward s predicted"]) == paper_fit.predict_row(
            spent, outcome.fit, LONGHORN)[1]


def test_rows_of_one_stage_are_predicted_as_without_stages(outcome):
    """To the last digit, with a backward that repeats the forward; and equal stages without hops
    take the closed form of 1F1B."""
    rows = [row for row in select_rows("strong") if row.gpus in (8, 64)]
    found, missing = paper_pipelines.predict_as_pipelines(outcome, rows, build("1f1b", 1, 1))
    assert [one.row for one in found] == rows and not missing
    assert [one.average for one in found] == [one.one_stage for one in found]
    found, missing = paper_pipelines.predict_as_pipelines(outcome, rows, build("1f1b", 4, 6))
    assert [one.row.scheme for one in found] == ["1d", "1d", "2d"]
    assert "strong 3d on 64: 16 ranks are no cube" in missing[-1]
    for one in found:
        times = one.found.timeline.times
        assert one.found.without_hops == (6 + 4 - 1) * (times.forward[0] + times.backward[0])
        assert one.average > float(one.found.without_hops) / one.row.batch


def test_the_verb_prints_rows_as_pipelines(outcome, monkeypatch, capsys):
    monkeypatch.setattr(paper_fit, "predict_tables", lambda *machine: outcome)
    words = ["predict", "--table", "strong", "--stages", "8", "--microbatches", "12"]
    assert main([*words, "--schedule", "gpipe"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Table 2, strong scaling, gpipe of 8 stages and 12 micro-batches (a model)" in text
    assert "3-D 64 2 x 2 x 2" in text
    assert "Left out: strong 1d on 36, strong 2d on 36: 8 stages do not" in text
    assert main(["predict", "--table", "weak", "--stages", "2", "--data", "2", "--zero", "1",
                 "--microbatches", "6", "--grid", "1x1x2,2x1x1"]) == 0    # one for each stage
    text = capsys.readouterr().out
    assert "1f1b of 2 replicas of 2 stages and 6 micro-batches, ZeRO 1" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("3-D")]
    assert [row[1:4] for row in rows] == [["8", "1x1x2,", "2x1x1"]]


@pytest.mark.parametrize("words, said", [
    (["--schedule", "gpipe"], "--schedule gpipe: give --stages too"),
    (["--stages", "2", "--schedule", "2f2b"], "schedule '2f2b' is unknown"),
    (["--stages", "2", "--pictures", "here"], "--pictures here: pictures are of rows without")])
def test_pipelines_that_cannot_be_are_refused(words, said, capsys):
    assert status_of(main, ["predict", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--table", "strong"], ["--stages", "2"],
                                  ["--pictures", "pics"]])
def test_results_go_without_options_of_the_tables(more, tmp_path, capsys):
    assert main(["predict", "--results", str(tmp_path), *more]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {' '.join(more)}: leave it out: ") and not said.out
    assert said.err.count("\n") == 1


def test_sizes_beyond_the_table_continue_it():
    for row in select_rows("weak"):
        sizes = scaling.weak_sizes(row.scheme, row.gpus)
        assert (sizes["hidden"], sizes["batch"]) == (row.hidden, row.batch)
    assert scaling.weak_sizes("2d", 256) == dict(hidden=16384, heads=256, batch=768, seq=512)


@pytest.mark.slow
def test_crossovers_of_families():
    """Of a small model: no grid of a family is faster than the best 3-D one."""
    found = scaling.plan_families(LONGHORN, Stack(layers=2, hidden=512, heads=8, batch=16,
                                                  seq=64))
    best = dict(found["3-D, best grid"])
    for family, points in found.items():
        assert all(p.seconds >= best[ranks].seconds for ranks, p in points
                   if p.scheme == "3d"), family
    changes = scaling.find_crossovers(found)
    assert changes[0][0] == 2 and len({ranks for ranks, _ in changes}) == len(changes)


def test_named_families_are_grids_of_so_many_ranks():
    for ranks in (64, 8, 12):
        for family in scaling.FAMILIES:
            chosen = scaling.family_grid(family, ranks)
            if chosen:
                assert chosen in list(planner.list_candidates(ranks))
