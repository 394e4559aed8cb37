"""What the figures show, and the files they become."""
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_rgba

from bench.__main__ import main
from bench.cases.case import make_case
from bench.cases.paper import TITLES
from bench.cases.selection import select_rows
from bench.document import Notes
from bench.records import run_file
from bench.records.folder import read_folder
from bench.reports import paper_tables
from bench.reports.figures import (against_ranks, every_figure, roofline_and_memory, style,
                                   time_shares, training)
from bench.reports.merit import merit_table
from mm3d.grid.axis import COLLECTIVES
from records import (PARTS, drawn, limited, made_up, matmul_record, traced, write_all,
                     write_rows)
from support import ROOT


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    write_all(folder)
    return read_folder(folder).results[0]


def test_published_beside_measured(results):
    published, measured, *strong = against_ranks.draw_step_times(results).axes
    lines = drawn(published)
    assert lines["3-D"] == [[8, 0.58], [64, 0.672]]
    assert lines["3-D, recomputed"] == [[64, pytest.approx(0.532, abs=5e-4)]]
    assert drawn(measured)["2-D"] == [[16, pytest.approx(0.005)], [36, pytest.approx(0.006)],
                                      [64, pytest.approx(0.007)]]
    for panel in (published, measured, *strong):
        assert panel.get_ylabel().endswith("(s)") and panel.get_legend()


def test_many_schemes_have_one_legend_that_says_which_are_not_published(tmp_path):
    write_rows(tmp_path, [*select_rows("weak", "3d"), *select_rows(
        "weak", "2.5d,faces,1d-sp", ranks=64)], made_up)
    results = read_folder(tmp_path).results[0]
    for draw in (against_ranks.draw_step_times, against_ranks.draw_scaling):
        figure = draw(results)
        assert not any(panel.get_legend() for panel in figure.axes)
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        assert len(labels) == len(set(labels)) >= 7 and "3-D" in labels
        assert {"2.5-D, not published", "Faces, not published"} <= set(labels)
    table = paper_tables.preset_parts(results)
    names = {line[0] for line in table[1].rows}
    assert {"3-D", "2.5-D, not published", "Faces, not published"} <= names
    assert paper_tables.NOT_PUBLISHED in [item for part in table if isinstance(part, Notes)
                                          for item in part.items]


def test_intervals_are_drawn(results):
    """Of three repetitions from 0.9 to 1.1 of the median, at each point."""
    measured = against_ranks.draw_step_times(results).axes[1]
    intervals = [line.get_ydata().tolist() for line in measured.lines
                 if line.get_label() == "_interval"]
    assert len(intervals) == 9
    medians = [y for points in drawn(measured).values() for _, y in points]
    assert sorted(intervals) == [[pytest.approx(0.9 * y), pytest.approx(1.1 * y)]
                                 for y in sorted(medians)]


def test_markers_are_the_medians_whose_intervals_are_drawn(tmp_path):
    """Forward and backward take turns in being slow: their medians do not add up to a step's."""
    slow, fast = [9.0] * 4, [0.1] * 4
    for row in select_rows("strong", "1d"):
        run = made_up(row, repetitions=9)
        for phase, times in (("forward", [*fast, 0.1, *slow]), ("backward", [*slow, 0.1, *fast])):
            run.samples[phase][:] = np.repeat(np.array(times)[:, None], row.gpus, 1)
        run_file.write_run(run, tmp_path, make_case(row, "laptop").name)
    results = read_folder(tmp_path).results[0]
    for draw, place in ((against_ranks.draw_step_times, 3), (against_ranks.draw_scaling, 1)):
        panel = draw(results).axes[place]
        bars = [sorted(line.get_ydata()) for line in panel.lines
                if line.get_label() == "_interval"]
        markers = [y for _, y in drawn(panel)["1-D"]]
        assert len(bars) == 4 and all(low <= y <= high for (low, high), y in zip(bars, markers))


