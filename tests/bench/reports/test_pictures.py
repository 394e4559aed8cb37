"""Every picture that the project draws: its texts are plain, and none lies on another."""
import re
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

import bench
from bench.cases.selection import select_rows
from bench.prediction import machine_model, planner
from bench.prediction.pipelines import schedule_costs
from bench.records import run_file
from bench.records.folder import read_folder
from bench.reports.figures import (every_figure, prediction, roofline_and_memory, schedules,
                                   style, time_shares)
from bench.reports.figures.frames import DRAWN_RANKS, FLIGHT, HOPS, colour_of, draw_story
from bench.reports.figures.rank_panels import LayerParts, RankPanels
from mm3d.grid.shape import GridShape
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.tracing.block_moves import layer_story, product_story, small_sizes
from records import limited
from support import ROOT

LONGHORN = machine_model.load_machine("longhorn")
SIZES = dict(layers=2, hidden=512, heads=8, batch=16, seq=64)
# What draws, by the modules that make figures; each is covered below.
MAKERS = {"frames", "style"}


class Texts:
    """The texts of what is drawn instead of being saved, and where they are in pixels."""

    def __init__(self, monkeypatch) -> None:
        self.found, draw, self.pictures = {}, Text.draw, 0

        def drawn(text, renderer):
            draw(text, renderer)
            if text.get_visible() and text.get_text().strip():
                self.found.setdefault(text.figure.figure, {})[text] = (
                    text.get_text(), text.get_window_extent(renderer))
        monkeypatch.setattr(Text, "draw", drawn)
        monkeypatch.setattr(Figure, "savefig",
                            lambda figure, *path, **how: figure.draw_without_rendering())

    def problems(self):
        """A line for each text that is source code of another, or lies on another one."""
        for texts in self.found.values():
            self.pictures += 1
            assert len(texts) > 5
            for text, _ in texts.values():
                if re.search(r"\$|\\[a-z]|mathdefault|\bnan\b", text):
                    yield f"{text!r} is no plain text"
            for (text, box), (other, place) in combinations(texts.values(), 2):
                width, height = (min(getattr(box, f"{k}1"), getattr(place, f"{k}1"))
                                 - max(getattr(box, f"{k}0"), getattr(place, f"{k}0"))
                                 for k in "xy")
                if width > 1 and height > 1:
                    yield f"{text!r} lies on {other!r}"
        self.found.clear()


@pytest.fixture
def texts(monkeypatch):
    return Texts(monkeypatch)


def test_figures_are_made_where_these_tests_look():
    found = {path.stem for path in Path(bench.__file__).parent.rglob("*.py")
             if re.search(r"import (Figure|pyplot)\b", path.read_text())}
    assert found == MAKERS


@pytest.fixture(scope="module")
def measured():
    return read_folder(ROOT / "results" / "paper-laptop")


def test_figures_of_measured_results(tmp_path, texts, measured):
    """All, which `bench report` shows too, of rows whose rates lie close together."""
    files, left_out = style.save_drawings(every_figure.make_drawings(measured), tmp_path)
    assert len(files) == len(every_figure.FIGURES) and not left_out
    assert list(texts.problems()) == [] and texts.pictures == len(files)


def test_seconds_above_bars_have_two_digits(measured):
    weak, _ = time_shares.draw_time_shares(measured.results[0]).axes
    assert {"0.90", "3.0", "4.0", "14"} <= {text.get_text() for text in weak.texts}


def test_points_lie_under_the_roof_that_they_are_compared_with(measured):
    """What is measured of a rank while others wait, under what one rank has alone."""
    runs = measured.results[0].runs.values()
    assert runs
    for run in runs:
        intensity, products, step = roofline_and_memory.roofline_point(run)
        for rate, who in ((products, "alone"), (step, "together")):
            multiply, memory = roofline_and_memory.machine_rates(run, who)
            assert rate * 1e9 < np.fmin(multiply, memory * intensity)


@pytest.mark.slow
def test_pictures_of_plans(tmp_path, texts, monkeypatch):
    """To two million ranks, of which not all grids are looked at."""
    monkeypatch.setattr(planner, "list_candidates",
                        lambda ranks, scheme: [("3d", GridShape("xyz", (ranks, 1, 1)))])
    drawn = prediction.draw_plans(str(tmp_path), 16, LONGHORN, Stack(**SIZES))
    assert len([draw() for draw in drawn]) == 4
    assert list(texts.problems()) == [] and texts.pictures == 4


