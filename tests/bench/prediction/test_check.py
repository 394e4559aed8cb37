"""Works on grids: their list, their traces, and the verb that measures beside predicting."""
import dataclasses
import itertools
import math

import pytest
from mpi4py import MPI

from bench.__main__ import main, parser
from bench.cases.selection import select_rows
from bench.errors import WrongResult
from bench.experiments.products.problem import Problem, product_grid
from bench.prediction import beside_measured, machine_model, planner, whole_steps, work_list
from bench.prediction.work import Work, trace_work as trace_of
from bench.records import run_file
from mm3d.grid.shape import GridShape
from mm3d.schemes import find_scheme
from mm3d.tracing.events import Collective, Gemm, PHASES
from machine_files import write_machine
from records import made_up
from refused import refused, run_verb
from support import run_ranks

CPU = machine_model.load_machine("cpu")
SHAPE = (24, 40, 36)
UNEVEN = GridShape("xyz", (2, 1, 3))
LAYER = dict(layers=2, hidden=64, heads=4, batch=8, seq=16)


@pytest.mark.parametrize("work", [Work("matmul", "2d", GridShape("xy", (2, 2)), (5, 6, 7),
                                       "atb"),
                                  Work("layer", "3d", UNEVEN, (64, 4, 8, 16, 2)),
                                  Work("layer", "3d", UNEVEN, (64, 4, 8, 16, 2), "", "zxy"),
                                  Work("matmul", "3d", UNEVEN, (5, 6, 7), "ab", "yzx")])
def test_a_label_says_all_of_the_work(work):
    assert Work.parse(work.label) == work


def test_a_grid_is_placed_once_for_each_direction_that_changes_its_order():
    orders = {shape: work_list.list_orders(GridShape("xyz", shape), "xyz")
              for shape in ((2, 2, 2), (2, 1, 3), (1, 1, 8), (1, 4, 2))}
    assert orders == {(2, 2, 2): ["yzx", "xzy", "xyz"], (2, 1, 3): ["yzx", "xyz"],
                      (1, 1, 8): [""], (1, 4, 2): ["xzy", "xyz"]}
    assert work_list.list_orders(GridShape("xyz", (2, 1, 2)), "y") == [""]
    plain, placed = (work_list.list_works(4, [(8, 8, 8)], [(64, 4, 8, 16, 2)], inside)
                     for inside in ((), "xyz"))
    assert {dataclasses.replace(work, order="") for work in placed} == set(plain)
    assert all(len(set(work.order)) == len(work.grid) for work in placed if work.order)


def test_works_of_some_schemes_and_of_some_grids():
    layer = (64, 4, 8, 16, 2)
    every = work_list.list_works(64, [], [layer])
    some = work_list.list_works(64, [], [layer], schemes=["3d", "1d"], most=10)
    cubes = [work for work in every if work.scheme == "3d"]
    assert [work.scheme for work in some] == ["3d"] * 10 + ["1d"] and set(some) < set(every)
    assert (some[0], some[9]) == (cubes[0], cubes[-1]) and len(set(some)) == 11 < len(cubes)
    assert work_list.list_works(8, [], [layer], most=10) == work_list.list_works(
        8, [], [layer])    # calibrate leaves out none of 8 ranks
    with pytest.raises(ValueError, match="8 ranks are no square"):
        work_list.list_works(8, [], [layer], schemes=["1d", "2d"])
    with pytest.raises(ValueError, match="no product of matrices by 1d-sp: another scheme, or a"):
        work_list.list_works(8, [(8, 8, 8)], [], schemes=["1d-sp"])


def test_placing_moves_a_direction_into_the_node():
    """Of 2 x 2 x 2 ranks on 4 nodes, by strides: 1 is inside, 2 and 4 between nodes."""
    strides = {order: {event.direction: event.stride for event in trace_of(
        Work("layer", "3d", GridShape("xyz", (2, 2, 2)), (64, 4, 8, 16, 2), "", order),
        "float32", CPU).count(Collective)} for order in ("", "yzx", "xzy")}
    assert strides == {"": dict(x=4, y=2, z=1), "yzx": dict(x=1, y=4, z=2),
                       "xzy": dict(x=4, y=1, z=2)}


@pytest.mark.ranks(4)
def test_a_placed_layer_is_right_and_its_lines_lie_where_it_says(comm):
    work = Work("layer", "3d", GridShape("xyz", (2, 1, 2)), (16, 2, 4, 4, 1), "", "zyx")
    grid, trial, found = whole_steps.prepare_layer(work, comm, "float32", 0)
    assert all(check.passed for check in found) and len(found) > 2
    line = comm.allgather((grid.coords["x"], grid.coords["z"]))
    assert line == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert min(trial()) > 0
    grid.free()


