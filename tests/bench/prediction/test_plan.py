"""The planner against brute force and the bound; the paper's tables, fitted and predicted."""
import csv
import io
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from bench.__main__ import main
from bench.cases.selection import select_rows
from bench.prediction import machine_model, planner
from bench.prediction.closed_form_plan import screen_grid
from bench.prediction.published import paper_fit, paper_pipelines, scaling
from bench.prediction.seconds import collective_terms, step_seconds
from bench.records import run_file
from bench.reports.figures import prediction
from bench.command_line.config_options import read_grid
from mm3d import ModelSizes
from mm3d.grid.shape import GridShape
from mm3d.model.experts.layer import Experts
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.tracing import dry_run
from mm3d.tracing.events import PHASES, Collective
from mm3d.training.schedules import build
from machine_files import assert_sourced, write_machine
from refused import refused
from support import run_ranks

LONGHORN = machine_model.load_machine("longhorn")
WEAK_64 = dict(layers=24, hidden=8192, heads=128, batch=384, seq=512)
SLAB = GridShape("xyz", (16, 4, 1))
SMALL = {"wide": dict(layers=2, hidden=1024, heads=16, batch=8, seq=32),
         "long": dict(layers=2, hidden=64, heads=4, batch=64, seq=64),
         "uneven": dict(layers=1, hidden=120, heads=5, batch=7, seq=9)}


