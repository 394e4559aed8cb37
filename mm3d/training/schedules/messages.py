"""Derive the sends and receives of a schedule, and find out whether they all complete."""

from collections import Counter
from typing import NamedTuple

from mm3d.training.schedules.schedule import Action, Completion, Schedule


class Operation(NamedTuple):
    """Describe what a rank does: run actions, or send or receive the result of one step."""

    # {"receive", "run", "send"}: receives come before the actions that need them, sends after
    # those that made them.
    kind: str
    index: int    # the number, in the rank's row, of the (first) action that it belongs to
    event: Completion | None = None    # the step whose result is moved
    other: int = -1    # the rank at the other end; -1 of a run
    actions: tuple[Action, ...] = ()    # what is run


def consumer(schedule: Schedule, event: Completion) -> int | None:
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
            other = consumer(schedule, event)
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
    `mm3d.training.schedules.check.check`.
    """
    pending = 0
    while ScheduleProgress(schedule, pending).waiting():
        pending += 1
    return pending
