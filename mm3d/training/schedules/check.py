"""Check that a schedule is right: complete, in an order that can be kept, and free of deadlock."""

from collections import Counter
from functools import lru_cache
from typing import Callable

from mm3d.training.schedules.messages import ScheduleProgress
from mm3d.training.schedules.schedule import STEPS, Completion, Schedule, ScheduleError


def check(schedule: Schedule, pending: int | None = None) -> None:
    """Check a schedule by each rule in turn.

    Parameters
    ----------
    schedule : Schedule
        Any.
    pending : int, optional
        How many messages a rank can leave pending to each other rank; 0 with synchronous
        (blocking) sends.  Any number, if not given.

    Raises
    ------
    ScheduleError
        With the name of the first rule that is broken, and the place:

        - "stages": each stage from 0 on is on one rank, once;
        - "actions": each rank takes F, B and W (or BW) of each of its stages and each micro-batch
          once, and nothing else;
        - "joined": a ``&`` joins a forward with one backward after it, and neither needs the
          other;
        - "order": on a rank no action comes before one that it needs: B after its F, W after its
          B, and F and B of neighbouring stages on the same rank;
        - "progress": the ranks do not wait for each other for ever, whatever the sends;
        - "pending": nor do they with at most `pending` messages from one rank to another sent and
          not yet received.
    """
    _check_rules(schedule)
    if pending is not None:
        check_messages(schedule, pending)


@lru_cache(maxsize=16)
def _check_rules(schedule: Schedule) -> None:
    """Check the rules for any messages, once where many models share a schedule."""
    for rule in RULES:
        rule(schedule)


def check_stages(schedule: Schedule) -> None:
    """Check the rule "stages"."""
    if not schedule.rows or len(schedule.stages) != len(schedule.rows):
        raise ScheduleError("stages", f"{len(schedule.rows)} rows of actions for "
                                      f"{len(schedule.stages)} ranks with stages")
    seen: set[int] = set()
    for rank, own in enumerate(schedule.stages):
        for stage in own:
            if not 0 <= stage < schedule.stage_count:
                raise ScheduleError("stages", f"stage {stage}: there are "
                                              f"{schedule.stage_count}, from 0 on", rank)
            if stage in seen:
                raise ScheduleError("stages", f"stage {stage} is there twice", rank)
            seen.add(stage)


def check_actions(schedule: Schedule) -> None:
    """Check the rule "actions"."""
    for rank, row in enumerate(schedule.rows):
        found: Counter[Completion] = Counter()
        for index, action in enumerate(row):
            if action.kind not in STEPS or action.micro < 0:
                raise ScheduleError("actions", f"{action} is none", rank, index)
            if not 0 <= action.chunk < len(schedule.stages[rank]):
                raise ScheduleError("actions", f"the rank has no chunk {action.chunk}", rank,
                                    index)
            for event in schedule.outputs(rank, action):
                found[event] += 1
                if found[event] > 1:
                    raise ScheduleError("actions", f"{event} is done a second time", rank, index)
        for event in (Completion(step, stage, micro) for stage in schedule.stages[rank]
                      for micro in range(schedule.microbatches) for step in "FBW"):
            if event not in found:
                raise ScheduleError("actions", f"{event} is missing", rank)


def check_joined(schedule: Schedule) -> None:
    """Check the rule "joined"."""
    for rank, row in enumerate(schedule.rows):
        if row and row[0].joined:
            raise ScheduleError("joined", "there is no action before it", rank, 0)
        index = 0
        for group in schedule.groups(rank):
            if len(group) > 1:
                kinds = [action.kind for action in group]
                if kinds not in (["F", "B"], ["F", "BW"]):
                    raise ScheduleError("joined", f"{'&'.join(kinds)}: a forward and one backward "
                                                  f"can be joined, F&B or F&BW", rank, index)
                done = {event for action in group for event in schedule.outputs(rank, action)}
                for event in (event for action in group
                              for event in schedule.inputs(rank, action) if event in done):
                    raise ScheduleError("joined", f"one needs {event} of the other", rank, index)
            index += len(group)


def check_order(schedule: Schedule) -> None:
    """Check the rule "order"."""
    for rank, row in enumerate(schedule.rows):
        happened: set[Completion] = set()
        for index, action in enumerate(row):
            for event in schedule.inputs(rank, action):
                if schedule.rank_of[event.stage] == rank and event not in happened:
                    raise ScheduleError("order", f"{action.kind} of micro-batch {action.micro} in "
                                                 f"stage {schedule.stage_of(rank, action.chunk)} "
                                                 f"comes before {event}", rank, index)
            happened.update(schedule.outputs(rank, action))


def check_messages(schedule: Schedule, pending: int | None = None) -> None:
    """Check the rule "progress"; with a limit of pending messages the rule "pending"."""
    rule = "progress" if pending is None else "pending"
    waiting = ScheduleProgress(schedule, pending).waiting()
    for rank, operation in waiting.items():
        others = [str(other) for other in waiting if other != rank]
        to = "from" if operation.kind == "receive" else "to"
        also = f"; ranks {', '.join(others)} wait too" if others else ""
        raise ScheduleError(rule, f"it waits for ever to {operation.kind} {operation.event} {to} "
                                  f"rank {operation.other}{also}", rank, operation.index)


RULES: tuple[Callable[[Schedule], None], ...] = (
    check_stages, check_actions, check_joined, check_order, check_messages)
