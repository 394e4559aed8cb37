"""Records, tables and figures of grids with other directions than x, y and z."""
import shutil
from dataclasses import replace

import h5py
import numpy as np
import pytest

from bench.cases.case import make_case
from bench.cases.selection import select_rows
from bench.errors import StoreError
from bench.instruments import spans
from bench.instruments.step_tracing import parts_group
from bench.records import model_run, run_file
from bench.records.folder import read_folder
from bench.records.measurements import Group, grid_settings
from bench.reports import merit, time_parts
from bench.reports.figures import time_shares
from bench.reports.formats import render
from mm3d.grid.axis import COLLECTIVES
from mm3d.grid.shape import GridShape
from records import made_up, traffic_of
from support import ROOT, run_python, run_ranks

# Two replicas of the paper's scheme: the gradients of the weights are averaged along d.
REPLICAS = '''
"""A throw-away scheme."""

from mm3d.schemes.cube import Cube


class Replicas(Cube):
    """2 x 2 x P/4 x 1, the first direction with copies of everything."""

    name = "replicas"
    directions = "dxyz"

    @classmethod
    def default_grid(cls, ranks):
        return (2, 2, ranks // 4, 1)

    @classmethod
    def product_moves(cls, sizes, *work, **options):
        forward, backward = super().product_moves(sizes, *work, **options)
        gathered = next(move for move in forward if move.axis == "x")
        weight = gathered.words // (sizes["x"] - 1)
        forward, backward = ([move._replace(words=sizes["d"] * move.words) for move in moves]
                             for moves in (forward, backward))
        return forward, [*backward, gathered._replace(
            axis="d", collective="all_reduce", words=2 * (sizes["d"] - 1) * weight)]

    def product(self, *work):
        product = super().product(*work)
        backward = product.backward

        def averaged(*operands):
            dA, dB = backward(*operands)
            return dA, self.grid.d.all_reduce(dB) / 2
        product.backward = averaged
        return product
'''


