"""Tables and picture of schemes at several rates of links."""
import math
from dataclasses import replace

import numpy as np
import pytest

from bench.__main__ import main
from bench.cases.paper import load_tables
from bench.document import Table
from bench.records import run_file, schema
from bench.records.kinds import sweep
from bench.records.measurements import Check, Measurements, Variable
from bench.records.at_rates import join_rates
from bench.reports.figures import link_sweep as figures
from bench.reports.figures.style import NoFigure, NotDrawn
from records import emulated_run, format_record

LINKS = [5e7, 2e8, math.inf]
PLANS = ["1d 4 x 24", "3d 2x2x1 zyx 24", "3d 2x2x1 zxy 12"]


@pytest.fixture
def record():
    """1-D takes 8, 2 and 1 seconds, 3-D 4, 3 and 2 of batch 24: they cross once."""
    samples = np.zeros((3, 3, 2, 3))
    samples[0] = np.array([4, 1, 0.5])[:, None, None]
    samples[1:] = np.array([2, 1.5, 1])[:, None, None]
    return Measurements(
        "sweep", {"table": "weak", "preset": "tiny", "layers": 1, "hidden": 16, "heads": 4,
                  "seq": 8, "dtype": "float32", "recompute": "none", "work": "wait",
                  "waited_machine": "longhorn", "waited_scale": 1600.0, "waited_shrink": 64.0},
        {"emulated_cluster": "2x2:50Mbit", "ranks": 4, "cores": 2},
        {"plan": PLANS, "link": LINKS, "phase": ["forward", "backward"], "repetition": range(3),
         "kind": ["work", "links"]},
        {"predicted": Variable(np.broadcast_to(
            np.array([[0.25, 3.0], [0.25, 0.75], [0.25, 0.0]])[:, None], (3, 3, 2, 2)), "s",
            ("plan", "link", "phase", "kind")),
         "software": Variable(np.full((3, 3), 0.1), "s", ("plan", "link")),
         "samples": Variable(samples, "s", ("plan", "link", "phase", "repetition")),
         "work": Variable(np.full((3, 2), 0.25), "s", ("plan", "phase"))},
        [Check("output", 0.0, 1e-5)])


def test_crossings():
    one, other = np.array([8.0, 2.0, 1.0]), np.array([4.0, 4.0, 4.0])
    assert sweep.crossing_rates(LINKS, one, other) == [pytest.approx(1e8)]
    assert sweep.crossing_rates(LINKS, [1, 2, 4], [2, 3, 3]) == [math.inf]
    assert sweep.crossing_rates(LINKS, [1, 2, 3], [2, 3, 4]) == []


def test_tables(record):
    text = format_record(record)
    assert "weak scaling, 1 layer: emulated cluster, 2 nodes x 2 ranks" in text
    assert "Fewer than six repetitions give no 95 % interval." in " ".join(text.split())
    curves = sweep.read_curves(record)
    [(rate, slow, fast)] = sweep.list_crossovers(record, curves)
    assert 5e7 < rate < 2e8 and (slow.plan.label, fast.plan.label) == (PLANS[1], PLANS[0])
    assert ("1-D 4, batch 24 overtakes 3-D 2 x 2 x 1, x inside, batch 24 from 120 Mbit/s on."
            in " ".join(text.split()))
    assert "50 Mbit/s 3-D 2 x 2 x 1, x inside; 200 Mbit/s to unlimited 1-D 4." in " ".join(
        text.split())
    assert curves[0].work == pytest.approx(0.5 / 24)
    for one in curves:
        assert one.plan.batch * one.predicted == pytest.approx([6.5, 2.0, 0.5])
    row = next(line for line in text.splitlines() if "1-D 4" in line and "-19%" in line)
    assert row.split()[-2:] == ["6%", "1%"]    # of 8 seconds half a one is work, a tenth software


def test_what_overlap_hides(record):
    """Of 4 seconds, half of it work, 1.5 s are hidden of 2 that could be."""
    values = record.variables["samples"].values.copy()
    values[1], values[2] = 2, 1.25
    found = replace(
        record, scales=record.scales | {"plan": [PLANS[0], PLANS[1], PLANS[1] + " overlap=4"]},
        raw={"samples": replace(record.variables["samples"], values=values),
             "work": Variable(np.full((3, 2), 1.0), "s", ("plan", "phase"))})
    [table] = hidden_tables(found)
    assert [cell if isinstance(cell, str) else cell.text for cell in table.rows[0]] == [
        "3-D 2 x 2 x 1, x inside, overlap 4, batch 24", "50 Mbit/s", "50%", "75%", "1.60"]
    assert len(table.rows) == 3 and not hidden_tables(record)


def hidden_tables(record):
    return [part for part in sweep.tables([record]) if isinstance(part, Table)
            and part.title.endswith("what overlap hides")]


def test_sweeps_without_predictions_show_none(record):
    """Nothing is computed afterwards that was not stored before."""
    old = replace(record, raw={name: record.variables[name] for name in ("samples", "work")})
    assert all(np.isnan(one.predicted).all() for one in sweep.read_curves(old))
    assert "nan" not in format_record(old)


def changed(record, at: int, environment=(), **configuration):
    """The record of a sweep with other settings, made `at` so many seconds after it."""
    created = f"2026-11-23T07:00:{at:02d}.000000+00:00"
    return replace(record, configuration=record.configuration | configuration,
                   environment=record.environment | dict(environment), created=created)


