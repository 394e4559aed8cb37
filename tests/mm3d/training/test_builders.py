"""Every builder over ranges of ranks and micro-batches: right, in order, in the memory it says."""
import random
from fractions import Fraction

import pytest

from mm3d.training.schedules import Times, all_builders, build, check, time_actions
from mm3d.training.schedules.builders.auto import least_cost
from mm3d.training.schedules.clock import peak_in_flight
from mm3d.training.schedules.messages import message_count, pending_needed
from mm3d.training.schedules.schedule import BUILDERS, Schedule, builder, loop

SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 5, 8, 16, 19)]
NAMES = ["gpipe", "1f1b", "interleaved:1", "interleaved", "interleaved:3", "zb-h1", "zb-h2",
         "zb-v", "v-half", "v-min", "dualpipe-v", "auto"]


def built(name: str, sizes=SIZES) -> list[Schedule]:
    """The schedules of a name, of all sizes that there are any of."""
    sizes = sizes if name != "auto" else [size for size in sizes if max(size) <= 5]
    if name == "dualpipe-v":
        sizes = [(p, m) for p, m in sizes if m >= 2 * p]
    return [build(name, *size) for size in sizes]


def test_every_builder_is_here():
    assert {name.partition(":")[0] for name in NAMES} == set(all_builders())


@pytest.mark.parametrize("name", NAMES)
def test_all_sizes_pass_the_check_and_take_the_micro_batches_in_order(name):
    """Gradients are accumulated in the order of one rank alone, and so equal to the last bit."""
    every = built(name)
    assert len(every) >= 10
    for schedule in every:
        check(schedule)
        for rank, row in enumerate(schedule.rows):
            for chunk in range(len(schedule.stages[rank])):
                for kind in "FBW":
                    micros = [a.micro for a in row if a.chunk == chunk and kind in a.kind]
                    assert micros == list(range(schedule.microbatches))


def test_synchronous_sends_do_for_gpipe_alone():
    """With two ranks and more; what another schedule needs is finite."""
    for name in NAMES:
        for schedule in built(name, [(p, m) for p in (2, 4) for m in (8, 11)]):
            needed = pending_needed(schedule)
            assert needed == 0 if name == "gpipe" else needed >= 1, (name, needed)
            check(schedule, pending=needed)


@pytest.mark.parametrize("name, count", [
    ("gpipe", lambda p: 2 * (p - 1)), ("1f1b", lambda p: 2 * (p - 1)),
    ("interleaved", lambda p: 2 * (2 * p - 1)), ("interleaved:3", lambda p: 2 * (3 * p - 1)),
    ("zb-h1", lambda p: 2 * (p - 1)), ("zb-h2", lambda p: 2 * (p - 1)),
    ("zb-v", lambda p: 4 * (p - 1)), ("v-half", lambda p: 4 * (p - 1)),
    ("v-min", lambda p: 4 * (p - 1)), ("dualpipe-v", lambda p: 4 * (p - 1))])
def test_messages_of_a_micro_batch(name, count):
    """A rank sends nothing to itself, at the turn of a V or with one rank alone."""
    for schedule in built(name):
        per_micro = 0 if schedule.ranks == 1 else count(schedule.ranks)
        assert message_count(schedule) == per_micro * schedule.microbatches


@pytest.mark.parametrize("name, to_b, to_w", [
    ("gpipe", lambda p, r, m: m, lambda p, r, m: m),
    ("1f1b", lambda p, r, m: min(p - r, m), lambda p, r, m: min(p - r, m)),
    ("zb-h1", lambda p, r, m: min(p - r, m), lambda p, r, m: min(p, m)),
    ("zb-h2", lambda p, r, m: min(2 * (p - r) - 1, m), lambda p, r, m: min(2 * p - 1, m))])
def test_micro_batches_in_flight(name, to_b, to_w):
    for schedule in built(name):
        p, m = schedule.ranks, schedule.microbatches
        assert peak_in_flight(schedule) == tuple(to_b(p, r, m) for r in range(p))
        assert peak_in_flight(schedule, 1) == tuple(to_w(p, r, m) for r in range(p))


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_chunks_in_flight_of_interleaved(chunks):
    for p, m in ((2, 8), (3, 9), (4, 16), (8, 32)):
        schedule = build(f"interleaved:{chunks}", p, m)
        wanted = tuple(2 * (p - 1 - r) + (chunks - 1) * p + 1 for r in range(p))
        assert peak_in_flight(schedule) == peak_in_flight(schedule, 1) == wanted
        assert wanted[0] == p * chunks + p - 1