@pytest.mark.slow
@pytest.mark.limit(240)
def test_a_scheme_with_a_direction_of_its_own_is_measured_validated_and_shown(tmp_path):
    """Traffic along d, x and y is counted on 8 ranks and is the closed form's; the file says so,
    and tables show it."""
    for name in ("mm3d", "bench"):
        shutil.copytree(ROOT / name, tmp_path / name,
                        ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "mm3d" / "schemes" / "replicas.py").write_text(REPLICAS)
    done = run_ranks(8, "-m", "bench", "run", "--scheme", "replicas", "--table", "strong",
                     "--preset", "tiny", "--repetitions", "6", "--max-repetitions", "6",
                     "--traced", "1", "--out", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    path, = (tmp_path / "here").glob("*.h5")
    run = run_file.read_run(path)
    assert run.grid == GridShape("dxyz", (2, 2, 2, 1)) and run.directions == ("d", "x", "y", "z")
    words = run.traffic["words"].sum(axis=(0, 1))
    assert dict(zip(run.directions, (words > 0).any(axis=1))) == {
        "d": True, "x": True, "y": True, "z": False}
    assert words[0].nonzero()[0].tolist() == [COLLECTIVES.index("all_reduce")]
    with h5py.File(path) as file:
        assert file["traffic/axis"].asstr()[...].tolist() == list("dxyz")
    done = run_python("-c", "from bench.__main__ import main; import sys; sys.exit(max(map(main, "
                      "(['validate', 'here'], ['report', '--parts', 'here']))))", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": valid\n") == 1 and "words were not checked" not in done.stdout
    shown = [line.split() for line in done.stdout.splitlines()]
    assert any(line[:5] == ["seconds", "gemm", "d", "x", "y"] for line in shown)
    for axis in "dxy":
        counted, expected = next(line[-3:-1] for line in shown
                                 if line[:5] == ["words", "a", "rank", "along", f"{axis},"])
        assert counted == expected


ROW = select_rows("weak", "3d")[0]


def with_directions(directions: str = "dxyz", row=ROW):
    """A made-up run of 8 ranks that was traced: a second of products, and n words and n quarters
    of a second of all-gathers along the n-th direction."""
    run, count = made_up(row), len(directions)
    run.configuration.update(grid_settings(GridShape(directions, (8, *[1] * (count - 1)))))
    names, along = spans.part_names(directions), np.arange(1, count + 1)
    moved = np.zeros((2, 8, count, len(COLLECTIVES)), np.int64)
    moved[..., 0] = along
    seconds, counts = np.zeros((8, 2, 2, len(names))), np.ones((8, 2, len(names), 3))
    seconds[..., 0] = 1
    for n, direction in zip(along, directions):
        seconds[..., names.index(f"all_gather {direction}")] = n / 4
    run.groups["parts"] = parts_group(seconds, counts, names)
    run.groups["traffic"] = traffic_of(moved, tuple(directions))
    return run


def test_parts_and_figures_of_merit_have_every_direction(tmp_path):
    run = run_file.read_run(run_file.write_run(with_directions(), tmp_path, "a"))
    assert time_parts.mean_parts(run)["forward"] == {
        "gemm": 1, "d": 0.25, "x": 0.5, "y": 0.75, "z": 1, "elementwise": 0, "waiting": 0,
        "other": 0}
    assert time_parts.collective_bandwidth(run) == pytest.approx(
        dict.fromkeys("dxyz", 8 * 4 / (8 * 0.25)))
    found = {figure.name: figure for figure in merit.figures_of_merit(run)}
    for n, axis in enumerate("dxyz", 1):
        words = found[f"words a rank along {axis}, counted"]
        assert words.value == words.expected == 2 * n
    printed = [line.split() for line in render(merit.run_parts(run)).splitlines()]
    assert ["seconds", "gemm", "d", "x", "y", "z", "elementwise"] in [one[:7] for one in printed]
    assert ["forward", "1", "0.25", "0.5", "0.75", "1"] in [line[:6] for line in printed]


def test_the_figure_stacks_directions_of_all_runs(tmp_path):
    """A run without a direction has no bar of it; x, y and z look as they do without others."""
    rows = select_rows("weak", "1d")[0], ROW
    runs = [with_directions("xyz", rows[0]), with_directions("sdxyz", rows[1])]
    for row, run in zip(rows, runs):
        run_file.write_run(run, tmp_path, make_case(row, "laptop").name)
    looks = time_shares.part_styles(run.directions for run in runs)
    assert list(looks) == ["gemm", *"sdxyz", "elementwise", "waiting", "other"]
    assert [looks[c] for c in "xyz"] == [(time_shares.COLOURS[c], time_shares.HATCHES[c])
                                         for c in "xyz"]
    assert len(set(looks.values())) == len(looks)
    figure = time_shares.draw_time_shares(read_folder(tmp_path).results[0])
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [*(f"collectives along {c}" for c in "zyxds"), "matrix products"]
    heights = [round(p.get_height(), 6) for p in figure.axes[0].patches if p.get_height()]
    assert heights[:4] == pytest.approx([10 * n for n in (4, 1, 2, 3)])
    assert heights[8:14] == pytest.approx([100 * n / 19 for n in (4, 1, 2, 3, 4, 5)], abs=1e-5)


def test_directions_of_records():
    """Those of the grid, and always x, y and z, which programs of before look for."""
    for names, expected in (("xyz", "xyz"), ("x", "xyz"), ("xy", "xyz"), ("dxyz", "dxyz"),
                            ("dx", "dxyz"), ("yxs", "yxsz"), ("", "xyz")):
        shape = GridShape(names, [1] * len(names))
        assert model_run.directions_of(shape) == tuple(expected)


def test_a_file_that_knows_fewer_collectives_counts_none_of_the_others(tmp_path):
    run, fewer = made_up(ROW), made_up(ROW)
    traffic = fewer.groups["traffic"]
    fewer.groups["traffic"] = Group(traffic.scales | {"collective": COLLECTIVES[1:]}, {
        name: replace(one, values=one.values[..., 1:]) for name, one in traffic.variables.items()})
    found = run_file.read_run(run_file.write_run(fewer, tmp_path, "a"))
    for name, values in found.traffic.items():
        assert not values[..., 0].any()
        assert np.array_equal(values[..., 1:], run.traffic[name][..., 1:])
    assert np.array_equal(found.expected_words[..., 1:], run.expected_words[..., 1:])


@pytest.mark.parametrize("labels, match", [
    (list("xyy"), "traffic/axis has a direction twice: x y y"),
    (list("dxyz"), r"traffic/bytes has the shape \(2, 8, 3, 6\), which should be \(2, 8, 4, 6\)")])
def test_directions_that_cannot_be_are_refused(tmp_path, labels, match):
    run = made_up(ROW)
    run.groups["traffic"].scales["axis"] = labels
    with pytest.raises(StoreError, match=match):
        run_file.read_run(run_file.write_run(run, tmp_path, "a"))
