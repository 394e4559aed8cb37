"""Tables and picture of schemes at several rates of links."""
import math

import numpy as np
import pytest

from bench.reports import link_sweep
from bench.reports.figures.link_sweep import draw_sweep
from bench.reports.formats import render
from bench.records.measurements import Measurements, Variable

LINKS = [5e7, 2e8, math.inf]
PLANS = ["1d 4 x 24", "3d 2x2x1 zyx 24", "3d 2x2x1 zxy 12"]


@pytest.fixture
def record():
    """1-D takes 8, 2 and 1 seconds, 3-D 4, 3 and 2 of batch 24: they cross once."""
    samples = np.zeros((3, 3, 2, 3))
    samples[0] = np.array([4, 1, 0.5])[:, None, None]
    samples[1:] = np.array([2, 1.5, 1])[:, None, None]
    return Measurements(
        "sweep", {"table": "weak", "layers": 1, "hidden": 16, "heads": 4, "seq": 8,
                  "dtype": "float32", "recompute": "none", "work": "wait",
                  "waited_machine": "longhorn", "waited_scale": 1600.0, "waited_shrink": 64.0},
        {"emulated_cluster": "2x2:50Mbit", "ranks": 4, "cores": 2},
        {"plan": PLANS, "link": LINKS, "phase": ["forward", "backward"], "repetition": range(3)},
        {"samples": Variable(samples, "s", ("plan", "link", "phase", "repetition")),
         "work": Variable(np.full((3, 2), 0.25), "s", ("plan", "phase"))}, [])


def test_crossings():
    one, other = np.array([8.0, 2.0, 1.0]), np.array([4.0, 4.0, 4.0])
    assert link_sweep.crossing_rates(LINKS, one, other) == [pytest.approx(1e8)]
    assert link_sweep.crossing_rates(LINKS, [1, 2, 4], [2, 3, 3]) == [math.inf]
    assert link_sweep.crossing_rates(LINKS, [1, 2, 3], [2, 3, 4]) == []


def test_tables(record):
    text = render(link_sweep.sweep_parts([record]))
    curves = link_sweep.read_curves(record)
    [(rate, slow, fast)] = link_sweep.list_crossovers(record, curves)
    assert 5e7 < rate < 2e8 and (slow.label, fast.label) == (PLANS[1], PLANS[0])
    assert ("1-D 4, batch 24 overtakes 3-D 2 x 2 x 1, x inside, batch 24 from 120 Mbit/s on."
            in " ".join(text.split()))
    assert "50 Mbit/s 3-D 2 x 2 x 1, x inside; 200 Mbit/s to unlimited 1-D 4." in " ".join(
        text.split())
    assert curves[0].work == pytest.approx(0.5 / 24)
    assert all((np.diff(one.predicted) < 0).all() for one in curves)


def test_predictions_know_the_placement(record):
    """The words along x and along y differ, so it matters which of them stays in a node."""
    inside_x, inside_y = (link_sweep.predict_links(record, f"3d 4x2x1 {order} 24")
                          for order in ("zyx", "zxy"))
    assert (abs(inside_x[:2] / inside_y[:2] - 1) > 0.02).all()


@pytest.mark.slow
def test_picture(record, tmp_path):
    assert draw_sweep(tmp_path / "sweep.png", [record, record]).stat().st_size > 10 ** 4
