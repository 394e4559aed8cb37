"""Which direction of the grid stays inside a node."""
import numpy as np
import pytest

import mm3d
from bench.cases.case import make_case
from bench.cases.selection import select_rows
from bench.instruments import placement
from bench.records import run_file
from support import run_ranks

MODEL = mm3d.ModelSizes(layers=2, hidden=64, heads=4, batch=16, seq=8)


def test_the_direction_that_moves_the_most_words_is_the_fastest():
    for shape in ({"x": 2, "y": 2, "z": 2}, {"x": 4, "y": 2, "z": 2}, {"x": 2, "y": 2, "z": 4}):
        moved = placement.words_by_direction("3d", shape, MODEL)
        chosen = placement.direction_order("auto", "3d", shape, MODEL)
        assert sorted(chosen) == list("xyz") and len(set(moved.values())) > 1
        assert [moved[axis] for axis in chosen] == sorted(moved.values())
        for axis in shape:
            inside = placement.direction_order(axis, "3d", shape, MODEL)
            assert inside[-1] == axis and sorted(inside) == list("xyz")
            assert inside[:-1] == chosen.replace(axis, "")
    assert placement.direction_order("auto", "1d", {"x": 8}, MODEL) == "x"
    # A direction of one rank moves nothing, and so is never the one inside.
    assert placement.direction_order("auto", "3d", {"x": 1, "y": 8, "z": 1}, MODEL) == "xzy"


def test_words_are_those_that_are_counted():
    one = make_case(select_rows("weak", "3d")[0], "tiny").sizes
    shape = {"x": 2, "y": 2, "z": 2}
    forms = mm3d.cost.words("3d", shape, one)
    assert sum(placement.words_by_direction("3d", shape, one).values()) == sum(
        words for phase in forms.values() for words in phase.values()) > 0


def test_a_direction_that_the_grid_does_not_have():
    with pytest.raises(ValueError, match="--inside z: the grid of scheme '2d' has the "
                                         "directions x, y; choose one of them, or auto"):
        placement.direction_order("z", "2d", {"x": 4, "y": 4}, MODEL)


@pytest.mark.ranks(8)
@pytest.mark.parametrize("chosen", ["xyz", "zyx", "yzx", "zxy"])
def test_the_last_direction_varies_fastest_from_rank_to_rank(comm, chosen):
    shape = {"x": 2, "y": 1, "z": 4}
    ranks = placement.reorder_ranks(comm, shape, chosen)
    grid = mm3d.Grid(ranks, **shape)
    # Where each launched rank came to lie, in the order of launching.
    coords = comm.allgather(tuple(grid.coords[axis] for axis in chosen))
    assert coords == sorted(coords) and len(set(coords)) == 8
    assert (comm.rank == 0) == (ranks.rank == 0)
    grid.free()
    ranks.Free()


@pytest.mark.ranks(8)
def test_what_lies_within_a_node_is_found(comm, monkeypatch):
    """Of two nodes of four ranks each, in the order of launching."""
    shape = {"x": 2, "y": 2, "z": 2}
    everything = placement.placement_outcome(comm, shape, "xyz")
    assert everything == placement.Placement("xyz", "xyz", 1, "0 0 0 0 0 0 0 0")
    monkeypatch.setenv("MM3D_NODE_SIZE", "4")
    monkeypatch.setenv("MM3D_TRANSPORT", "")
    for chosen, within, nodes in (("xyz", "yz", "0 0 0 0 1 1 1 1"),
                                  ("zxy", "xy", "0 1 0 1 0 1 0 1"),
                                  ("yzx", "xz", "0 0 1 1 0 0 1 1")):
        ranks = placement.reorder_ranks(comm, shape, chosen)
        assert placement.placement_outcome(ranks, shape, chosen) == placement.Placement(
            chosen, within, 2, nodes)
        grid = mm3d.Grid(ranks, **shape)    # whose transports know the same nodes
        assert within == "".join(name for name, axis in grid.axes.items()
                                 if axis.transport.name == "shared")
        grid.free()
        ranks.Free()


def run_tiny(*words):
    return run_ranks(8, "-m", "bench", "run", "--preset", "tiny", *words)


@pytest.mark.slow
def test_the_placement_is_recorded_and_changes_no_result(tmp_path):
    results = {}
    for inside in ("x", "z"):
        done = run_tiny("--table", "strong", "--scheme", "3d", "--inside", inside,
                        "--repetitions", "2", "--max-repetitions", "2",
                        "--out", str(tmp_path / inside))
        assert done.returncode == 0, done.stdout + done.stderr
        results[inside] = run_file.read_run(*(tmp_path / inside).glob("*.h5"))
    for inside, run in results.items():
        assert run.configuration["placement"][-1] == inside
        assert run.configuration["nodes"] == 1 and run.configuration["within_nodes"] == "xyz"
    # Ranks are known by their place in the grid, so all that is counted stays where it was.
    a, b = results.values()
    for name in a.traffic:
        assert np.array_equal(a.traffic[name], b.traffic[name], equal_nan=True), name
    done = run_tiny("--table", "strong", "--scheme", "1d", "--inside", "y",
                    "--out", str(tmp_path / "none"))
    assert done.returncode == 2 and done.stderr.count("--inside y: ") == 1


@pytest.mark.slow
def test_a_job_that_is_told_to_stop_ends_with_what_it_has(tmp_path):
    (tmp_path / "stop").touch()
    done = run_tiny("--table", "all", "--scheme", "3d", "--repetitions", "50",
                    "--max-repetitions", "50", "--stop-file", str(tmp_path / "stop"),
                    "--out", str(tmp_path / "none"))
    assert done.returncode == 1 and done.stdout.count("not begun, as it was told to stop") == 2
    assert not list((tmp_path / "none").glob("*.h5"))
