"""Compute when each action of a schedule begins and ends, exactly, and what it keeps meanwhile.

An action begins when the previous action on its rank is done and its inputs have arrived.  A
result arrives on another rank one hop after the end of the action; on the same rank at that end.
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Iterable, Mapping

from mm3d.training.schedules.schedule import STEPS, Completion, Schedule, ScheduleError

Exact = int | float | str | Fraction
ActionPlace = tuple[int, int]    # a rank, and the number of an action in its row


def exact(value: Exact) -> Fraction:
    """Return a number as a fraction; a float as the decimal number that it is printed as."""
    return Fraction(str(value))


@dataclass(frozen=True)
class Times:
    """Hold the times of the steps in each stage, in any one unit.

    Attributes
    ----------
    forward, backward, weights : tuple of Fraction
        By stage: F; B, the gradient of the input; W, the gradient of the weights.
    hop : Fraction
        From the end of an action to the arrival of its result on another rank.  Neither rank is
        busy with it.
    links : mapping of (int, int) to Fraction
        Hops from a rank to another that take another time than `hop`.
    """

    forward: tuple[Fraction, ...]
    backward: tuple[Fraction, ...]
    weights: tuple[Fraction, ...]
    hop: Fraction = Fraction(0)
    links: Mapping[tuple[int, int], Fraction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.forward) == len(self.backward) == len(self.weights) > 0:
            raise ValueError(f"times of {len(self.forward)}, {len(self.backward)} and "
                             f"{len(self.weights)} stages: as many of F, B and W are needed")
        if min(*self.forward, *self.backward, *self.weights, self.hop, *self.links.values()) < 0:
            raise ValueError("times are negative: times of at least 0 are needed")

    @classmethod
    def by_stage(cls, forward: Iterable[Exact], backward: Iterable[Exact],
                 weights: Iterable[Exact], hop: Exact = 0) -> "Times":
        """Return times that differ from stage to stage."""
        every = (tuple(map(exact, times)) for times in (forward, backward, weights))
        return cls(*every, exact(hop))

    @classmethod
    def equal(cls, stages: int, forward: Exact, backward: Exact, weights: Exact,
              hop: Exact = 0) -> "Times":
        """Return the same times for each of `stages` stages."""
        return cls.by_stage([forward] * stages, [backward] * stages, [weights] * stages, hop)

    def of(self, kind: str, stage: int) -> Fraction:
        """Return the time of an action of this kind in a stage; "BW" takes that of both parts."""
        every = {"F": self.forward, "B": self.backward, "W": self.weights}
        return sum((every[step][stage] for step in STEPS[kind]), Fraction(0))

    def hop_between(self, source: int, target: int) -> Fraction:
        """Return the time of a hop from a rank to a rank; none from a rank to itself."""
        return Fraction(0) if source == target else self.links.get((source, target), self.hop)

    def denominator(self) -> int:
        """Return the least number that makes all times whole when multiplied by it."""
        return math.lcm(*(time.denominator for time in (
            *self.forward, *self.backward, *self.weights, self.hop, *self.links.values())))


@dataclass(frozen=True)
class Timeline:
    """Hold when each action begins and ends."""

    # What was timed.
    schedule: Schedule
    times: Times
    # By rank and action.  Joined actions begin and end together.
    starts: tuple[tuple[Fraction, ...], ...]
    ends: tuple[tuple[Fraction, ...], ...]
    # Rank and number of the action whose end, or whose message, let an action begin; None if it
    # began at 0 without one.
    causes: tuple[tuple[ActionPlace | None, ...], ...]

    @property
    def makespan(self) -> Fraction:
        """Return the time from the first begin on any rank to the last end on any."""
        return max(ends[-1] for ends in self.ends) - min(starts[0] for starts in self.starts)

    @property
    def spans(self) -> tuple[Fraction, ...]:
        """Return the time of each rank from its own first begin to its own last end."""
        return tuple(ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends))

    @property
    def cost(self) -> Fraction:
        """Return the longest span of a rank: what a step costs where steps follow each other.

        The next step of a rank may begin while others still end this one; that is how the
        zero-bubble paper (arXiv 2401.10241) measures.
        """
        return max(self.spans)

    @property
    def work(self) -> tuple[Fraction, ...]:
        """Return the time of each rank in actions."""
        return tuple(sum((self.times.of(action.kind, self.schedule.stage_of(rank, action.chunk))
                          for action in row), Fraction(0))
                     for rank, row in enumerate(self.schedule.rows))

    @property
    def bubble(self) -> Fraction:
        """Return the cost less the mean work of a rank; m (F + B + W) where stages are equal."""
        return self.cost - sum(self.work) / self.schedule.ranks

    @property
    def bubble_rate(self) -> Fraction:
        """Return the bubble as a share of the cost, as the zero-bubble paper does."""
        return self.bubble / self.cost if self.cost else Fraction(0)

    @property
    def bubble_over_work(self) -> Fraction:
        """Return the bubble over the mean work, as Narayanan et al. do (arXiv 2104.04473)."""
        work = sum(self.work) / self.schedule.ranks
        return self.bubble / work if work else Fraction(0)

    @property
    def idle_share(self) -> Fraction:
        """Return the idle share of ranks and makespan, as the GPipe paper does."""
        every = self.schedule.ranks * self.makespan
        return 1 - sum(self.work) / every if every else Fraction(0)

    def critical_path(self) -> list[ActionPlace]:
        """Return the chain of actions, without gaps but for hops, that leads to the last end.

        Each is given by its rank and number, in the order of time.
        """
        last = max(range(self.schedule.ranks), key=lambda rank: self.ends[rank][-1])
        place: ActionPlace | None = (last, len(self.ends[last]) - 1)
        found = []
        while place is not None:
            found.append(place)
            place = self.causes[place[0]][place[1]]
        return found[::-1]


def time_actions(schedule: Schedule, times: Times) -> Timeline:
    """Compute when each action begins and ends.

    Parameters
    ----------
    schedule : Schedule
        One that passes `mm3d.training.schedules.messages.check`.
    times : Times
        Times of its stages.

    Raises
    ------
    ValueError
        When the times are of another number of stages.
    ScheduleError
        By the rule "progress", when actions wait for each other for ever.
    """
    if len(times.forward) != schedule.stage_count:
        raise ValueError(f"times of {len(times.forward)} stages for a schedule of "
                         f"{schedule.stage_count}")
    run = _Run(schedule, times)
    run.to_the_end()
    known = {when: Fraction(when, run.scale) for table in (run.starts, run.ends)
             for when in set().union(*table)}    # many actions begin at once, or as others end
    return Timeline(schedule, times, *(tuple(map(tuple, table)) for table in (
        [[known[start] for start in starts] for starts in run.starts],
        [[known[end] for end in ends] for ends in run.ends], run.causes)))


def pairs(schedule: Schedule) -> set[tuple[int, int]]:
    """Return the ranks, sender and receiver, of all neighbouring stages in both directions."""
    ranks = [schedule.rank_of[stage] for stage in range(schedule.stage_count)]
    forward = set(zip(ranks, ranks[1:]))
    same = {(rank, rank) for rank in ranks}    # chunks, and a stage's own backward
    return forward | {(target, source) for source, target in forward} | same


class _Run:
    """Compute the times of all actions, in whole numbers of a unit that divides all times."""

    def __init__(self, schedule: Schedule, times: Times) -> None:
        self.schedule, self.scale = schedule, times.denominator()
        self.hops = {(source, target): int(times.hop_between(source, target) * self.scale)
                     for source, target in pairs(schedule)}
        self.groups = [schedule.groups(rank) for rank in range(schedule.ranks)]
        self.durations = {(kind, stage): int(times.of(kind, stage) * self.scale)
                          for kind in ("F", "B", "W", "BW") for stage in schedule.rank_of}
        self.starts: list[list[int]] = [[] for _ in range(schedule.ranks)]
        self.ends: list[list[int]] = [[] for _ in range(schedule.ranks)]
        self.causes: list[list[ActionPlace | None]] = [[] for _ in range(schedule.ranks)]
        self.done = [0] * schedule.ranks    # groups
        self.happened: dict[Completion, tuple[int, ActionPlace]] = {}
        self.waiting: dict[Completion, int] = {}    # the rank that waits for an event

    def to_the_end(self) -> None:
        """Time all actions."""
        ready = list(range(self.schedule.ranks))
        while ready:
            rank = ready.pop()
            while self.done[rank] < len(self.groups[rank]):
                missing = self._group(rank)
                if missing is not None:
                    self.waiting[missing] = rank
                    break
                for action in self.groups[rank][self.done[rank] - 1]:
                    ready += [self.waiting.pop(event)
                              for event in self.schedule.outputs(rank, action)
                              if event in self.waiting]
        for rank, done in enumerate(self.done):
            if done < len(self.groups[rank]):
                raise ScheduleError("progress", "its inputs never arrive", rank,
                                    len(self.ends[rank]))

    def _group(self, rank: int) -> Completion | None:
        """Time the next group of a rank; return an event that it waits for, if there is one."""
        group = self.groups[rank][self.done[rank]]
        place = len(self.ends[rank])
        start, cause = (self.ends[rank][-1], (rank, place - 1)) if place else (0, None)
        for action in group:
            for event in self.schedule.inputs(rank, action):
                if event not in self.happened:
                    return event
                end, source = self.happened[event]
                arrival = end + self.hops[source[0], rank]
                if arrival > start:
                    start, cause = arrival, source
        end = start + sum(self.durations[action.kind, self.schedule.stage_of(rank, action.chunk)]
                          for action in group)
        for index, action in enumerate(group, place):
            self.starts[rank].append(start)
            self.ends[rank].append(end)
            self.causes[rank].append(cause)
            for event in self.schedule.outputs(rank, action):
                self.happened[event] = end, (rank, index)
        self.done[rank] += 1
        return None


def peak_in_flight(schedule: Schedule, kept: Fraction | int = 0) -> tuple[Fraction, ...]:
    """Return the largest number of micro-batches in flight on each rank.

    A micro-batch is in flight in a stage from the begin of its forward on.  `kept` is the share of
    its activations that the gradient of the weights still needs: 0 counts to the end of B, 1 to
    the end of W.  The schedule passes `mm3d.training.schedules.messages.check`.  The result is in
    activations of one micro-batch in one stage: with several chunks a rank a stage has a part of
    the rank's layers only.
    """
    released = {"B": 1 - Fraction(kept), "W": Fraction(kept), "BW": Fraction(1)}
    peaks = []
    for row in schedule.rows:
        held = peak = Fraction(0)
        for action in row:
            held += 1 if action.kind == "F" else -released[action.kind]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)
