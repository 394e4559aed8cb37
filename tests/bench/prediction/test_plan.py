"""The planner against brute force, the bound, and what is known of the paper's shapes."""
import re
from types import SimpleNamespace

import pytest

from bench.__main__ import main
from bench.prediction import machine_model, planner
from bench.prediction.closed_form_plan import screen_grid
from bench.prediction.seconds import collective_terms, step_seconds
from bench.records import run_file
from bench.command_line import grids
from mm3d import ModelSizes
from mm3d.grid.shape import GridShape
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.tracing import dry_run
from mm3d.tracing.events import Collective, PHASES
from machine_files import assert_sourced, format_machine
from refused import refused
from support import run_ranks, status_of

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
@pytest.mark.parametrize("ranks", [4, 8])
def test_screened_words_are_those_of_the_traces(ranks):
    """Of all ranks together, for every scheme and grid, where nothing divides."""
    sizes = SMALL["uneven"]
    for scheme, grid in planner.list_candidates(ranks):
        screened = screen_grid(scheme, grid, LONGHORN, Stack(**sizes))
        traces = [dry_run.trace_step(scheme, ranks, grid, rank, **sizes)
                  for rank in range(ranks)]
        for phase in PHASES:
            assert sum(t.words(phase) for t in traces) == round(
                ranks * screened.words[phase])


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


@pytest.mark.parametrize("command, message", [
    (["dry", "--ranks", "8", "--hidden", "64", "--grid", "3x2x1"], "a grid of 3 x 2 x 1 has 6"),
    (["dry", "--ranks", "8", "--hidden", "64", "--grid", "banana"], "such as 2x2x2, or auto"),
    (["dry", "--ranks", "9", "--hidden", "64", "--scheme", "2d", "--rank", "9"], "rank 9 of 9"),
    (["dry", "--ranks", "8", "--hidden", "64", "--scheme", "1d", "--keep", "both"], "'keep'"),
    (["dry", "--ranks", "8", "--hidden", "64", "--scheme", "2d", "--grid", "auto"],
     "8 ranks are no square: start 4 or 9"),
    (["plan", "--ranks", "8", "--hidden", "65", "--heads", "4"],
     "must be a multiple of --heads 4"),
    (["dry", "--ranks", "8", "--hidden", "64", "--scheme", "4d"], "scheme '4d' is unknown"),
    (["plan", "--ranks", "1", "--hidden", "64"], "at least 2 ranks"),
    (["plan", "--ranks", "8", "--hidden", "64", "--machine", "abacus"], "'abacus' is unknown"),
    *((verb + ["--stages", "1000000000"], "at most 262144 would do") for verb in (
        ["plan", "--ranks", "1000000", "--hidden", "64"], ["predict"],
        ["dry", "--ranks", "1000000", "--hidden", "64"])),
    (["dry", "--ranks", "8", "--hidden", "64", "--memory", f"{'9' * 400} GB"], "no size of"),
    (["plan", "--ranks", "8", "--hidden", "64", "--machine", "no.toml"], "machine file no.toml")])
def test_wrong_arguments_are_named(command, message, capsys):
    assert status_of(main, command) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [
    ["plan"], ["dry", "--grid", "auto"], ["dry", "--grid", "2x1x1"], ["predict"]])
def test_a_machine_without_a_rate_for_the_dtype_is_named(command, tmp_path, capsys):
    path = doubles(tmp_path)
    sizes = ["--ranks", "2", "--hidden", "64"] * (command != ["predict"])
    assert main([*command, *sizes, "--machine", path]) == 2
    said = capsys.readouterr()
    assert said.err == "error: machine cpu has no rate for float32: it has float64\n"
    assert not said.out


def doubles(folder) -> str:
    """The file of a machine with a rate for float64 only."""
    path = folder / "doubles.toml"
    path.write_text(format_machine(
        machine_model.msgspec.structs.replace(machine_model.load_machine("cpu"),
                                              gemm_rate={"float64": 5e10})))
    return str(path)


@pytest.mark.ranks(8)
def test_a_run_on_a_machine_without_a_rate_is_refused_before_anything_is_measured(
        comm, shared_tmp_path):
    if comm.rank == 0:
        doubles(shared_tmp_path)
    comm.Barrier()
    said = refused(comm, "run", "--preset", "tiny", "--table", "weak", "--scheme", "3d", "--grid",
                   "auto", "--machine", str(shared_tmp_path / "doubles.toml"), "--out",
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
    """What is chosen is planned for the step that is run."""
    asked, plans = [], [SimpleNamespace(grid=GridShape("xyz", (32, 2, 1)))]
    monkeypatch.setattr(planner, "rank_plans", lambda ranks, machine, stack, **rest:
                        asked.append(stack.recompute) or plans)
    asking = Stack(**WEAK_64, recompute="full")
    assert grids.read_grid("auto", "3d", 64, "longhorn", asking) == (32, 2, 1)
    assert asked == ["full"]
