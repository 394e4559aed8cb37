"""The clock, against every closed form and over random rational times, all in exact fractions.

F, B, W are of a stage: with two chunks a rank they are those of a chunk.
"""
import random
from fractions import Fraction

import pytest

from mm3d.training.schedules import ScheduleError, Times, build, parse_schedule, time_actions

CASES = 30


def drawn(seed: int, least: int = 0) -> tuple[Fraction, Fraction, Fraction]:
    """Random rational times of F, B, W; sometimes equal or nothing."""
    draw = random.Random(seed)
    return tuple(Fraction(draw.randint(least, 12), draw.choice((1, 2, 3, 7))) for _ in range(3))


def bubble(name: str, p: int, m: int, times, hop=0) -> Fraction:
    schedule = build(name, p, m)
    return time_actions(schedule, Times.equal(schedule.stage_count, *times, hop=hop)).bubble


def zb_v(p, f, b, w):
    return max(0, 2 * (p - 1) * (b - w), (p - 1) * (2 * f - b - w), (p - 1) * (b - f),
               (p - 2) * (f - b), (p - 2) * (w - f), b - f + (p - 2) * (w - f),
               (2 * p - 3) * f + b - (2 * p - 2) * w, (2 * p - 2) * f - (2 * p - 1) * w)


FORMS = {
    "gpipe": (lambda p: 1, lambda p, f, b, w: (p - 1) * (f + b + w)),
    "1f1b": (lambda p: p, lambda p, f, b, w: (p - 1) * (f + b + w)),
    "zb-h1": (lambda p: p, lambda p, f, b, w: (p - 1) * (b + max(0, f - w))),
    "zb-h2": (lambda p: 2 * p - 1,
              lambda p, f, b, w: (p - 1) * max(0, b - f, f + b - 2 * w)),
    "zb-v": (lambda p: 2 * p - 1, zb_v),
    "dualpipe-v": (lambda p: 2 * p, lambda p, f, b, w: max(
        2 * (p - 1) * f, (p - 2) * f + (p - 1) * b) + (p - 1) * max(0, b - w))}


@pytest.mark.parametrize("name", FORMS)
def test_bubbles_are_the_closed_forms(name):
    """Exactly, from the least number of micro-batches that each form holds for."""
    least, form = FORMS[name]
    for seed in range(CASES):
        p = 2 + seed % 5
        m = least(p) + random.Random(seed).randint(0, 2 * p)
        times = drawn(seed)
        assert bubble(name, p, m, times) == form(p, *times), (p, m, times)


@pytest.mark.parametrize("chunks", [2, 3])
def test_bubble_of_interleaved(chunks):
    """(p - 1) (f + b + w) + 2 c (p v - 1), where a hop is no longer than f and b + w."""
    for seed in range(CASES):
        p = 2 + seed % 4
        f, b, w = times = drawn(seed, least=1)
        hop = min(f, b + w) * Fraction(seed % 4, 3)
        found = bubble(f"interleaved:{chunks}", p, p * (1 + seed % 3), times, hop)
        assert found == (p - 1) * (f + b + w) + 2 * hop * (p * chunks - 1), (p, times, hop)


