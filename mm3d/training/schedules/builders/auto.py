"""Search for the best schedule with one stage a rank, for given times and a limit of memory.

Ranks decide one after another in the order of time, as in list scheduling: forward and backward in
turns as their inputs arrive and memory allows; W in the gaps, and where its memory is needed.
A few rules (`_Rules`) decide which gap is worth a W; all combinations of them are tried.
"""

import heapq
import itertools
import math
from fractions import Fraction
from typing import NamedTuple

from mm3d.training.schedules.builders.loops import one_f_one_b, zb_h1, zb_h2
from mm3d.training.schedules.clock import Exact, Times, exact, peak_in_flight, time_actions
from mm3d.training.schedules.schedule import Action, Schedule, builder, loop

SEARCHED = 2 ** 15    # forward steps, as each schedule is made 54 times: half a minute


@builder("auto", SEARCHED)
def auto(ranks: int, microbatches: int, times: Times | None = None,
         memory: Exact | None = None, kept: Exact = 1) -> Schedule:
    """Search for the schedule of the least cost with one stage a rank.

    That is 1F1B, ZB-H1 or ZB-H2 where one of these fits the memory and is better than what is
    found.  By default the times of the stages are F = B = W = 1, and no time for hops.  A rank
    may hold at most `memory` activations of one micro-batch, by default as many as there are
    ranks, the memory of 1F1B; W still needs the share `kept` of them after B, from 0 to 1.

    Raises ValueError when not even one micro-batch fits, or the times are of another number of
    stages.
    """
    times = times or Times.equal(ranks, 1, 1, 1)
    limit = _Limit(exact(ranks if memory is None else memory), exact(kept))
    if limit.memory < 1 or not 0 <= limit.kept <= 1:
        raise ValueError(f"memory {limit.memory}, of which {limit.kept} is kept for W: memory for "
                         f"one micro-batch at least, and a share from 0 to 1 are needed")
    if len(times.forward) != ranks:
        raise ValueError(f"times of {len(times.forward)} stages: auto has one stage on each of "
                         f"the {ranks} ranks")
    known = (build(ranks, microbatches) for build in (one_f_one_b, zb_h1, zb_h2))
    fitting = [schedule for schedule in known
               if max(peak_in_flight(schedule, limit.kept)) <= limit.memory]
    shares = [Fraction(n, 2) for n in range(3)]
    every = (_Ranks(ranks, microbatches, times, limit, _Rules(*rules))
             for rules in itertools.product(shares, shares, shares, (True, False)))
    found = min(every, key=_Ranks.cost).schedule()
    return min([*fitting, found], key=lambda schedule: time_actions(schedule, times).cost)


class _Limit(NamedTuple):
    """Hold the limit of a rank's memory."""

    memory: Fraction    # the most that a rank may hold, in activations of one micro-batch
    kept: Fraction    # the share of them that W still needs after B


class _Rules(NamedTuple):
    """Describe how ranks decide."""

    # The share of its own time by which a forward may delay the first backward.
    patience: Fraction
    overrun: Fraction    # the share of its own time by which a W may delay what arrives next
    # The same, where the gap would make the rank the one that has waited longest.
    level: Fraction
    # Whether W, and not a backward that is ready too, frees memory for a forward.
    weights_first: bool


def least_cost(ranks: int, microbatches: int, times: Times, memory: Fraction) -> Fraction:
    """Return a lower bound of the cost of schedules with one stage a rank.

    All of a rank's work has to be done.  Until its first backward can begin, after a forward and a
    backward through all later stages, a rank has nothing to do but forwards, as many as there are
    and fit its memory.  And between the first forward of a rank and its last W each later rank has
    to do all its forwards and backwards, which arrive through the ranks between and go back.
    """
    bounds = []
    for rank in range(ranks):
        work = microbatches * (times.of("F", rank) + times.of("BW", rank))
        between = Fraction(0)    # there from a rank to a later one, and back
        for later in range(rank + 1, ranks):
            between += times.forward[later - 1] + times.backward[later - 1] + 2 * times.hop
            bounds.append(between + times.weights[rank] + microbatches * (
                times.forward[later] + times.backward[later]))
        round_trip = between + times.forward[-1] + times.backward[-1] - times.backward[rank]
        forwards = min(microbatches, math.floor(memory)) * times.forward[rank]
        bounds.append(work + max(round_trip - forwards, Fraction(0)))
    return max(bounds)