def test_works_that_do_not_fit_together_are_in_batches():
    works = work_list.list_works(4, [(8, 8, 8)], [(64, 4, 8, 16, 2)], schemes=["1d", "3d"])
    expected = [float(5 * k % len(works)) for k in range(len(works))]
    assert len(set(expected)) == len(works)
    of_one = work_list.BYTES_OF_A_RANK + 3.5 * work_list.BYTES_OF_A_WORK
    for memory, most in ((math.inf, len(works)), (4 * of_one / work_list.USED, 3), (1, 1)):
        listed = work_list.sort_contenders(works, expected)
        batches = work_list.works_in_batches(listed, "float32", memory)
        assert sum(batches, []) == listed and max(map(len, batches)) == most
        assert len(batches) == 1 or all(len({one.sizes for one in batch}) == 1
                                        for batch in batches)
    assert set(listed) == set(works)
    for kind in ("matmul", "layer"):
        times = [expected[works.index(work)] for work in listed if work.kind == kind]
        assert times == sorted(times) and len(times) > 1


@pytest.mark.ranks(1, 4)
def test_every_work_is_verified_and_measured_once_a_round(comm):
    """In whatever batches, in their order: a layer takes longer than a small product."""
    product, *_, layer = work_list.list_works(comm.size, [(8, 8, 8)], [(64, 4, 8, 16, 2)],
                                              schemes=["3d"])
    lines, turns = [], []
    samples, checks = whole_steps.measure_works([[layer], [product, layer]], comm, "float32", 0, 5,
                                                lines.append, turns.append)
    assert samples.shape == (5, 3, 2) and (samples > 0).all() and turns == [*range(1, 6)] * 2
    first, other, last = samples.min(axis=0).sum(axis=-1)
    assert min(first, last) > other
    assert "checked the results of 3 of 3 plans" in lines
    of_works = [check.quantity.partition(":")[0] for check in checks if check.passed]
    assert [label for label, _ in itertools.groupby(of_works)] == [
        layer.label, product.label, layer.label]


@pytest.mark.ranks(2, first=(2,))
@pytest.mark.parametrize("work", [
    Work("layer", "1d-sp", GridShape("x", (2,)), (16, 2, 4, 4, 1)),
    Work("matmul", "3d", GridShape("xyz", (2, 1, 1)), (8, 8, 8), "ab")])
def test_what_is_wrong_is_not_timed(comm, wrong_sums, work):
    """On one rank only; all of them say so."""
    with pytest.raises(WrongResult, match=f"^{work.label}: .* is off by .*, tolerance "):
        whole_steps.measure_works([[work]], comm, "float32", 0, 1,
                                  after=lambda turn: pytest.fail("it is timed"))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("scheme, grid", [("3d", (2, 2, 1)), ("3d", (1, 2, 2)), ("2d", (2, 2)),
                                          ("1d", (4,))])
def test_a_product_s_trace_is_what_the_product_moves(comm, scheme, grid):
    problem = Problem(scheme, "ab", product_grid(scheme, comm, grid, "numpy"), SHAPE, "float32")
    shape = find_scheme(scheme).grid_shape(grid)
    trace = trace_of(Work("matmul", scheme, shape, SHAPE, "ab"), "float32", CPU)
    for phase in PHASES:
        problem.grid.reset_traffic()
        getattr(problem, phase)()
        real = {(axis, kind): moved.calls for (axis, kind), moved
                in problem.grid.traffic().items()}
        noted = {}
        for event, times in trace.count(Collective, phase).items():
            key = event.direction, event.kind
            noted[key] = noted.get(key, 0) + times
        assert noted == real
    flops = sum(event.flops * times for event, times in trace.count(Gemm).items())
    assert flops == 3 * 2 * math.prod(SHAPE) // 4    # the sizes divide evenly
    problem.grid.free()


@pytest.mark.ranks(2)
def test_every_scheme_and_grid_is_measured_written_and_read_again(comm, shared_tmp_path, capsys):
    """`predict --results` prints what was printed when it was measured; of merged files too."""
    folder = shared_tmp_path / "measured"
    status, said = run_verb(comm, "predict", "--machine", "cpu", "--matmul", "48", "--layer",
                            "32,4,4,8", "--rounds", "2", "--out", str(folder))
    assert status == 0, said
    if comm.rank:
        return
    (path,) = folder.glob("*.h5")
    record = run_file.read_run(path)
    assert record.kind == "check" and all(check.passed for check in record.checks)
    assert record.configuration["transport"] == "mpi"
    grids = {(work.kind, work.scheme, work.grid)
             for work in map(Work.parse, record.scales["work"])}
    candidates = list(planner.list_candidates(2))
    assert grids == {("layer", *one) for one in candidates} | {
        ("matmul", *one) for one in candidates if find_scheme(one[0]).matrix_product}
    samples = record.variables["samples"].values
    assert samples.shape == (len(grids), 2, 2) and (samples > 0).all()
    products = sum(kind == "matmul" for kind, _, _ in grids)
    assert f"matmul: {products} runs, error" in said and "1 x 2 x 1" in said
    found, problems = beside_measured.read_measured_folder(str(folder))
    assert len(found) == len(record.scales["work"]) and not problems
    assert all(min(one.seconds.values()) > 0 for one in found)
    capsys.readouterr()
    assert read_again(folder) == 0
    again = capsys.readouterr().out
    assert again.strip() in said.replace("written", "\nwritten")
    (shared_tmp_path / "merged").mkdir()
    everything, torn = (shared_tmp_path / "merged" / name for name in ("all.h5", "cut.h5"))
    assert main(["merge", str(everything), str(folder)]) == 0
    torn.write_bytes(everything.read_bytes()[:3000])
    capsys.readouterr()
    assert read_again(torn.parent) == 1
    merged, left_out = capsys.readouterr()
    assert left_out.startswith(f"left out: {torn} is truncated, damaged") and merged == again