def test_hops_of_1f1b_are_paid_for_each_micro_batch():
    for seed in range(CASES):
        p, draw = 1 + seed % 6, random.Random(seed)
        m, hop, times = p + draw.randint(0, 20), Fraction(draw.randint(0, 20), 3), drawn(seed)
        n = m + p - 2
        assert bubble("1f1b", p, m, times, hop) == (
            (p - 1) * sum(times) + 2 * hop * (n - n // p)), (p, m, times, hop)


@pytest.mark.parametrize("name, hops", [
    ("zb-h1", lambda p: 4 * (p - 1)), ("zb-v", lambda p: 6 * p - 8)])
def test_hops_of_zero_bubble_schedules_are_paid_once(name, hops):
    """A small hop, equal times: the bubble does not grow with the micro-batches."""
    hop = Fraction(1, 1000)
    for p in (2, 3, 5):
        for m in (2 * p + 1, 5 * p):
            still = bubble(name, p, m, (1, 1, 1))
            assert bubble(name, p, m, (1, 1, 1), hop) == still + hops(p) * hop


def test_few_micro_batches():
    for seed in range(CASES):
        p, (f, b, w) = 1 + seed % 6, drawn(seed)
        m = 1 + seed % p
        found = time_actions(build("1f1b", p, m), Times.equal(p, f, b, w))
        assert found.cost == (m + p - 1) * (f + b + w)
        for name in ("zb-h1", "zb-h2"):
            assert time_actions(build(name, p, m), Times.equal(p, 1, 1, 1)).cost == 2 * (m + p
                                                                                         - 1) + 1


def test_unequal_stages_by_hand():
    """Two stages, two micro-batches; 1F1B.  Rank 1 is the slower one.

    Rank 0: F0 0-1, F1 1-2, BW0 6-8, BW1 10-12; rank 1 after a hop of 1/2 each way:
    F0 1.5-3.5, BW0 3.5-5.5, F1 5.5-7.5, BW1 7.5-9.5.
    """
    times = Times.by_stage([1, 2], [1, 1], [1, 1], "0.5")
    found = time_actions(build("1f1b", 2, 2), times)
    assert found.starts[1] == tuple(map(Fraction, ("1.5", "3.5", "5.5", "7.5")))
    assert found.starts[0] == (0, 1, 6, 10) and found.ends[0][-1] == 12
    assert found.cost == found.makespan == 12 and found.spans == (12, 8)
    assert found.work == (6, 8) and found.bubble == 5
    assert (found.bubble_rate, found.bubble_over_work) == (Fraction(5, 12), Fraction(5, 7))
    assert found.idle_share == 1 - Fraction(14, 24)
    assert found.critical_path() == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (0, 3)]


def test_a_fused_backward_takes_both_times():
    """Guards against a backward of both halves that costs only B in the clock."""
    text = "F0 F1 BW0 BW1\nF0 BW0 F1 BW1"
    split = text.replace("BW0", "B0 W0").replace("BW1", "B1 W1")
    times = Times.equal(2, 3, 5, 7)
    whole, parts = (time_actions(parse_schedule(one), times) for one in (text, split))
    assert whole.work == parts.work == (30, 30)
    assert (whole.cost, parts.cost) == (45, 38)
    assert whole.ends[0][-1] - whole.starts[0][-1] == 12


def test_joined_actions_begin_and_end_together():
    found = time_actions(build("dualpipe-v", 2, 4), Times.equal(4, 1, 2, 3))
    joined = [(rank, k) for rank, row in enumerate(found.schedule.rows)
              for k, action in enumerate(row) if action.joined]
    assert joined
    for rank, k in joined:
        assert found.starts[rank][k - 1] == found.starts[rank][k]
        assert found.ends[rank][k - 1] == found.ends[rank][k] == found.starts[rank][k] + 6


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-min"])
def test_the_critical_path_has_no_gap(name):
    """Its actions and hops are as long as the makespan."""
    for seed in range(8):
        schedule = build(name, 2 + seed % 3, 9)
        draw = random.Random(seed)
        times = Times.by_stage(*([draw.randint(1, 9) for _ in range(schedule.stage_count)]
                                 for _ in range(3)), hop=Fraction(draw.randint(0, 9), 4))
        found = time_actions(schedule, times)
        path = found.critical_path()
        took = sum(found.ends[rank][k] - found.starts[rank][k] for rank, k in path)
        hops = sum(one[0] != other[0] for one, other in zip(path, path[1:]))
        assert took + hops * times.hop == found.makespan


def test_bubbles_of_v_half_and_v_min():
    """Equal times, where 1F1B has 6 (p - 1): about 7/12 and 2/3 of it."""
    for p in range(2, 8):
        assert 2 * bubble("v-half", p, 4 * p, (1, 1, 1)) == 7 * p - (7 if p % 2 else 4)
        assert bubble("v-min", p, 4 * p, (1, 1, 1)) == 4 * p - (5 if p % 3 else 3)


def test_schedules_that_wait_for_ever_have_no_times():
    with pytest.raises(ScheduleError, match="rank 0, action 1, its inputs never arrive"):
        time_actions(parse_schedule("F0 BW0 F1 BW1\nF1 BW1 F0 BW0"), Times.equal(2, 1, 1, 1))


def test_times_are_exact_and_of_every_stage():
    times = Times.equal(2, "1/3", 0.1, "1.3", hop=2)
    assert times.forward[0] == Fraction(1, 3) and times.backward[1] == Fraction(1, 10)
    assert times.of("BW", 0) == Fraction(14, 10) and times.denominator() == 30
    with pytest.raises(ValueError, match="times of 3 stages for a schedule of 2"):
        time_actions(build("1f1b", 2, 2), Times.equal(3, 1, 1, 1))
    with pytest.raises(ValueError, match="as many of F, B and W"):
        Times.by_stage([1, 1], [1, 1], [1])
    with pytest.raises(ValueError, match="negative"):
        Times.equal(2, 1, -1, 1)
