"""Sides of a comparison take turns, and end when what is compared is known."""
from functools import partial
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from bench.instruments.sampling import (Sample, compare_in_turns, makespans_in_turns,
                                        repeat_calls, time_alone)
from bench.instruments.timing import Limits


def side(log, name, seconds):
    """A side whose samples take these seconds, one after the other."""
    left = iter(seconds)

    def sample():
        log.append(name)
        begin = float(len(log))
        return Sample(np.array([[begin, begin + next(left)], [np.nan, np.nan]]), name)
    return sample


def compare(own, other, limits=Limits(6, 20), **more):
    log = []
    found, ended_by = compare_in_turns(
        {"own": side(log, "own", own), "other": side(log, "other", other)}, limits, 0,
        MPI.COMM_SELF, **more)
    return found, ended_by, log


def test_rounds_end_when_ratios_are_narrow():
    """The seconds themselves may differ: a slower machine slows both sides."""
    own = np.array([9.0, *range(1, 40)])
    found, ended_by, log = compare(own, 2 * own)
    assert ended_by == "width" and [one.seconds for one in found["own"]] == [*range(1, 7)]
    assert [one.seconds for one in found["other"]] == [*range(2, 14, 2)]
    assert {one.result for one in found["other"]} == {"other"}
    assert len(log) == 2 * 7    # with the round to warm up
    rounds = [tuple(log[n:n + 2]) for n in range(0, len(log), 2)]
    assert set(rounds) == {("own", "other"), ("other", "own")}


@pytest.mark.parametrize("ratios, ended_by", [
    ([("other", "own")], "repetitions"), ([("own", "own")], "width")])
def test_the_sides_that_count_can_be_named(ratios, ended_by):
    assert compare(np.ones(30), np.arange(1.0, 31), ratios=ratios)[1] == ended_by


def test_one_side_alone_is_repeated_until_its_seconds_are_known():
    log = []
    found, ended_by = compare_in_turns({"own": side(log, "own", np.arange(1.0, 40))},
                                       Limits(6, 20), 0, MPI.COMM_SELF, warmup=0)
    assert ended_by == "repetitions" and len(found["own"]) == 20


def test_repeated_calls_hold_one_result():
    """The last one is returned, and each goes before the next is made."""
    class Result:
        alive, most, made = 0, 0, 0

        def __init__(self):
            Result.alive, Result.made = Result.alive + 1, Result.made + 1
            Result.most, self.number = max(Result.most, Result.alive), Result.made

        def __del__(self):
            Result.alive -= 1
    assert repeat_calls(Result, 5)().number == 5 and Result.most == 1


def test_steps_in_turns_have_the_seconds_of_each():
    """Rounds of two steps, which are not over after the seconds of one step."""
    clock = SimpleNamespace(time=100.0, now=lambda: clock.time)

    def step(seconds):
        clock.time += next(seconds)
    steps = [partial(step, cycle(seconds)) for seconds in ([4, 6], [8, 12])]
    found, ended_by = makespans_in_turns(steps, Limits(2, 9, 40, 1e-9), 0, MPI.COMM_SELF,
                                         lambda: None, clock)
    assert ended_by == "seconds" and found == [3 * [4, 6], 3 * [8, 12]]


def test_a_rank_alone():
    assert time_alone(lambda: 3.0, MPI.COMM_SELF).times.tolist() == [[0.0, 3.0]]