def test_pictures_are_of_tables_that_were_measured_alike(record):
    """Those of another cluster, or with overlap, are apart."""
    strong, overlapped, apart, other = (
        changed(record, 1, table="strong"), changed(record, 2, overlap=True),
        changed(record, 3, {"emulated_cluster": "4x1:50Mbit"}), replace(record, kind="matmul"))
    groups = figures.group_sweeps([record, strong, overlapped, apart, other])
    assert groups == [[record, strong], [overlapped], [apart]]
    assert list(map(figures.picture_name, groups)) == [
        "where-each-is-fastest-weak-strong-p004-tiny",
        "where-each-is-fastest-weak-p004-tiny-overlap", "where-each-is-fastest-weak-p004-tiny"]
    names = [one.name for one in figures.make_sweep_drawings([record, apart])]
    assert names == ["where-each-is-fastest-weak-p004-tiny",
                     "where-each-is-fastest-weak-p004-tiny-2"]


def test_crossings_at_one_place_share_a_mark(record):
    """Without a limit one plan overtakes two others."""
    values = record.variables["samples"].values.copy()
    values[0], values[1:] = np.array([4, 3, 0.5])[:, None, None], 1
    three = record.scales | {"plan": [PLANS[0], PLANS[1], "3d 2x2x1 zxy 24"]}
    figure = figures.draw_sweeps([replace(record, scales=three, raw=record.raw | {
        "samples": replace(record.variables["samples"], values=values)})])
    assert [text.get_text() for text in figure.axes[0].texts] == ["1, 2"]


def test_plot_draws_the_picture(record, tmp_path):
    run_file.write_run(record, tmp_path, "links-weak")
    assert main(["report", str(tmp_path), "--figures"]) == 0
    [picture] = tmp_path.glob("*.png")
    assert picture.name == "where-each-is-fastest-weak-p004-tiny.png"


def rows_at(*links, scheme="3d", order="zyx", slowed=1.0, **settings):
    """Made-up rows of 8 ranks at these rates, slower by 1 s with each."""
    row = next(row for row in load_tables().rows if row.key == ("strong", scheme, 8))
    for number, link in enumerate(links, 1):
        run = emulated_run(row, 3.0 * number, slowed)
        run.configuration.update(placement=order, **settings)
        run.environment["emulated_cluster"] = f"4x2:{link}"
        yield run


@pytest.mark.parametrize("why, status", [(NoFigure("no results"), 0), (NotDrawn("no room"), 1)])
def test_a_picture_of_rates_that_cannot_be_drawn_is_a_failure(tmp_path, monkeypatch, capsys, why,
                                                              status):
    def fails(*given, **more):
        raise why
    monkeypatch.setattr("bench.reports.figures.style.draw_image", fails)
    for number, run in enumerate(rows_at("unlimited", "50Mbit")):
        run_file.write_run(run, tmp_path, f"row-{number}")
    assert figures.show_rates(tmp_path, lambda parts: None) == status
    assert f"not drawn: where-each-is-fastest-strong-p008-emulated: {why}" in (
        capsys.readouterr()[status])    # on standard error if it fails


def test_rows_at_several_rates_are_joined():
    """Those of other waits, or other rates, are apart, and one that lacks a placement is none."""
    rows = [*rows_at("unlimited", "50Mbit", slowed=1.5),
            *rows_at("50Mbit", "unlimited", scheme="1d", order="x", batch=24),
            *rows_at("50Mbit", "20Mbit", order="xyz"), *rows_at("50Mbit", order="yxz"),
            *rows_at("50Mbit", "20Mbit", order="zxy", waited_scale=7.0),
            *rows_at("50Mbit", "20Mbit", order="")]
    joined = join_rates(rows)
    assert [one.scales["plan"] for one in joined] == [
        ["1d 8 x 24", "3d 2x2x2 zyx 24"], ["3d 2x2x2 xyz 24"], ["3d 2x2x2 zxy 24"]]
    for one in joined:
        schema.check_group("sweep", one.scales, one.variables)
    first = joined[0]
    assert first.scales["link"] == (5e7, math.inf)
    own, cube = sweep.read_curves(first)
    assert cube.medians == pytest.approx(np.array([6.0, 3.0]) / 1.5 / 24)
    assert cube.software == pytest.approx(0.1 / 1.5 / 24)
    assert own.software == pytest.approx(0.1 / 24)
    assert cube.predicted == pytest.approx(1.0 / 24)
    text = " ".join(format_record(first).split())
    assert "overtakes" in text and "4 rows, measured one after the other" in text
    assert "has that machine's ratio" not in text


def test_a_picture_says_the_share_of_software_and_its_bound_at_each_rate():
    """Each rate has its own; markers of rows above it are open."""
    rows = [*rows_at("50Mbit", software_share=0.02), *rows_at("unlimited", software_share=0.25)]
    [record] = join_rates(rows)
    figure = figures.draw_sweeps([record])
    (panel,) = figure.axes
    assert [text.get_text() for text in panel.get_xticklabels()] == [
        "50 Mbit/s\nsoftware 3 %\nallowed 2 %", "unlimited\nsoftware 3 %\nallowed 25 %"]
    (above,) = [line for line in panel.lines if line.get_markerfacecolor() == "white"]
    assert above.get_xdata().tolist() == [5e7]
    assert "(open markers: more)" in figure.get_supxlabel()
    assert all(np.isnan(one.bound).all() for one in sweep.read_curves(join_rates(
        rows_at("50Mbit", "unlimited", software_share=0.0))[0]))


def test_rows_with_fewer_repetitions_than_others():
    """Nothing is invented for those that they lack."""
    long, short = rows_at("50Mbit", "20Mbit")
    short.scales["repetition"] = range(2)
    for name, variable in short.raw.items():
        short.raw[name] = replace(variable, values=variable.values[:2])
    [record] = join_rates([long, short])
    [curve] = sweep.read_curves(record)
    assert np.isnan(curve.seconds).sum() == 1 and not np.isnan(curve.medians).any()
    assert "nan" not in format_record(record) and figures.draw_sweeps([record])