def test_speed_up_and_efficiency(results):
    speed_up, measured, efficiency, weak = against_ranks.draw_scaling(results).axes
    lines = drawn(speed_up)
    # Published step times at 8 and 64, 0.515 and 0.359 s, and those of 1-D at 16.
    assert lines["3-D"] == [[8, 8], [64, pytest.approx(8 * 0.515 / 0.359, rel=2e-3)]]
    assert lines["1-D"][1] == [16, pytest.approx(8 * 0.597 / 0.544, rel=2e-3)]
    # The made-up averages of 1-D grow as 10, 11, 12, 13 in strong scaling.
    assert drawn(measured)["1-D"] == [[p, pytest.approx(8 * 10 / t)]
                                      for p, t in ((8, 10), (16, 11), (36, 12), (64, 13))]
    sizes = [make_case(row, "paper").sizes for row in select_rows("weak", "2d")]
    work = [24 * s.hidden ** 2 + 4 * s.seq * s.hidden for s in sizes]
    assert drawn(efficiency)["2-D"][2] == [64, pytest.approx(
        work[2] / work[0] / 4 * 0.708 / 1.052, rel=2e-3)]
    assert [p for p, _ in drawn(weak)["2-D"]] == [16, 36, 64]


def test_every_scheme_that_was_run_has_its_colour(tmp_path):
    write_rows(tmp_path, (select_rows("weak", "1d-sp", ranks=27)[0], select_rows("weak", "3d")[0]),
               made_up)
    published, measured, *_ = against_ranks.draw_step_times(read_folder(tmp_path).results[0]).axes
    colours = {line.get_label(): line.get_color() for line in measured.lines
               if not line.get_label().startswith("_")}
    assert colours.keys() == {"3-D", "1-D, sequence, not published"}
    assert len(set(colours.values())) == 2
    assert "1-D, sequence" not in drawn(published)
    assert len(set(against_ranks.STYLES.values())) == len(against_ranks.STYLES) == len(TITLES)


def test_closed_form_covers_the_ranks_between():
    runs = [made_up(row) for row in select_rows("strong", "2d")]
    assert [ranks for ranks, _ in against_ranks.closed_form_points(runs, "strong")] == [
        9, 16, 25, 36, 49, 64]
    weak = [made_up(row) for row in select_rows("weak", "2d")]
    assert [ranks for ranks, _ in against_ranks.closed_form_points(weak, "weak")] == [16, 36, 64]


def test_the_closed_form_at_measured_ranks_is_that_of_the_run():
    """Whatever the last run keeps or computes again."""
    runs = [made_up(row) for row in select_rows("strong", "3d")]
    runs[-1].configuration.update(recompute="full")
    first = runs[0].expected_words.sum() / runs[0].ranks / runs[0].configuration["batch"]
    assert dict(against_ranks.closed_form_points(runs, "strong"))[runs[0].ranks] == first


@pytest.mark.slow
def test_files_in_every_format_the_same_each_time(tmp_path, capsys):
    row = select_rows("weak", "3d")[1]
    run_file.write_run(made_up(row, oversubscribed=True), tmp_path, "weak")
    begin = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert main(["report", str(tmp_path), "--figures", "--figure-format", ",".join(begin)]) == 0
    said = capsys.readouterr().out
    files = {path.name: path.read_bytes() for form in begin for path in tmp_path.glob(f"*.{form}")}
    assert len(files) == 3 * sum(f"{name}-laptop.png" in files for name in every_figure.FIGURES)
    for name, content in files.items():
        assert name in said and content.startswith(begin[name[-3:]]) and len(content) > 10_000
    assert main(["report", str(tmp_path), "--figures", "--figure-format", "png,svg"]) == 0
    for path in tmp_path.glob("*.[ps][nv]g"):
        assert path.read_bytes() == files[path.name], path.name


def test_crowded_ranks_are_said_below(tmp_path):
    row = select_rows("weak", "3d")[1]
    run_file.write_run(made_up(row, oversubscribed=True), tmp_path, "weak")
    results = read_folder(tmp_path).results[0]
    for draw in (against_ranks.draw_step_times, against_ranks.draw_scaling):
        assert "up to 64 ranks on 32 cores, which take turns: not scaling results" in \
            draw(results).get_supxlabel()


@pytest.mark.slow
def test_a_presets_name_cannot_leave_the_folder(tmp_path):
    run = made_up(select_rows("weak", "3d")[0])
    run.configuration["preset"] = "../up $x_{"
    (tmp_path / "in").mkdir()
    run_file.write_run(run, tmp_path / "in", "weak")
    files, _ = every_figure.draw_figures(read_folder(tmp_path / "in"))
    assert {path.parent for path in files} == {tmp_path / "in"}
    assert "average-step-time-..-up--x_-.png" in {path.name for path in files}


