"""The figure of an emulated cluster beside what was published."""
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from bench.__main__ import main
from bench.cases.selection import select_rows
from bench.records import run_file
from bench.records.folder import read_folder
from bench.reports.emulated import of_run
from bench.reports.figures import emulation, every_figure, style
from records import drawn, emulated_run, made_up

SECONDS = {"1d": 30.0, "2d": 120.0, "3d": 60.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of all rows, with neither stored predictions nor times of software for half of them."""
    folder = tmp_path_factory.mktemp("results")
    for row in (row for table in ("weak", "strong") for row in select_rows(table)):
        run = emulated_run(row, SECONDS[row.scheme] * (1 + row.gpus / 64))
        if row.table == "weak":
            for name in ("predicted", "software"):
                run.groups.pop(name)
        run_file.write_run(run, folder, f"{row.table}-{row.scheme}-{row.gpus}")
    return folder


@pytest.fixture(scope="module")
def results(folder):
    return read_folder(folder).results[0]


@pytest.fixture(scope="module")
def figure(results):
    return emulation.draw_emulated(results)


@pytest.fixture(scope="module")
def panels(figure):
    """A row of three for each table."""
    return np.array(figure.axes).reshape(2, 3)


def test_seconds_are_at_the_machines_scale_beside_published_ones_and_words(
        results, figure, panels):
    assert "real messages, modelled arithmetic" in figure.get_suptitle()
    for line, table in zip(panels, ("weak", "strong")):
        rows = select_rows(table, "2d")
        runs = [results.get(row) for row in rows]
        found = [drawn(panel)["2-D"] for panel in line]
        expected = [[row.recomputed for row in rows],
                    [of_run(row, run).average for row, run in zip(rows, runs)],
                    [run.traffic["words"].sum() / run.ranks / run.configuration["batch"]
                     for run in runs]]
        for points, values in zip(found, expected):
            assert points == [[row.gpus, pytest.approx(value)] for row, value in zip(rows, values)]


def test_axes_of_a_row_are_of_one_kind_and_span_one_ratio(panels):
    for line in panels:
        limits = [panel.get_ylim() for panel in line]
        assert len({round(high / low, 6) for low, high in limits}) == 1
        assert {panel.get_yscale() for panel in line} == {"log"}
        for panel, (low, high) in zip(line, limits):
            values = [y for one in panel.lines for y in one.get_ydata()]
            assert low < min(values) and max(values) < high


def test_labels_are_the_ratios_of_the_tables_and_are_marked_like_them(panels):
    """Batches of 30 or 12, and 384 or 24, sequences: 1-D takes 30 / 60 of the time a step."""
    texts = [{text.get_text() for text in panel.texts} for panel in panels[:, 1]]
    assert texts == [{"1-D 6.4x*", "2-D 2.0x*", "3-D"}, {"1-D 1.0x", "2-D 2.0x", "3-D"}]


def test_open_markers_are_of_rows_above_the_bound_of_software(results, figure, panels):
    """In weak scaling no software was timed; in strong scaling it takes its share or less."""
    def opened(panel):
        return sorted((x, y) for line in panel.lines if line.get_markerfacecolor() == "white"
                      for x, y in line.get_xydata())
    assert np.array(opened(panels[0, 1])) == pytest.approx(np.array(sorted(
        (row.gpus, of_run(row, results.get(row)).average) for row in select_rows("weak"))))
    assert [len(opened(panel)) for panel in panels.flat] == [0, 9, 0, 0, 0, 0]
    assert figure.get_supxlabel().endswith("Open markers and *: software above 25 % of a step, or "
                                           "unknown, not to be quoted.")


def test_the_bound_is_named_where_rows_are_above_it_and_nothing_else(results):
    results, key = deepcopy(results), ("strong", "1d", 16)
    for other in [other for other in results.runs if other[0] == "weak"]:
        del results.runs[other]
    figure = emulation.draw_emulated(results)
    assert "quoted" not in figure.get_supxlabel()
    run = results.runs[key]
    results.runs[key] = replace(run, configuration=run.configuration | {"software_share": 1e-4})
    figure = emulation.draw_emulated(results)
    assert figure.get_supxlabel().endswith(
        "Open markers: software above 0.01 % of a step, not to be quoted.")    # no star
    assert [line.get_xdata().tolist() for line in figure.axes[4].lines
            if line.get_markerfacecolor() == "white"] == [[16]]


def test_labels_that_have_no_room_are_left_out(results):
    """Of values so close together that each would lie on another."""
    results = deepcopy(results)
    for key, run in results.runs.items():
        for phase in run.samples:
            run.samples[phase][:] = run.configuration["batch"] * (1 + 1e-3 * (key[1] == "1d"))
    with style.figure_style():
        figure = emulation.draw_emulated(results)
        figure.draw_without_rendering()
        panel = figure.axes[4]
        boxes = [text.get_window_extent().extents for text in panel.texts]
    assert boxes
    for k, one in enumerate(boxes):
        for other in boxes[:k]:
            assert one[1] >= other[3] or other[1] >= one[3]


def test_it_stands_in_for_speed_ups_where_work_was_waited_for(folder, tmp_path):
    names = {one.name.partition("-emulated")[0] for one in every_figure.make_row_drawings(
        read_folder(folder))}
    assert "scaling" in names and "speed-up-and-efficiency" not in names
    run_file.write_run(made_up(select_rows("weak", "3d")[0]), tmp_path, "weak")
    names = {one.name for one in every_figure.make_row_drawings(read_folder(tmp_path))}
    assert "speed-up-and-efficiency-laptop" in names and "scaling-laptop" not in names


def test_rows_of_several_scales_are_left_out_with_the_reason(results):
    key, results = ("weak", "3d", 64), deepcopy(results)
    run = results.runs[key]
    results.runs[key] = replace(run, configuration=run.configuration | {"waited_scale": 8.0})
    with pytest.raises(style.NoFigure, match="2 clusters, machines or scales: one would do"):
        emulation.draw_emulated(results)


def test_a_figure_for_a_talk_says_what_the_tables_say(results):
    """Published beside emulated; its message claims only what may be quoted."""
    rows = emulation.comparable_rows(results)
    found = emulation.compared_on_most(rows)
    assert [(one.slow.row.table, one.over, one.slow.row.gpus, round(one.found.ratio, 1),
             one.quotable) for one in found] == [
        ("weak", "1-D", 64, 6.4, False), ("weak", "2-D", 64, 2.0, False),
        ("strong", "1-D", 64, 1.0, True), ("strong", "2-D", 64, 2.0, True)]
    assert emulation.message(found) == "3-D beside other schemes on 64 ranks"
    strong = found[2:]
    assert emulation.message(strong) == "On 64 ranks 3-D is faster than 2-D, as published"
    sure = [replace(one, found=replace(one.found, low=1.01)) for one in strong]
    assert emulation.message(sure) == (
        "On 64 ranks 3-D is faster than 1-D and 2-D, as published")
    assert emulation.message([replace(one, published=0.9) for one in sure]).endswith("2-D")
    with style.figure_style():
        figure = emulation.draw_talk(results)
    figure.draw_without_rendering()
    assert figure.get_size_inches().tolist() == [16, 9]
    (panel,) = figure.axes
    assert {text.get_text() for text in panel.texts} >= {"6.40*", "2.00*", "2.00", "1.38"}
    assert min(text.get_fontsize() for text in [*panel.texts, *panel.get_yticklabels()]) >= 20


def test_report_draws_the_figures_for_a_talk_alone(folder, tmp_path, capsys):
    assert main(["report", str(folder), "--figures", "--talk"]) == 0
    assert capsys.readouterr().out == f"{folder}/talk-emulated-waited-work.png\n"
    (folder / "talk-emulated-waited-work.png").unlink()
