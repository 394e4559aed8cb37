"""Seconds of an operation: by what was measured of it, or by the figures of the machine."""
import numpy as np
import pytest
from msgspec.structs import replace

from bench.prediction.calibration import fit, operations_alone
from bench.prediction.machine_model import Curve, Line, load_machine
from bench.prediction.seconds import collective_terms, gemm_seconds, pass_seconds
from mm3d.grid.grid import Grid
from mm3d.tracing.events import Collective, Gemm, MemoryPass
from mm3d.tracing.observe import observed
from mm3d.tracing.trace import Trace

CPU = load_machine("cpu")
CURVE = Curve([100.0, 1000.0], [1e-6, 1e-5])


def test_a_curve_is_a_power_law_between_what_was_measured():
    assert CURVE.at(1) == CURVE.at(100) == pytest.approx(1e-6)
    assert CURVE.at(100 * 10 ** 0.5) == pytest.approx(1e-6 * 10 ** 0.5)


def test_a_curve_goes_on_as_a_straight_line():
    """Through the last size and one of a quarter or less; at the rate where that line falls."""
    def beyond(*seconds):
        return Curve([100.0, 400.0, 800.0][-len(seconds):], list(seconds)).at(1600)

    assert CURVE.at(5000) == pytest.approx(5e-5)
    assert beyond(2.0, 99.0, 9.0) == pytest.approx(9 + 7 * 800 / 700)
    assert beyond(20.0, 5.0, 10.0) == beyond(10.0) == 20


def test_measured_curves_are_used_where_there_are_some():
    event, other = (Collective("all_gather", "x", size, 4, 1000) for size in (2, 4))
    changed = replace(CPU, collectives=[Line("all_gather", 2, 4, 1e-6, 1e-9, CURVE)],
                      passes={"exp": CURVE, "other": CURVE})
    assert collective_terms(changed, event) == {"node": pytest.approx(1e-5), "latency": 0}
    assert collective_terms(changed, other) == collective_terms(CPU, other)
    assert pass_seconds(changed, MemoryPass("exp", 100)) == pytest.approx(1e-6)
    assert pass_seconds(changed, MemoryPass("add", 1000)) == pytest.approx(1e-5)
    assert pass_seconds(CPU, MemoryPass("exp", 100)) == 100 / CPU.memory_bandwidth


def test_columns_cost_what_was_measured_of_columns():
    """Or what rows do where nothing else is known."""
    rows = Line("reduce_scatter", 2, 1, 0, 0, CURVE)
    columns = replace(rows, curve=Curve(CURVE.bytes, [3e-6, 3e-5]), pieces=True)

    def seconds(lines, pieces):
        event = Collective("reduce_scatter", "x", 2, 1, 1000, pieces)
        return collective_terms(replace(CPU, collectives=lines), event)["node"]

    assert seconds([rows, columns], True) == pytest.approx(3 * seconds([rows, columns], False))
    assert seconds([rows], True) == seconds([rows], False) == seconds([columns, rows], False)


@pytest.mark.parametrize("dim, pieces", [(0, False), (1, True), (-1, True)])
@pytest.mark.ranks(2)
def test_what_travels_in_pieces_is_told(comm, dim, pieces):
    """Blocks of rows are in one piece each, blocks of columns are not; one row is."""
    grid = Grid(comm, "numpy", x=2)
    for shape, expected in (((4, 6), pieces), ((1, 6), False)):
        trace = Trace()
        with observed(grid, trace):
            if shape[dim] > 1:
                grid["x"].reduce_scatter(np.ones(shape), dim)
                grid["x"].all_gather(np.ones(shape), dim)
        assert {event.pieces for _, _, event in trace.events} <= {expected}
        assert len(trace.events) == 2 * (shape[dim] > 1)


def test_products_cost_what_products_of_like_shape_did():
    """Nearly, where one was measured; halfway between two as their mean; far from all as the
    figures say."""
    close = replace(CPU, gemm_deviations={"64x512x64": 1.5, "64x2048x64": 0.9})

    def longer(*edges):
        gemm = Gemm(1, *edges, "float32")
        return gemm_seconds(close, gemm) / gemm_seconds(CPU, gemm)

    assert 1.3 < longer(64, 512, 64) < 1.5 and 0.9 < longer(64, 2048, 64) < 0.95
    assert longer(65, 512, 64) == pytest.approx(longer(64, 512, 64), rel=0.01)
    assert longer(64, 1024, 64) == pytest.approx((1.5 * 0.9) ** 0.5, rel=0.05)
    assert longer(10**6, 1, 10**6) == pytest.approx(1)


def test_ranks_wait_where_they_meet_between_work():
    """An all-reduce meets twice; of sizes that were not measured nothing is known."""
    def waits(kind, size):
        machine = replace(CPU, collectives=[Line(kind, size, 1, 0, 0, CURVE)],
                          waiting={2: 1e-4, 8: 3e-4})
        return collective_terms(machine, Collective(kind, "x", size, 1, 9))["latency"]

    assert waits("all_gather", 2) == 1e-4 and waits("reduce", 8) == 3e-4
    assert waits("all_reduce", 8) == 6e-4 and waits("broadcast", 4) == 0


def test_deviations_are_what_was_measured_over_the_fit():
    rng = np.random.default_rng(0)
    times = {shape: (1e-5 + 2e-11 * np.prod(shape)) * rng.uniform(0.8, 1.25)
             for shape in operations_alone.SHAPES}
    found = fit.fit_products(times)
    machine = replace(CPU, gemm_rate={"float32": found.rate}, gemm_half_size=found.half,
                      gemm_seconds=found.start, memory_bandwidth=1e15)
    for shape, seconds in times.items():
        ratio = seconds / gemm_seconds(machine, Gemm(1, *shape, "float32"))
        assert found.deviations["x".join(map(str, shape))] == pytest.approx(ratio)