def test_where_the_time_goes_is_stacked_to_the_whole(tmp_path):
    write_rows(tmp_path, select_rows("weak", "1d,3d")[:2], traced)
    figure = time_shares.draw_time_shares(read_folder(tmp_path).results[0])
    weak, strong = figure.axes
    assert [tick.get_text() for tick in weak.get_xticklabels()] == ["1-D\n8 ranks",
                                                                    "1-D\n16 ranks"]
    bars = {}
    for patch in weak.patches:
        bars.setdefault(round(patch.get_x(), 6), []).append(patch)
    assert len(bars) == 4    # two runs, two phases
    for parts in bars.values():
        assert [p.get_facecolor() for p in parts] == [to_rgba(c)
                                                      for c in time_shares.COLOURS.values()]
        assert [p.get_y() for p in parts[1:]] == pytest.approx(
            [p.get_y() + p.get_height() for p in parts[:-1]])
        assert parts[-1].get_y() + parts[-1].get_height() == pytest.approx(100)
    # Of 8 ranks the mean takes 1 + 7/16; what it lacks to the slowest, 1 + 7/8, is waiting.
    shares = {name: p.get_height() for name, p in zip(time_shares.COLOURS, min(bars.items())[1])}
    whole = len(PARTS) * (1 + 7 / 8)
    assert shares["x"] == pytest.approx(100 * len(COLLECTIVES) * (1 + 7 / 16) / whole)
    assert shares["waiting"] == pytest.approx(
        100 * (1 + 7 / 16 + len(PARTS) * (7 / 8 - 7 / 16)) / whole)
    assert "no results" in [text.get_text() for text in strong.texts]
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert labels >= {"waiting", "elementwise"}


def test_the_roofline_has_its_roofs_and_points(tmp_path):
    row = select_rows("weak", "3d")[0]
    run = limited(row)
    run_file.write_run(run, tmp_path, "weak")
    panel = roofline_and_memory.draw_roofline(read_folder(tmp_path).results[0]).axes[0]
    lines, roofs = {}, []
    for line in panel.lines:
        lines[line.get_label()] = line.get_xydata().tolist()
        roofs += [line.get_xydata().tolist()] if line.get_label() == "_roof" else []
    # 8 ranks take 10 ms (1 + k/8) in products, of 6e8 flop and 2e7 bytes a phase.
    rate = 2 * 8 * 6e8 / (2 * 8 * 0.01 * (1 + 7 / 16)) / 1e9
    assert lines["3-D"] == [[30, pytest.approx(rate)]]
    assert lines["_step"] == [[30, pytest.approx(against_ranks.step_rate(run) / 8 / 1e9)]]
    alone, together = roofs
    for roof, level, slope in ((alone, 200, 20), (together, 100, 10)):
        assert roof[1] == [10, level] and roof[2][1] == level
        assert roof[0][1] == pytest.approx(slope * roof[0][0])
    assert {text.get_text() for text in panel.texts} == {"8", "8 ranks", "one rank alone"}


def test_the_roof_of_memory_is_left_out_where_it_may_be_that_of_the_caches(tmp_path):
    run = limited(select_rows("weak", "3d")[0])
    del run.groups["machine"].variables["memory_arrays"]    # as in files of before
    run_file.write_run(run, tmp_path, "weak")
    panel = roofline_and_memory.draw_roofline(read_folder(tmp_path).results[0]).axes[0]
    lines = {line.get_label(): line.get_ydata().tolist() for line in panel.lines}
    assert lines["_roof"] == [100, 100, 100] and lines["3-D"]


def test_memory_is_that_of_the_rank_with_the_most(tmp_path):
    run_file.write_run(limited(select_rows("strong", "2d")[0]), tmp_path, "strong")
    kept, peak = roofline_and_memory.draw_memory(read_folder(tmp_path).results[0]).axes[2:]
    assert drawn(kept)["2-D"] == [[16, 1 + 2 + 3]] and drawn(peak)["2-D"] == [[16, 4]]
    forms = [line.get_xydata().tolist() for panel in (kept, peak) for line in panel.lines
             if line.get_label() == "_closed form"]
    assert forms == [[[16, 3]], [[16, 1]]]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("lacking", ["parts", "machine", "memory"])
