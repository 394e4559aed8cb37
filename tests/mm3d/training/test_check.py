"""The text of schedules, and the rules: each has broken schedules that it alone names."""
from itertools import product

import pytest

from mm3d.training.schedules import (Action, Schedule, ScheduleError, build, check, time_actions,
                                     format_schedule, parse_schedule, all_builders, Times)
from mm3d.training.schedules.messages import ScheduleProgress, pending_needed

ZB = """
F0 F1 B0 W0 B1 W1    # rank 0
F0 B0 F1 B1 W0 W1
"""


@pytest.mark.parametrize("name", all_builders())
def test_texts_are_read_as_they_were_written(name):
    for p, m in product((1, 2, 3), (6, 7)):
        schedule = build(name, p, m)
        text = format_schedule(schedule)
        assert parse_schedule(text) == schedule
        assert format_schedule(parse_schedule(text)) == text
        assert len(text.splitlines()) == p


def test_texts_are_as_a_person_writes_them():
    assert format_schedule(build("1f1b", 2, 3)) == (
        "F0 F1 BW0 F2 BW1 BW2\n"
        "F0 BW0 F1 BW1 F2 BW2\n")
    assert format_schedule(build("zb-v", 2, 3)).splitlines()[0].startswith(
        "0 3: F0.0 F0.1 F0.2 F1.0 B1.0 W1.0 F1.1")
    assert format_schedule(build("dualpipe-v", 1, 3)) == (
        "0 1: F0.0 F1.0 F0.1 BW1.0 F1.1&BW0.0 F0.2&BW1.1 F1.2&BW0.1 BW1.2 B0.2 W0.2\n")


def test_a_text_by_hand_is_a_schedule():
    schedule = parse_schedule(ZB)
    check(schedule)
    assert schedule.stages == ((0,), (1,))
    assert schedule.rows[1][1] == Action("B", 0, 0)
    assert (schedule.stage_of(1, 0), schedule.microbatches, schedule.chunks) == (1, 2, 1)


@pytest.mark.parametrize("text, rule, rank, index, match", [
    ("", "text", None, None, "no line with actions"),
    ("F0 BW0\nF0 X0", "text", 1, 1, "'X0': F, B, W or BW"),
    ("F0 B", "text", 0, 1, "'B': F, B, W or BW"),
    ("F0 BW-1", "text", 0, 1, "'BW-1'"),
    ("a: F0 BW0", "text", 0, None, "'a': the numbers of its stages"),
    ("0: F0 BW0\n0: F0 BW0", "stages", 1, None, "stage 0 is there twice"),
    ("0: F0 BW0\n2: F0 BW0", "stages", 1, None, "stage 2: there are 2, from 0 on"),
    ("F0 BW0 F0", "actions", 0, 2, "F of micro-batch 0 in stage 0 is done a second time"),
    ("F0 BW0 W0", "actions", 0, 2, "W of micro-batch 0 in stage 0 is done a second time"),
    ("F0 B0", "actions", 0, None, "W of micro-batch 0 in stage 0 is missing"),
    ("F0 BW0\nF1 BW1", "actions", 0, None, "F of micro-batch 1 in stage 0 is missing"),
    ("F0 F1.0 BW0", "actions", 0, 1, "the rank has no chunk 1"),
    ("&F0 BW0", "joined", 0, 0, "no action before it"),
    ("F0 BW0&F1 BW1", "joined", 0, 1, "BW&F: a forward and one backward"),
    ("F0&F1 BW0 BW1", "joined", 0, 0, "F&F: a forward and one backward"),
    ("F0&BW0", "joined", 0, 0, "one needs F of micro-batch 0 in stage 0 of the other"),
    ("BW0 F0", "order", 0, 0, "B of micro-batch 0|BW of micro-batch 0 in stage 0 comes before F"),
    ("F0 W0 B0", "order", 0, 1, "W of micro-batch 0 in stage 0 comes before B of micro-batch 0"),
    ("F0 F1 B0 W1 W0 B1", "order", 0, 3, "W of micro-batch 1 in stage 0 comes before B of micro"),
    ("0 1: F1.0 F0.0 BW1.0 BW0.0", "order", 0, 0, "F of micro-batch 0 in stage 1 comes before F"),
    ("0 1: F0.0 F1.0 BW0.0 BW1.0", "order", 0, 2, "in stage 0 comes before B of micro-batch 0"),
    ("F0 BW0 F1 BW1\nF1 BW1 F0 BW0", "progress", 0, 1,
     "waits for ever to receive B of micro-batch 0 in stage 1 from rank 1; ranks 1 wait too"),
    ("F0 F1 BW0 BW1\nF0 BW0 F1 BW1\nF0 F1 BW0 BW1", "progress", 0, 2,
     "waits for ever to receive B of micro-batch 0 in stage 1 from rank 1; ranks 1, 2 wait")])
def test_each_rule_is_named_with_its_place(text, rule, rank, index, match):
    with pytest.raises(ScheduleError, match=match) as caught:
        check(parse_schedule(text))
    assert caught.value.rule == rule
    if rank is not None:
        assert (caught.value.rank, caught.value.index) == (rank, index)


def test_rows_and_stages_are_of_as_many_ranks():
    with pytest.raises(ScheduleError, match="1 rows of actions for 2 ranks"):
        check(Schedule(((0,), (1,)), ((Action("F", 0, 0), Action("BW", 0, 0)),)))


@pytest.mark.parametrize("action", [Action("X", 0, 1), Action("F", 0, -1), Action("F", -1, 1)])
def test_actions_that_are_none_are_refused(action):
    row = (Action("F", 0, 0), Action("BW", 0, 0), action)
    with pytest.raises(ScheduleError, match="rank 0, action 2") as caught:
        check(Schedule(((0,),), (row,)))
    assert caught.value.rule == "actions"


def test_too_few_pending_sends_are_named():
    """Both ranks send before they receive: forwards the one, a backward the other."""
    schedule = parse_schedule("F0 F1 F2 BW0 BW1 BW2\nF0 BW0 F1 BW1 F2 BW2")
    assert pending_needed(schedule) == 1
    assert ScheduleProgress(schedule, 0).waiting().keys() == {0, 1}
    with pytest.raises(ScheduleError, match="waits for ever to send F of micro-b") as caught:
        check(schedule, pending=0)
    assert (caught.value.rule, caught.value.rank) == ("pending", 0)


def test_swapping_any_two_neighbours_is_right_or_refused():
    """What passes the check runs to its end by the clock; what does not is stuck or not whole."""
    schedule = build("zb-v", 2, 4)
    times = Times.equal(4, 1, 1, 1)
    refused = 0
    for rank, row in enumerate(schedule.rows):
        for k in range(len(row) - 1):
            swapped = (*row[:k], row[k + 1], row[k], *row[k + 2:])
            rows = (*schedule.rows[:rank], swapped, *schedule.rows[rank + 1:])
            other = Schedule(schedule.stages, rows)
            try:
                check(other)
            except ScheduleError as error:
                assert error.rule in ("order", "progress")
                refused += 1
            else:
                assert time_actions(other, times).cost >= time_actions(schedule, times).work[0]
    assert refused >= 8