def test_pictures_of_predictions(tmp_path, texts, monkeypatch):
    monkeypatch.setattr(prediction, "predict_step_time",
                        lambda outcome, scheme, ranks, sizes: 9 / ranks)
    prediction.draw_predicted_scaling(str(tmp_path), SimpleNamespace(machine=LONGHORN))
    assert list(texts.problems()) == [] and texts.pictures == 1


def frames_of(scheme, sizes, form, backward=False):
    """What draws the frames of a product, or of a layer."""
    kind = find_scheme(scheme)
    grid = kind.grid_shape(sizes)
    if form == "layer":
        return LayerParts(layer_story(kind, grid, small_sizes(kind, grid), backward))
    return RankPanels(product_story(kind, grid, form, (grid.ranks,) * 3, backward))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("scheme, sizes, form, backward", [
    ("3d", (2, 2, 2), "ab", False), ("3d", (4, 4, 1), "abt", True), ("1d", (4,), "down", False),
    ("2.5d", (2, 2, 2), "atb", False), ("3d", (2, 2, 2), "layer", True)])
def test_pictures_of_products_and_of_a_layer(tmp_path, texts, scheme, sizes, form, backward):
    """Every moment: of the moving picture too, in which blocks may fly over others' numbers."""
    frames = frames_of(scheme, sizes, form, backward)
    draw_story(tmp_path / "cube.png", frames)
    assert list(texts.problems()) == [] and texts.pictures == 1


def test_a_moving_picture_has_the_moments_of_a_product(tmp_path):
    frames = frames_of("3d", (2, 1, 1), "ab")
    with Image.open(draw_story(tmp_path / "cube.gif", frames)) as image:
        assert image.n_frames == 1 + 1 + HOPS + 1 + 1 + 1    # stored, gather, multiply, kept
        seconds = []
        for number in range(image.n_frames):
            image.seek(number)
            seconds.append(image.info["duration"])
    assert seconds.count(FLIGHT) == HOPS


def test_blocks_of_all_ranks_are_told_apart():
    looks = [colour_of(rank) for rank in range(DRAWN_RANKS)]
    assert len(set(looks)) == DRAWN_RANKS and colour_of(None) not in looks
    for colour, _ in looks:    # dark letters are read on all: luminances differ 7 to 1
        levels = [int(colour[at:at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4
                  for one in levels]
        assert np.dot((0.2126, 0.7152, 0.0722), linear) + 0.05 > 7 * 0.06


@pytest.mark.slow
def test_pictures_of_schedules(tmp_path, texts):
    pipeline = schedule_costs.ComparedPipeline(4, 12)
    names = ["1f1b", "zb-v", "dualpipe-v"]
    schedules.picture(tmp_path / "a.png", {
        name: schedule_costs.timed(name, pipeline) for name in names})
    timeline = schedule_costs.timed("1f1b", pipeline)
    schedules.picture(tmp_path / "c.png", {"1f1b": timeline, 12 * "long title ": timeline}, "s")
    shown = {text for found in texts.found.values() for text, _ in found.values()}
    assert {"1f1b: cost 45 s, bubble 20.0% of it", "time (s)", "time"} <= shown
    assert list(texts.problems()) == [] and texts.pictures == 2


def test_numbers_that_would_not_fit_into_their_boxes_are_left_out(tmp_path, texts):
    """Of 24 micro-batches on 4 ranks, each in two chunks, beside longer actions that have them."""
    crowded, roomy = (schedule_costs.timed(name, schedule_costs.ComparedPipeline(4, 24))
                      for name in ("zb-v", "1f1b"))
    schedules.picture(tmp_path / "a.png", {"zb-v": crowded, "1f1b": roomy})
    [found] = texts.found.values()
    numbers = [text for text, (shown, _) in found.items() if shown == "23"]
    assert len(numbers) == 2 * 4    # of forward and backward on each rank, without chunks
    assert min(text.get_fontsize() for text in found) >= schedules.LEAST
    assert list(texts.problems()) == []


def test_texts_that_are_wrong_are_found(tmp_path, texts):
    """The checks above can fail."""
    run_file.write_run(limited(select_rows("weak", "3d")[0]), tmp_path, "weak")
    with style.figure_style():
        figure = roofline_and_memory.draw_roofline(read_folder(tmp_path).results[0])
        panel = figure.axes[0]
        for where in ((0.5, 0.5), (0.51, 0.5)):
            panel.text(*where, "1 $2$", transform=panel.transAxes)
        figure.savefig(tmp_path / "a.png")
    assert list(texts.problems()) == ["'1 $2$' is no plain text"] * 2 + [
        "'1 $2$' lies on '1 $2$'"]