@pytest.mark.parametrize("name, wanted", [
    ("zb-v", lambda p: 2 * p), ("dualpipe-v", lambda p: 2 * p + 1)])
def test_chunks_in_flight_of_vs(name, wanted):
    for p, m in ((2, 8), (3, 9), (4, 16), (8, 32)):
        assert peak_in_flight(build(name, p, m), 1) == (wanted(p),) * p


@pytest.mark.parametrize("name, share, slack", [
    ("v-half", Fraction(1, 2), 2), ("v-min", Fraction(1, 3), 2)])
def test_v_half_and_v_min_hold_a_half_and_a_third(name, share, slack):
    """Of the 2 p half stages that 1F1B holds, and a constant number more."""
    for p in range(2, 13):
        held = max(peak_in_flight(build(name, p, 4 * p)))
        assert 2 * p * share <= held <= 2 * p * share + slack


def test_in_flight_with_a_part_kept_for_the_weights():
    """Rank i = 1 ... p of ZB-H1 holds p - i + 1 whole ones and i - 1 of what W needs."""
    kept = Fraction(2, 7)
    found = peak_in_flight(build("zb-h1", 4, 12), kept)
    assert found == tuple((4 - r) + r * kept for r in range(4))


@pytest.mark.parametrize("name, ranks, microbatches, match", [
    ("zb", 4, 8, "'zb' is unknown: choose one of 1f1b, auto, dualpipe-v"),
    ("1f1b", 0, 8, "0 ranks with 1 chunks and 8 micro-batches: whole numbers of at least 1"),
    ("1f1b", "4", 8, "'4' ranks with 1 chunks and 8 micro-batches: whole numbers of at least 1"),
    ("v-min", 4, 0, "4 ranks with 2 chunks and 0 micro-batches: whole numbers of at least 1"),
    ("1f1b:2", 4, 8, "1f1b has no choice of chunks"),
    ("interleaved:0", 4, 8, "a number of chunks of at least 1"),
    ("interleaved:two", 4, 8, "a number of chunks of at least 1"),
    ("1f1b", 4, 2 ** 16 + 1, "4 stages and 65537 micro-batches have 262148 forward steps"),
    ("interleaved", 4, 2 ** 15 + 1, "8 stages and 32769 micro-batches have 262152 forward steps"),
    ("v-min", 4, 2 ** 15 + 1, "8 stages and 32769 micro-batches have 262152 forward steps"),
    ("auto", 4, 2 ** 13 + 1, "4 stages and 8193 micro-batches have 32772 .* at most 32768 would"),
    ("dualpipe-v", 4, 7, "at least 8 micro-batches are needed")])
def test_what_there_is_no_schedule_of_is_refused(name, ranks, microbatches, match):
    with pytest.raises(ValueError, match=match):
        build(name, ranks, microbatches)


@pytest.mark.parametrize("chunks", [0, 1.5, None])
def test_chunks_are_a_whole_number(chunks):
    with pytest.raises(ValueError, match=f"2 ranks with {chunks} chunks and 4 micro-batches"):
        build("interleaved", 2, 4, chunks=chunks)


def test_a_new_builder_needs_its_function_alone():
    """The default of chunks is its own, where it has a choice of them."""
    asked = []

    @builder("one-by-one")
    def one_by_one(ranks, microbatches, chunks=3):
        asked.append(chunks)
        return Schedule(loop(ranks), tuple(
            tuple(action for micro in range(microbatches)
                  for action in build("gpipe", 1, microbatches).rows[0] if action.micro == micro)
            for _ in range(ranks)))
    try:
        check(build("one-by-one", 3, 4), pending=0)
        build("one-by-one:2", 3, 4)
        assert asked == [3, 2] and "one-by-one" in all_builders()
        with pytest.raises(ValueError, match="9 stages and 32768 micro-batches have 294912 forw"):
            build("one-by-one", 3, 2 ** 15)
    finally:
        del BUILDERS["one-by-one"]


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