class _Ranks:
    """Hold all ranks while a schedule is being made; times and memory in whole numbers."""

    def __init__(self, ranks: int, microbatches: int, times: Times, limit: _Limit,
                 rules: _Rules) -> None:
        scale, self.unit = times.denominator(), limit.kept.denominator
        self.microbatches, self.rules = microbatches, rules
        self.durations = {"F": [int(time * scale) for time in times.forward],
                          "B": [int(time * scale) for time in times.backward],
                          "W": [int(time * scale) for time in times.weights]}
        self.hop = int(times.hop * scale)
        kept = limit.kept.numerator
        self.held_after = {"F": self.unit, "B": kept - self.unit, "W": -kept}
        self.limit = math.floor(limit.memory * self.unit)
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.done = {kind: [0] * ranks for kind in "FBW"}
        self.held, self.first, self.free, self.idle = ([0] * ranks for _ in range(4))
        self.turn = ["F"] * ranks
        # When the inputs of F and B have arrived, or will, as far as that is known by now.
        self.arrivals: dict[str, list[list[int]]] = {
            "F": [[0] * microbatches, *([] for _ in range(ranks - 1))],
            "B": [[] for _ in range(ranks)]}
        self.wake: list[tuple[int, int]] = [(0, rank) for rank in range(ranks)]

    def cost(self) -> int:
        """Make the schedule; return its cost, which may be less without waiting."""
        while self.wake:
            now, rank = heapq.heappop(self.wake)
            if self.free[rank] > now:
                continue    # woken for something that it has seen meanwhile
            kind = self._choice(rank, now)
            if kind:
                self._begin(rank, now, kind)
            else:
                for time in self._coming(rank, now):
                    heapq.heappush(self.wake, (time, rank))
        return max(end - first for end, first in zip(self.free, self.first))

    def schedule(self) -> Schedule:
        """Return the schedule that `cost` has made."""
        return Schedule(loop(len(self.rows)), tuple(map(tuple, self.rows)))

    def _choice(self, rank: int, now: int) -> str | None:
        """Return the kind of action that a free rank takes now; None to wait."""
        forward, backward = (self._next(kind, rank) for kind in "FB")
        forward_here = forward is not None and forward <= now
        backward_here = backward is not None and backward <= now
        weights_left = self.done["W"][rank] < self.done["B"][rank]
        fits = self._fits(rank)
        if self.turn[rank] == "F" and forward_here:
            if not fits and weights_left and (self.rules.weights_first or not backward_here):
                return "W"
            if fits and (backward is None or backward_here or self._patient(rank, now, backward)):
                return "F"
        if backward_here:
            return "B"
        if forward_here and fits and (
                backward is None or self._patient(rank, now, backward)):
            return "F"
        return "W" if weights_left and self._worth(rank, now) else None

    def _patient(self, rank: int, now: int, backward: int) -> bool:
        """Say whether a forward may come before the backward that arrives then."""
        took = self.durations["F"][rank]
        return self.done["B"][rank] > 0 or now + took - backward <= self.rules.patience * took

    def _worth(self, rank: int, now: int) -> bool:
        """Say whether a W is taken rather than waiting for the next arrival."""
        coming = self._coming(rank, now)
        if not coming:
            return True
        gap, took = min(coming) - now, self.durations["W"][rank]
        longest = self.idle[rank] + gap > max(self.idle)
        share = max(self.rules.overrun, self.rules.level if longest else 0)
        return took - gap <= share * took

    def _coming(self, rank: int, now: int) -> list[int]:
        """Return the known times after now at which a rank can begin F or B."""
        kinds = "FB" if self._fits(rank) else "B"
        times = (self._next(kind, rank) for kind in kinds)
        return [time for time in times if time is not None and time > now]

    def _next(self, kind: str, rank: int) -> int | None:
        """Return when the input of the next F or B arrives; None when that is not known."""
        known, done = self.arrivals[kind][rank], self.done[kind][rank]
        return known[done] if done < len(known) else None

    def _fits(self, rank: int) -> bool:
        return self.held[rank] + self.unit <= self.limit

    def _begin(self, rank: int, now: int, kind: str) -> None:
        """Let a rank begin an action, and others know when its result arrives."""
        if self.rows[rank]:
            self.idle[rank] += now - self.free[rank]
        else:
            self.first[rank] = now
        self.rows[rank].append(Action(kind, 0, self.done[kind][rank]))
        self.done[kind][rank] += 1
        self.held[rank] += self.held_after[kind]
        end = self.free[rank] = now + self.durations[kind][rank]
        heapq.heappush(self.wake, (end, rank))
        if kind == "W":
            return
        self.turn[rank] = "B" if kind == "F" else "F"
        if kind == "F" and rank == len(self.rows) - 1:
            self.arrivals["B"][rank].append(end)
            return
        other = rank + 1 if kind == "F" else rank - 1
        if other >= 0:
            self.arrivals[kind][other].append(end + self.hop)
            if self.free[other] <= now:
                heapq.heappush(self.wake, (now, other))