@pytest.mark.parametrize("ranks", [1, 7, 12, 64, 360])
def test_all_grids_are_found_once(ranks):
    every = {(x, y, ranks // x // y) for x in range(1, ranks + 1) if ranks % x == 0
             for y in range(1, ranks // x + 1) if ranks // x % y == 0}
    assert [grid.sizes for grid in find_scheme("3d").grids(ranks)] == sorted(every)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("ranks, name", [
    (4, "wide"), *((ranks, name) for ranks in (8, 12) for name in SMALL), (36, "uneven")])
def test_the_choice_is_the_best_of_all_when_every_candidate_is_traced(ranks, name):
    """Screening by closed forms loses nothing: brute force over dry runs chooses no better."""
    seconds, sizes = {}, SMALL[name]
    for scheme, grid in planner.list_candidates(ranks):
        trace = dry_run.trace_step(scheme, ranks, grid, **sizes)
        seconds[scheme, grid] = sum(step_seconds(LONGHORN, trace).values())
    best = planner.rank_plans(ranks, LONGHORN, Stack(**sizes))[0]
    assert best.traced and best.seconds == seconds[best.scheme, best.grid]
    assert best.seconds <= 1.02 * min(seconds.values())


@pytest.mark.slow_but_first
@pytest.mark.parametrize("ranks, experts", [
    (4, None), (8, None), (4, Experts(4, top=2, every=2, gate="mixtral", capacity=None))])
def test_screened_words_are_those_of_the_traces(ranks, experts):
    """Of all ranks together, for every scheme and grid, where nothing divides; with experts, which
    all get equally many tokens, on three."""
    stack, shapes = Stack(**SMALL["uneven"]), planner.list_candidates(ranks)
    if experts:
        stack = Stack(4, 32, 4, 8, 8, experts=experts)
        shapes = [("3d", GridShape("xyz", (2, 2, 1))), ("1d", GridShape("x", (4,))),
                  ("2d", GridShape("xy", (2, 2)))]
    for scheme, grid in shapes:
        screened = screen_grid(scheme, grid, LONGHORN, stack)
        traces = [dry_run.trace_step(scheme, ranks, grid, rank, **stack.fields())
                  for rank in range(ranks)]
        for phase in PHASES:
            assert sum(t.words(phase) for t in traces) == round(
                ranks * screened.words[phase]), (scheme, grid)
        traced = planner.trace_plan(screened, LONGHORN, stack)
        assert traced.memory == traces[0].peak
        assert math.isnan(screened.over_bound) == (experts is not None)


@pytest.mark.slow
def test_screened_seconds_are_near_the_traces():
    sizes = dict(WEAK_64, layers=2, batch=96)
    for scheme, grid in planner.list_candidates(64):
        screened = screen_grid(scheme, grid, LONGHORN, Stack(**sizes))
        traced = planner.trace_plan(screened, LONGHORN, Stack(**sizes))
        assert screened.seconds == pytest.approx(traced.seconds, rel=0.15), (scheme, grid)


@pytest.mark.slow
def test_the_weak_64_gpu_shape_is_no_cube():
    """16 x 4 x 1 moves 2.5 times fewer words than 4 x 4 x 4, 491 to 1246 million a layer."""
    found = {p.grid.sizes: p
             for p in planner.rank_plans(64, LONGHORN, Stack(**WEAK_64), scheme="3d")}
    slab, cube = found[16, 4, 1], found[4, 4, 4]
    assert slab.words["forward"] / 24e6 == pytest.approx(491, rel=0.01)
    assert cube.words["forward"] / 24e6 == pytest.approx(1246, rel=0.01)
    assert slab.seconds < cube.seconds
    assert min(p.words["forward"] for p in found.values()) >= 0.999 * slab.words["forward"]


@pytest.mark.parametrize("shape, regime", [
    ((10**6, 8, 8), 1), ((4096, 4096, 8), 2), ((256, 256, 256), 3)])
def test_regimes_of_the_bound(shape, regime):
    assert planner.bound_regime(*shape, 64) == regime


def test_what_does_not_fit_comes_last():
    found = planner.rank_plans(8, LONGHORN, Stack(24, 4096, 32, 4, 512))
    fits = [p.fits for p in found]
    assert fits == sorted(fits, reverse=True)
    sizes = dict(WEAK_64, batch=96)
    once, again = (
        planner.trace_plan(screen_grid("3d", SLAB, LONGHORN, one), LONGHORN, one)
        for one in (Stack(**sizes, recompute=recompute) for recompute in ("none", "full")))
    assert again.memory < once.memory / 2 and again.backward > once.backward


def test_a_scheme_without_a_grid_of_so_many_ranks_has_no_best_one():
    with pytest.raises(ValueError, match="8 ranks are no square: start 4 or 9"):
        planner.best_grid("2d", 8, LONGHORN, Stack(**SMALL["wide"]))
    assert {name for name, _ in planner.list_candidates(8)} == {
        "1d", "1d-sp", "2.5d", "3d", "faces"}


@pytest.mark.slow
def test_the_verb_prints_what_it_found(capsys):
    assert main(["plan", "--ranks", "64", "--hidden", "8192", "--layers", "2"]) == 0
    out = capsys.readouterr().out
    traced = re.search(r"\n3d +16 x 4 x 1 .*\D64 plans screened, (\d+) traced", out, re.DOTALL)
    assert traced and planner.TRACED_OF_MANY <= int(traced[1]) <= 64
    assert "3d on its default grid, 4 x 4 x 4: 2492 million forward; " in out
    assert "fewest words forward: 2.5d 1 x 1 x 64, 0 million a rank" in out    # replicas


@pytest.mark.parametrize("command", [
    ["plan"], ["dry", "--grid", "auto"], ["dry", "--grid", "2x1x1"], ["predict"]])
def test_a_machine_without_a_rate_for_the_dtype_is_named(command, tmp_path, capsys):
    path = write_machine(tmp_path, gemm_rate={"float64": 5e10})
    sizes = ["--ranks", "2", "--hidden", "64"] * (command != ["predict"])
    assert main([*command, *sizes, "--machine", path]) == 2
    said = capsys.readouterr()
    assert said.err == "error: machine cpu has no rate for float32: it has float64\n"
    assert not said.out


@pytest.mark.ranks(8)
def test_a_run_on_a_machine_without_a_rate_is_refused_before_anything_is_measured(
        comm, shared_tmp_path):
    if comm.rank == 0:
        write_machine(shared_tmp_path, gemm_rate={"float64": 5e10})
    comm.Barrier()
    said = refused(comm, "run", "--preset", "tiny", "--table", "weak", "--scheme", "3d", "--grid",
                   "auto", "--machine", str(shared_tmp_path / "mine.toml"), "--out",
                   str(shared_tmp_path / "out"))
    assert said == "error: machine cpu has no rate for float32: it has float64\n"
    assert not list(shared_tmp_path.glob("out/*"))


@pytest.mark.ranks(8)
@pytest.mark.parametrize("grid", [[], ["--grid", "2x2x2"]])
def test_a_machine_that_no_run_plans_for_is_refused(comm, shared_tmp_path, grid):
    said = refused(comm, "run", "--preset", "tiny", "--scheme", "3d", *grid, "--machine",
                   "longhorn", "--out", str(shared_tmp_path / "out"))
    assert said == ("error: --machine longhorn: only --grid auto plans for a machine; give both, "
                    "or leave --machine out\n")
    assert not list(shared_tmp_path.glob("out/*"))


@pytest.mark.parametrize("name", ["longhorn", "dgx-h100", "dgx-h200", "cpu"])
def test_every_figure_of_a_machine_has_its_source(name):
    assert_sourced(machine_model.load_machine(name))


def test_collectives_share_the_links_they_need():
    """On nodes of 4: within one, across nodes alone on the link, and with three others."""
    def seconds(size, stride, kind="all_gather"):
        return collective_terms(LONGHORN, Collective(kind, "x", size, stride, 8 * 10**9))

    assert seconds(4, 1)["node"] == pytest.approx(6e9 / 75e9)
    assert seconds(8, 1)["network"] == pytest.approx(7e9 / 12.5e9)
    assert seconds(8, 4)["network"] == pytest.approx(4 * 7e9 / 12.5e9)
    assert seconds(8, 2)["network"] == pytest.approx(2 * 7e9 / 12.5e9)
    assert seconds(8, 4, "all_reduce")["network"] == 2 * seconds(8, 4)["network"]
    assert seconds(8, 4, "broadcast")["network"] == pytest.approx(4 * 8e9 / 12.5e9)


@pytest.mark.slow
def test_a_measured_run_takes_the_planner_s_grid(tmp_path):
    """``bench run --grid auto`` on 8 ranks: verified, written, and marked as another grid."""
    run = run_ranks(8, "-m", "mpi4py", "-m", "bench", "run", "--preset", "tiny", "--table", "weak",
                    "--scheme", "3d", "--grid", "auto", "--out", str(tmp_path))
    assert run.returncode == 0, run.stderr
    (path,) = tmp_path.glob("*.h5")
    found = run_file.read_run(path).configuration
    sizes = ModelSizes.from_settings(found)
    best = planner.best_grid("3d", 8, machine_model.load_machine("cpu"), Stack(**sizes))
    assert found["grid"] == str(best) and found["overridden"] == "grid"


def test_the_grid_of_auto_is_of_the_policy(monkeypatch):
    asked, plans = [], [SimpleNamespace(grid=GridShape("xyz", (32, 2, 1)))]
    monkeypatch.setattr(planner, "rank_plans", lambda ranks, machine, stack, **rest:
                        asked.append(stack.recompute) or plans)
    asking = Stack(**WEAK_64, recompute="full")
    assert read_grid("auto", "3d", 64, "longhorn", asking) == (32, 2, 1)
    assert asked == ["full"]


@pytest.fixture(scope="module")
def outcome():
    return paper_fit.predict_tables(LONGHORN)


@pytest.mark.slow
def test_a_fit_finds_the_parameters_that_made_the_times(outcome):
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