def test_what_was_not_recorded_leaves_its_figure_out(tmp_path, lacking):
    run = limited(select_rows("weak", "3d")[0])
    del run.groups[lacking]
    run_file.write_run(run, tmp_path, "weak")
    _, left_out = every_figure.draw_figures(read_folder(tmp_path), names="where,roofline,memory")
    named = {"parts": {"where-the-time-goes-laptop", "roofline-laptop"},
             "machine": {"roofline-laptop"}, "memory": {"memory-per-rank-laptop"}}
    assert {str(why).partition(":")[0] for why in left_out} == named[lacking]


def test_the_overview_has_what_was_recorded_and_dashes_for_the_rest():
    row = select_rows("weak", "3d")[0]
    run = limited(row, peak=1e6)
    table = merit_table("Table 1", [(row, run), (row, made_up(row))])
    full, old = ([str(cell) for cell in line] for line in table.rows)
    assert full[:2] == old[:2] == ["3-D", "8"] and full[2:4] == old[2:4]
    sizes = make_case(row, "laptop").sizes
    assert float(table.rows[0][2].value) == pytest.approx(sizes.batch * sizes.seq / 0.75)
    useful, share = (cell.value for cell in table.rows[0][3:5])
    assert share == pytest.approx(100 * useful * 1e9 / 1e6)
    # Two phases in which rank k moves k words.
    assert table.rows[0][5].value == table.rows[0][6].value == pytest.approx(2 * 3.5e-6)
    assert full[10:] == ["4.00", "1.00"] and old[4] == "-" and old[10:] == ["-", "-"]
    assert full[8:10] == ["not recorded", "-"]


def test_no_marker_touches_the_upper_edge(results):
    for draw in (against_ranks.draw_step_times, against_ranks.draw_words):
        for panel in draw(results).axes:
            highest = max(max(line.get_ydata()) for line in panel.lines
                          if len(line.get_ydata()))
            assert panel.get_ylim()[0] == 0 and panel.get_ylim()[1] > 1.05 * highest


def test_zeros_alone_have_an_axis_without_a_warning(recwarn):
    panel = style.make_figure(1, 1, (4, 4), "")[1][0, 0]
    against_ranks.draw_line(panel, "3d", [(8, 0.0), (64, 0.0)])
    style.start_at_zero(panel)
    assert panel.get_ylim() == (0, 1) and not recwarn.list


def test_microbenchmarks_alone_have_no_figures(tmp_path, capsys):
    run_file.write_run(matmul_record(), tmp_path, "matmul")
    (tmp_path / "cut.h5").write_bytes(b"no more")
    assert main(["report", str(tmp_path), "--figures"]) == 1    # for the file alone
    said = capsys.readouterr()
    assert said.out == "not drawn: all figures: nothing was measured that has one\n"
    assert said.err.startswith(f"left out: {tmp_path}/cut.h5 is truncated")
    assert not list(tmp_path.glob("*.png"))


def test_trainings_that_are_compared_differ_in_nothing_else():
    [path] = (ROOT / "results/experts/balance").glob("*.h5")
    first = run_file.read_run(path)
    other, third = (replace(first, configuration=first.configuration | {
        "experts_balance": 0.5, "dropout": dropout}) for dropout in (0.0, 0.1))
    assert training.comparable_trainings([first, other, third]) == sorted(
        [first, other], key=training.balance_of)
    assert training.comparable_trainings([first, third]) == []


def test_each_beginning_of_a_name_is_that_of_a_figure(tmp_path, capsys):
    """One that is none is refused, also beside another, and an empty one names no figure."""
    run_file.write_run(made_up(select_rows("weak", "3d")[0]), tmp_path, "weak")
    assert main(["report", str(tmp_path), "--figures", "Roof,"]) == 0
    assert capsys.readouterr().out.startswith("not drawn: roofline-laptop: ")
    assert main(["report", str(tmp_path), "--figures", "roof,dome"]) == 2
    assert "--figures dome: no figure's name begins so; there is average-step-time-laptop, " in (
        capsys.readouterr().err)
