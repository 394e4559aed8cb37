"""A rank that waits for its work moves what its dry run counts, and sleeps what the model says."""
import sys

import pytest

import mm3d
from bench.instruments.waited_work import WorkClock, waited_work
from mm3d.tracing import dry_run
from mm3d.tracing.events import Gemm, MemoryPass, PHASES

SIZES = dict(layers=1, hidden=48, heads=8, batch=8, seq=6)
CHOICES = {1: [("serial", {})],
           8: [("3d", {}), ("1d", {}), ("1d-sp", {}), ("3d", {"overlap": True})]}


def seconds(event) -> float:
    """Some machine."""
    return event.flops * 1e-9 if isinstance(event, Gemm) else event.bytes * 1e-10


def modelled(trace) -> float:
    return sum(times * seconds(event) for (phase, _, event), times in trace.events.items()
               if phase in PHASES and isinstance(event, (Gemm, MemoryPass)))


@pytest.mark.ranks(1, 8)
@pytest.mark.parametrize("transport", ["mpi", "shared"])
def test_words_and_seconds_are_those_of_the_dry_run(comm, monkeypatch, transport):
    monkeypatch.setenv("MM3D_TRANSPORT", transport)
    for name, options in CHOICES[comm.size]:
        scheme = mm3d.scheme(name, comm, **options)
        grid, own = scheme.grid, scheme.grid.backend
        trace = dry_run.trace_step(name, comm.size, rank=comm.rank, options=options, **SIZES)
        with waited_work([grid], seconds, sys.maxsize) as backend:
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
        clock = backend.trace
        assert clock.slept + clock.overlapped >= clock.counted * (1 - 1e-9)
        assert grid.backend is own and all(
            axis.backend is own and axis.transport.name in ("mpi", transport)
            and type(axis.transport).__name__ != "WaitingTransport" for axis in grid.axes.values())
        grid.free()


class Host:
    """A clock that a test moves, whose sleeps may last too long."""

    def __init__(self, oversleep: float = 0.0) -> None:
        self.time, self.oversleep, self.asked = 100.0, oversleep, []

    def sleep(self, seconds: float) -> None:
        self.asked.append(seconds)
        self.time += seconds + self.oversleep

    def work(self, seconds: float) -> None:
        self.time += seconds

    def clock(self, seconds: float = 0.01) -> WorkClock:
        return WorkClock(lambda event: seconds, lambda: self.time, self.sleep)


EVENT = MemoryPass("add", 1)
LATE = 0.003    # seconds that a sleep lasts too long


@pytest.mark.parametrize("late, steps, asked, slept, overlapped", [
    (0, "queue work:0.05 settle", [], 0, 0.01),
    (0, "queue work:0.004 settle", [0.006], 0.006, 0.004),
    (0, "work:0.05 queue settle", [0.01], 0.01, 0),    # nothing was queued meanwhile
    (0, "queue work:0.004 queue work:0.004 settle", [0.012], 0.012, 0.008),
    (0, "queue work:0.05 queue settle", [0.01], 0.01, 0.01),    # an idle device saves nothing up
    (0, "queue settle work:0.05 queue settle", [0.01, 0.01], 0.02, 0),
    (0, "queue settle queue work:0.05 settle", [0.01], 0.01, 0.01),
    (0, "queue settle settle", [0.01], 0.01, 0),
    # A pace scales what is queued from when it is set on, and 0 waits for nothing.
    (0, "pace:3 queue settle pace:0 queue settle pace:1 queue settle", [0.03, 0.01], 0.04, 0),
    # Sleeps that last too long make later ones shorter, and the sum right, whatever the host does.
    (LATE, 5 * "queue settle ", [0.01] + 4 * [0.007], 0.05 + LATE, 0),
    (LATE, "queue settle queue work:0.05 settle queue work:0.004 settle", [0.01, 0.003],
     0.016 + LATE, 0.014)])
def test_the_queue_runs_on_while_the_host_works(late, steps, asked, slept, overlapped):
    host = Host(late)
    clock = host.clock()
    for step in steps.split():
        name, _, number = step.partition(":")
        if name == "work":
            host.work(float(number))
        elif name == "pace":
            clock.pace = float(number)
        else:
            clock.count_event(EVENT) if name == "queue" else clock.settle()
    assert host.asked == pytest.approx(asked)
    assert (clock.slept, clock.overlapped) == pytest.approx((slept, overlapped))
    assert clock.slept + clock.overlapped - late == pytest.approx(clock.counted)


def test_queues_are_each_their_own():
    """As of two devices: what is queued on one runs on while the host sleeps for the other."""
    host = Host()
    first, second = host.clock(), host.clock(0.004)
    first.count_event(EVENT)
    second.count_event(EVENT)
    second.settle()
    first.settle()
    assert host.asked == pytest.approx([0.004, 0.006])


def test_a_product_in_parts_lets_collectives_go_on():
    """What the host does in between is not slept again."""
    host, calls = Host(), []
    clock = host.clock(0.016)
    clock.count_event(EVENT)

    def progress() -> None:
        calls.append(host.time)
        host.work(0.001)
    clock.settle_in_parts(progress)
    assert len(calls) == 8 and host.asked == pytest.approx([0.002] + 7 * [0.001])
    assert host.time == pytest.approx(100.017)


@pytest.mark.parametrize("seconds, sleeps", [(0.0004, 1), (0.0035, 4), (0.02, 8)])
def test_collectives_go_on_while_other_work_is_waited_for(seconds, sleeps):
    """In as many sleeps as have a millisecond, up to 8; only within a pass with overlap."""
    host, calls = Host(), []
    clock = host.clock(seconds)
    clock.between_sleeps = lambda: calls.append(host.time)
    clock.count_event(EVENT)
    clock.settle()
    assert len(calls) == len(host.asked) == sleeps
    clock.between_sleeps = None
    clock.count_event(EVENT)
    clock.settle()
    assert len(calls) == sleeps and len(host.asked) == sleeps + 1