def read_again(folder) -> int:
    words = ["predict", "--machine", "cpu", "--results", str(folder)]
    arguments = parser(words).parse_args(words)
    return arguments.verb_file.run(arguments, MPI.COMM_SELF)


def test_runs_of_the_tables_have_a_published_column(capsys, tmp_path):
    run_file.write_run(made_up(select_rows("weak", "1d")[0]), tmp_path, "weak")
    assert main(["predict", "--machine", "cpu", "--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "published" in out and "0.3406" in out    # 20.435 s for 60 sequences


@pytest.mark.ranks(1)
@pytest.mark.parametrize("more, message", [
    (["--rounds", "3"], "--rounds would do nothing here"),
    (["--matmul", "8", "--table", "weak"], "--table would do nothing here"),
    (["--matmul", "8", "--rounds", "0"], "--rounds: '0': a whole number of at least 1"),
    (["--layer", "64,4,8,16", "--inside", "x,t"], "no grid has a direction 't'"),
    (["--layer", "64,4,8,16", "--inside", ""], "--inside: its value is empty"),
    (["--layer", "64,4,8,16", "--scheme", "2d,four"], "'four' is unknown: choose one of 1d, "),
    (["--layer", "30,4,4,8"], "hidden=30"),
    (["--layer", "64,4,8,16", "--machine", "abacus"], "is unknown")])
def test_wrong_arguments_are_named(comm, more, message, tmp_path):
    assert message in refused(comm, "predict", "--machine", "cpu", "--out", str(tmp_path), *more)


@pytest.mark.parametrize("verb", [("predict", "--machine", "cpu", "--matmul", "8"),
                                  ("calibrate",)],
                         ids=["predict", "calibrate"])
@pytest.mark.parametrize("name, value, message", [
    ("MM3D_TRANSPORT", "foo", "choose mpi, shared or hierarchical"),
    ("MM3D_NODE_SIZE", "x", "give the number of ranks, 1 or more"),
    ("MM3D_NODE_SIZE", "0", "give the number of ranks, 1 or more")])
@pytest.mark.ranks(1, 2)
def test_wrong_variables_are_named_in_a_line(comm, monkeypatch, verb, name, value, message,
                                             shared_tmp_path):
    if comm.size == 1 and name == "MM3D_NODE_SIZE":
        return    # which one rank does not ask for
    monkeypatch.setenv("MM3D_TRANSPORT", "")
    monkeypatch.setenv(name, value)
    said = refused(comm, *verb, "--out", str(shared_tmp_path / "new.toml"))
    assert said.startswith(f"error: {name}={value!r}") and message in said
    assert said.count("\n") == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("figures, dtype, said", [
    ({"gemm_rate": {"float32": 1e11}}, "float64",
     "machine cpu has no rate for float64: it has float32"),
    ({"transport": "shared"}, "float32", "--machine {} was measured with transport shared, not "
     "mpi: set MM3D_TRANSPORT=shared, or calibrate again")])
def test_a_machine_that_is_no_model_is_refused(comm, shared_tmp_path, figures, dtype, said):
    path = comm.bcast(write_machine(shared_tmp_path, **figures) if comm.rank == 0 else None)
    assert refused(comm, "predict", "--machine", path, "--matmul", "8", "--dtype", dtype, "--out",
                   str(shared_tmp_path)) == f"error: {said.format(path)}\n"
    assert not list(shared_tmp_path.glob("*.h5"))


@pytest.mark.slow
def test_a_machine_measured_on_several_nodes_is_checked_there(tmp_path):
    path = write_machine(tmp_path, transport="hierarchical mpi shared", ranks_per_node=2)
    run = run_ranks(4, "-m", "bench", "predict", "--machine", path, "--matmul", "16", "--rounds",
                    "1", "--out", str(tmp_path), MM3D_TRANSPORT="", MM3D_NODE_SIZE="2")
    assert run.returncode == 0 and len(list(tmp_path.glob("*.h5"))) == 1, run.stderr
    products = sum(find_scheme(name).matrix_product is not None
                   for name, _ in planner.list_candidates(4))
    assert f"matmul: {products} runs, error" in run.stdout and "left out" not in run.stdout
