"""Derive the sends and receives of a schedule, and check that it is right.

It has to be complete, in an order that can be kept, and free of deadlock.
"""

from collections import Counter
from functools import lru_cache
from typing import Callable, NamedTuple

from mm3d.training.schedules.schedule import STEPS, Action, Completion, Schedule, ScheduleError


class Operation(NamedTuple):
    """Describe what a rank does: run actions, or send or receive the result of one step."""

    # {"receive", "run", "send"}: receives come before the actions that need them, sends after
    # those that made them.
    kind: str
    index: int    # the number, in the rank's row, of the (first) action that it belongs to
    event: Completion | None = None    # the step whose result is moved
    other: int = -1    # the rank at the other end; -1 of a run
    actions: tuple[Action, ...] = ()    # what is run


def _consumer(schedule: Schedule, event: Completion) -> int | None:
    """Return the rank of the stage that needs the result of `event`; None if none does."""
    step = {"F": 1, "B": -1}.get(event.step)
    return None if step is None else schedule.rank_of.get(event.stage + step)


def operations(schedule: Schedule, rank: int) -> list[Operation]:
    """Return all that `rank` does in its order, with sends and receives.

    Results stay on a rank where two neighbouring stages do, as at the turn of a V.
    """
    found, index = [], 0
    for group in schedule.groups(rank):
        for event in (event for action in group for event in schedule.inputs(rank, action)):
            owner = schedule.rank_of[event.stage]
            if owner != rank:
                found.append(Operation("receive", index, event, owner))
        found.append(Operation("run", index, actions=group))
        for event in (event for action in group for event in schedule.outputs(rank, action)):
            other = _consumer(schedule, event)
            if other not in (None, rank):
                found.append(Operation("send", index, event, other))
        index += len(group)
    return found


def message_count(schedule: Schedule) -> int:
    """Return the number of messages of all ranks."""
    return sum(operation.kind == "send" for rank in range(schedule.ranks)
               for operation in operations(schedule, rank))


class ScheduleProgress:
    """Run a schedule, which has each step once, without times, as far as its messages allow.

    As many messages as `pending` from one rank to another may be sent and not yet received; a
    further send waits.  0: sends are synchronous, each waits for its receive.  None: any number.
    What can be done stays possible until it is done, so the end does not depend on the order in
    which the ranks are looked at.
    """

    def __init__(self, schedule: Schedule, pending: int | None = None) -> None:
        self.schedule, self.pending = schedule, pending
        self.programs = [operations(schedule, rank) for rank in range(schedule.ranks)]
        self.places = [0] * schedule.ranks
        self.happened: set[Completion] = set()
        self.sent: set[Completion] = set()
        self.under_way: Counter[tuple[int, int]] = Counter()
        while any([self._advance(rank) for rank in range(schedule.ranks)]):
            pass

    def waiting(self) -> dict[int, Operation]:
        """Return the ranks that cannot go on and the operation at which each waits."""
        return {rank: program[place]
                for rank, (program, place) in enumerate(zip(self.programs, self.places))
                if place < len(program)}

    def _advance(self, rank: int) -> bool:
        """Advance a rank as far as it goes; return whether it moved."""
        before = self.places[rank]
        while self.places[rank] < len(self.programs[rank]) and self._completes(rank):
            self.places[rank] += 1
        return self.places[rank] > before

    def _completes(self, rank: int) -> bool:
        """Complete the next operation of a rank, if possible; return whether it was."""
        operation = self.programs[rank][self.places[rank]]
        if operation.kind == "run":
            return self._run(rank, operation.actions)
        if operation.kind == "send":
            return self._send(rank, operation)
        if operation.event not in self.sent:
            return False
        self.under_way[operation.other, rank] -= 1
        return True

    def _run(self, rank: int, actions: tuple[Action, ...]) -> bool:
        own = {event for action in actions for event in self.schedule.inputs(rank, action)
               if self.schedule.rank_of[event.stage] == rank}
        if not own <= self.happened:
            return False
        self.happened.update(event for action in actions
                             for event in self.schedule.outputs(rank, action))
        return True

    def _send(self, rank: int, operation: Operation) -> bool:
        other, program = operation.other, self.programs[operation.other]
        if self.pending == 0:
            place = self.places[other]
            met = place < len(program) and program[place].kind == "receive" \
                and program[place].event == operation.event
            self.places[other] += met    # both ends complete together
            return met
        if self.pending is not None and self.under_way[rank, other] >= self.pending:
            return False
        self.sent.add(operation.event)
        self.under_way[rank, other] += 1
        return True


def pending_needed(schedule: Schedule) -> int:
    """Return how many messages a rank must be able to leave pending to each other rank.

    0 says that synchronous (blocking) sends are enough.  The schedule passes
    `mm3d.training.schedules.messages.check`.
    """
    pending = 0
    while ScheduleProgress(schedule, pending).waiting():
        pending += 1
    return pending


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
        _check_messages(schedule, pending)


@lru_cache(maxsize=16)
def _check_rules(schedule: Schedule) -> None:
    """Check the rules for any messages, once where many models share a schedule."""
    for rule in _RULES:
        rule(schedule)


def _check_stages(schedule: Schedule) -> None:
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


def _check_actions(schedule: Schedule) -> None:
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


def _check_joined(schedule: Schedule) -> None:
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


def _check_order(schedule: Schedule) -> None:
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


def _check_messages(schedule: Schedule, pending: int | None = None) -> None:
    """Check the rule "progress"; with a limit of pending messages the rule "pending"."""
    rule = "progress" if pending is None else "pending"
    waiting = ScheduleProgress(schedule, pending).waiting()
    for rank, operation in waiting.items():
        others = [str(other) for other in waiting if other != rank]
        to = "from" if operation.kind == "receive" else "to"
        also = f"; ranks {', '.join(others)} wait too" if others else ""
        raise ScheduleError(rule, f"it waits for ever to {operation.kind} {operation.event} {to} "
                                  f"rank {operation.other}{also}", rank, operation.index)


_RULES: tuple[Callable[[Schedule], None], ...] = (
    _check_stages, _check_actions, _check_joined, _check_order, _check_messages)
