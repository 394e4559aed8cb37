"""A rank that waits for its work moves what its dry run counts, and sleeps what the model says."""
import sys
import time

import pytest

import mm3d
from mm3d.tracing import dry_run
from mm3d.tracing.events import Gemm, PHASES, Pass
from mm3d.tracing.waited_work import WorkClock, waited_work

SIZES = dict(layers=1, hidden=48, heads=8, batch=8, seq=6)
CHOICES = {1: [("serial", {})],
           8: [("3d", {}), ("1d", {}), ("1d-sp", {}), ("3d", {"overlap": True})]}


def seconds(event) -> float:
    """Some machine."""
    return event.flops * 1e-9 if isinstance(event, Gemm) else event.bytes * 1e-10


def modelled(trace) -> float:
    return sum(times * seconds(event) for (phase, _, event), times in trace.events.items()
               if phase in PHASES and isinstance(event, (Gemm, Pass)))


@pytest.mark.ranks(1, 8)
@pytest.mark.parametrize("transport", ["mpi", "shared"])
def test_words_and_seconds_are_those_of_the_dry_run(comm, monkeypatch, transport):
    monkeypatch.setenv("MM3D_TRANSPORT", transport)
    for name, options in CHOICES[comm.size]:
        scheme = mm3d.scheme(name, comm, **options)
        grid, own = scheme.grid, scheme.grid.backend
        trace = dry_run.trace_step(name, comm.size, rank=comm.rank, options=options, **SIZES)
        with waited_work(grid, seconds, sys.maxsize) as backend:
            model = mm3d.Transformer(scheme, **SIZES)
            x, dy = model.random("input"), model.random("output gradient")
            for phase, step in (("forward", lambda: model.forward(x)),
                                ("backward", lambda: model.backward(dy, result[1]))):
                grid.reset_traffic()
                before = backend.trace.counted
                result = step()
                assert grid.traffic() == trace.traffic[phase]
                if phase == "forward":
                    first = before
            backend.synchronize()
        assert backend.trace.counted - first == pytest.approx(modelled(trace), rel=1e-9)
        assert backend.trace.slept >= backend.trace.counted
        assert grid.backend is own and all(
            axis.backend is own and axis.transport.name in ("mpi", transport)
            and type(axis.transport).__name__ != "WaitingTransport" for axis in grid.axes.values())
        grid.free()


def test_an_oversleep_is_carried_over(monkeypatch):
    """Sleeps that last 3 ms too long make later ones shorter, and the sum right."""
    now, asked = [0.0], []

    def sleep(length: float) -> None:
        asked.append(length)
        now[0] += length + 0.003
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = WorkClock(lambda event: 0.01)
    for _ in range(5):
        clock.count_event(Pass("add", 1))
        clock.settle()
    assert asked == pytest.approx([0.01, 0.007, 0.007, 0.007, 0.007])
    assert clock.counted == pytest.approx(0.05) and clock.slept == pytest.approx(0.053)


def test_a_product_in_parts_lets_collectives_go_on():
    clock, calls = WorkClock(lambda event: 0.002), []
    clock.count_event(Pass("add", 1))
    clock.settle_in_parts(lambda: calls.append(clock.slept))
    assert len(calls) == 8 and calls == sorted(calls) and clock.slept >= 0.002


def test_collectives_go_on_while_other_work_is_waited_for():
    """In as many sleeps as have a millisecond, up to 8; only within a pass with overlap."""
    for seconds, sleeps in ((0.0004, 1), (0.0035, 4), (0.02, 8)):
        clock, calls = WorkClock(lambda event: seconds), []
        clock.between_sleeps = lambda: calls.append(clock.slept)
        clock.count_event(Pass("add", 1))
        clock.settle()
        assert len(calls) in range(1, sleeps + 1) and clock.slept >= seconds
        clock.between_sleeps = None
        clock.count_event(Pass("add", 1))
        clock.settle()
        assert len(calls) in range(1, sleeps + 1)
