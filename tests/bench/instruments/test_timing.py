"""What is timed and what is not."""
import time

import numpy as np
import pytest

from bench.instruments import timing
from bench.instruments.clock import Clock, time_on_all_ranks
from bench.records import model_run
from bench.statistics import median_interval


class Moved:
    """A clock that moves where a step takes time, and nowhere else."""

    offset_error = 0.0

    def __init__(self):
        self.time = 100.0

    def now(self):
        return self.time

    @staticmethod
    def resolution():
        return 0.25


@pytest.mark.ranks(1, 4)
def test_samples_of_every_rank_without_warm_up(comm):
    calls, clock = [], Moved()

    def forward():
        calls.append("forward")
        # The second step, the first that counts, is the slow one; the warm-up is slower still.
        clock.time += {1: 8.0, 2: 2.0}.get(calls.count("forward"), 1.0)
        return calls.count("forward")

    def backward(saved):
        assert saved == calls.count("forward")
        calls.append("backward")
        clock.time += 0.5 if comm.rank == comm.size - 1 else 0.0

    repeated = timing.Step(forward, backward, comm, lambda: calls.append("idle"),
                           lambda: calls.append("prepare"))
    repeated.clock = clock
    found = timing.measure(repeated, 1, timing.Limits(3, 3))
    step = ["prepare", "idle", "forward", "idle", "idle", "backward", "idle"]
    assert calls == 4 * step
    if comm.rank:
        assert found is None
        return
    samples = found.samples
    assert (found.ended_by, found.clock_resolution, found.clock_offset_error) == (
        "repetitions", 0.25, 0.0)
    # The last rank begins later by what it took before.
    for phase, late in found.late.items():
        assert late.shape == samples[phase].shape and (late[:, :-1] == 0).all()
        assert late[:, -1].tolist() == ([0.5, 1.0, 1.5] if comm.size > 1 else [0.0] * 3)
    assert samples["forward"].tolist() == [[2.0] * comm.size, *2 * [[1.0] * comm.size]]
    assert samples["backward"].tolist() == 3 * [[0.0] * (comm.size - 1) + [0.5]]
    assert model_run.typical(samples["backward"]) == 0.5


@pytest.mark.parametrize("limits, message", [
    ((0, 1), "repetitions 0: must be at least 1"), ((3, 2), "at most 2 .* at least the 3"),
    ((1, 1, 0.0), "0 seconds: both must"), ((1, 1, 1.0, -0.5), "width -0.5")])
def test_limits_that_cannot_be_meant(limits, message):
    with pytest.raises(ValueError, match=message):
        timing.Limits(*limits)


def test_what_ends_the_repetitions():
    limits = timing.Limits(6, 20, 10.0, 0.05)

    def reached(done, seconds, spread):
        samples = 1 + spread * np.linspace(-1, 1, max(1, done))
        return limits.reached(done, seconds, lambda: [median_interval(samples)])
    assert reached(5, 100.0, 0.0) == ""
    assert reached(6, 0.0, 0.02) == "width"
    assert reached(6, 0.0, 0.03) == "" and reached(20, 0.0, 0.5) == "repetitions"
    assert reached(6, 10.0, 0.03) == "seconds"
    # A narrow interval of too few samples has not the confidence.
    few = timing.Limits(2, 9)
    assert few.reached(5, 0.0, lambda: [median_interval([1.0] * 5)]) == ""


@pytest.mark.ranks(4)
def test_repetitions_end_on_all_ranks_when_the_median_is_known(comm):
    counts = []
    step = timing.Step(lambda: time.sleep(1e-3), lambda saved: counts.append(1), comm,
                       lambda: None)
    found = timing.measure(step, 0, timing.Limits(6, 9, width=1e6))
    assert len(counts) == 6
    assert comm.rank or found.ended_by == "width"


@pytest.mark.ranks(4)
def test_the_makespan_is_from_the_first_start_to_the_last_end(comm):
    clock = Clock(comm)
    times, rank = time_on_all_ranks(
        lambda: time.sleep(0.05 if comm.rank == 2 else 0.0) or comm.rank, comm, lambda: None,
        clock)
    assert times.shape == (4, 2) and times[:, 0].min() == 0 and rank == comm.rank
    assert 0.05 <= times.max() < 5 and times[2, 1] - times[2, 0] >= 0.05
    assert all(np.array_equal(times, other) for other in comm.allgather(times))


@pytest.mark.ranks(2)
def test_clocks_of_two_kernels_are_aligned(comm):
    clock = Clock(comm, comm.rank, lambda: time.perf_counter() + 1000.0 * comm.rank)
    if comm.rank:
        assert clock.offset == pytest.approx(-1000, abs=clock.offset_error + 1e-6)
        assert 0 < clock.offset_error < 1


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("after, kept", [(1, 0), (2, 0), (3, 1), (5, 3)])
def test_told_to_stop(comm, after, kept):
    """Between repetitions, on all ranks at once; those that there are count."""
    begun = []
    step = timing.Step(lambda: begun.append(1), lambda saved: None, comm, lambda: None)
    found = timing.measure(step, 2, timing.Limits(10, 10), lambda: len(begun) >= after)
    assert comm.allgather(len(begun)) == [after] * comm.size
    if comm.rank == 0:
        assert found.ended_by == "stopped"
        assert found.samples["forward"].shape == found.late["backward"].shape == (kept, comm.size)


@pytest.mark.ranks(1, 4)
def test_repetitions_that_follow_a_warm_up_end_alike_on_all_ranks(comm):
    """Seconds are counted from the first that counts; rank 0 alone computes intervals."""
    seen, asked, clock = [], [], Moved()

    def intervals():
        asked.append(comm.rank)
        return [median_interval([1.0, 2.0])]

    repetitions = timing.Repetitions(timing.Limits(2, 9, 0.2), comm, intervals, warmup=2,
                                     now=clock.now)
    for counts in repetitions:
        seen.append(counts)
        clock.time += 0.0 if counts else 0.15
        if len(seen) == 5 and comm.rank == 0:
            clock.time += 0.25
    assert seen == [False, False, True, True, True] and repetitions.ended_by == "seconds"
    assert asked == [0, 0] * (comm.rank == 0)
