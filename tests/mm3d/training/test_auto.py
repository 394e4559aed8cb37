"""The search: right, within its memory, above its bound, and no worse than what is known."""
import random
from fractions import Fraction

import pytest

from mm3d.training.schedules import Times, build, check, time_actions
from mm3d.training.schedules.clock import peak_in_flight
from mm3d.training.schedules.builders.auto import least_cost


def drawn(seed: int):
    draw = random.Random(seed)
    p, m = draw.randint(1, 5), draw.randint(1, 12)
    times = Times.by_stage(*([Fraction(draw.randint(1, 9), 2) for _ in range(p)]
                             for _ in range(3)), hop=Fraction(draw.randint(0, 6), 4))
    return p, m, times, Fraction(draw.randint(2, 4 * p + 2), 2), Fraction(draw.randint(0, 4), 4)


@pytest.mark.parametrize("seed", range(24))
def test_what_is_found_is_right_and_fits_and_is_no_worse(seed):
    p, m, times, memory, kept = drawn(seed)
    found = build("auto", p, m, times=times, memory=memory, kept=kept)
    check(found)
    assert found.microbatches == m and max(peak_in_flight(found, kept)) <= memory
    cost = time_actions(found, times).cost
    assert cost >= least_cost(p, m, times, memory)
    for name in ("1f1b", "zb-h1", "zb-h2"):
        known = build(name, p, m)
        if max(peak_in_flight(known, kept)) <= memory:
            assert cost <= time_actions(known, times).cost


def test_equal_times_need_no_bubble_with_twice_the_memory():
    """As ZB-H2; with the memory of 1F1B, ZB-H1's p - 1 at most."""
    times = Times.equal(4, 1, 1, 1)
    for memory, most in ((4, 3), (8, 0)):
        assert time_actions(build("auto", 4, 12, times=times, memory=memory), times).bubble <= most


def test_a_bound_that_is_reached():
    """One micro-batch: nothing can be done while it is away."""
    times = Times.equal(4, 2, 3, 1, hop=1)
    found = time_actions(build("auto", 4, 1, times=times), times)
    assert found.cost == least_cost(4, 1, times, Fraction(4)) == 4 * 5 + 1 + 6


@pytest.mark.parametrize("conditions, match", [
    ({"memory": Fraction(1, 2)}, "memory 1/2, of which 1 is kept"),
    ({"kept": 2}, "a share from 0 to 1"),
    ({"times": Times.equal(3, 1, 1, 1)}, "times of 3 stages: auto has one stage on each")])
def test_what_cannot_be_meant_is_refused(conditions, match):
    with pytest.raises(ValueError, match=match):
        build("auto", 2, 4, **conditions)
