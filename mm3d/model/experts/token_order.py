"""Decide which tokens experts take, from the choices of all ranks in the order of the tokens.

Tokens are ordered by sequence of the batch and then by position.  A rank's tokens are one run of
that order, or where the positions of a sequence are divided one run for each of its sequences.
The counts of every run, k x E integers, are gathered on all ranks: they say where a token stands
in its expert, the number of (token, choice) pairs of that expert before it, and how many rows
every rank sends to every expert, so no rank asks another one.  All of it is integers in host
memory, so that all meshes drop the same tokens.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Sequence

import numpy as np

from mm3d.arrays.backend import Array
from mm3d.arrays.blocks import block_starts
from mm3d.grid.activations import Space
from mm3d.grid.axis import Axis
from mm3d.grid.layout import Layout, divided_directions
from mm3d.model.experts.options import ExpertOptions


@dataclass(frozen=True)
class GlobalCounts:
    """Hold how often the tokens of all ranks choose each expert."""

    # Int64 (k, E): how many tokens have each expert as their first, second ... choice.
    totals: np.ndarray
    # Int64 (runs of this rank, k, E): the same counts of all tokens before each run.
    before: np.ndarray
    # Int64 (coordinates along `TokenOrder.directions` ..., E): how many pairs of each rank each
    # expert takes.
    kept: np.ndarray


class TokenOrder:
    """Order the tokens of all ranks, and gather the counts of their choices.

    Where the tokens of a rank are follows from the sizes alone, so nothing is sent for it.

    The `space` is that of the activations; `replicas` are directions of replicas that have other
    sequences, the slowest first; `spaces` has the space of each, which may have another number of
    sequences and then divide rows otherwise.

    Ranks have other tokens along the `directions`, in the order of the dimensions of
    `GlobalCounts.kept`, replicas first.  This rank's tokens are cut into `runs`; `starts` and
    `stops`, int64, are the first token of each run of all ranks in the global order of all
    `tokens`, and the one after its last.
    """

    def __init__(self, space: Space, replicas: Sequence[Axis] = (),
                 spaces: Sequence[Space] | None = None) -> None:
        self.backend = space.grid.backend
        self.directions = [*replicas, *(space.grid[c] for c in divided_directions(space.rows))]
        spaces = spaces or [space] * math.prod(axis.size for axis in replicas)
        shares = [one.batch for one in spaces]
        self.tokens = sum(shares) * space.seq
        runs = cache(_runs_of_replica)    # most replicas are alike, and there may be thousands
        self._runs, starts, lengths = map(np.concatenate, zip(*(
            (count, first * space.seq + begins, lengths)
            for first, (count, begins, lengths) in zip(block_starts(shares), map(runs, spaces)))))
        shape = [axis.size for axis in self.directions]
        self._place = tuple(axis.rank for axis in self.directions)
        numbers = np.arange(len(self._runs)).reshape(shape)
        self._gathers = []
        for n, axis in reversed([*enumerate(self.directions)]):
            along = self._runs[numbers[self._place[:n]].reshape(axis.size, -1)]
            self._gathers.append((axis, along.sum(axis=1).tolist()))
        own = int(numbers[self._place])
        self._firsts = np.cumsum(self._runs) - self._runs
        self._own = slice(int(self._firsts[own]), int(self._firsts[own] + self._runs[own]))
        self._tokens = self._sum_by_rank(lengths).reshape(shape)
        stops = np.cumsum(lengths[self._own]).tolist()
        self.runs = [slice(stop - length, stop)
                     for stop, length in zip(stops, lengths[self._own].tolist())]
        self._order = np.argsort(starts, kind="stable")
        self.starts, self.stops = starts, starts + lengths

    def tokens_along(self, axis: Axis) -> list[int]:
        """Return the number of tokens of each rank along one of the directions."""
        return self._tokens[self._line(axis)].tolist()

    def _line(self, axis: Axis) -> tuple:
        """Return the index of the ranks along a direction, by the coordinates of `directions`."""
        return tuple(slice(None) if one is axis else rank
                     for one, rank in zip(self.directions, self._place))

    @property
    def assumed(self) -> np.ndarray | None:
        """Return the assumed experts of this rank's tokens, (tokens, k); None if none are."""
        return None

    def gather_chosen(self, chosen: np.ndarray, axis: Axis) -> np.ndarray:
        """Gather the experts of the tokens of all ranks along `axis`, (tokens, k)."""
        return self.backend.to_host(axis.all_gather(self.backend.asarray(chosen), 0,
                                                    self.tokens_along(axis)))

    def gather(self, counts: np.ndarray, capacity: int | None, order: str) -> GlobalCounts:
        """Gather the counts of all ranks' runs; every rank must call it.

        `counts`, int64 (runs of this rank, k, E), says how many tokens of each run have each
        expert as their first, second ... choice; an expert takes `capacity` pairs, or with None
        all, in the `order` of `positions`.
        """
        a = self.backend.asarray(np.ascontiguousarray(counts))
        for axis, lengths in self._gathers:
            a = axis.all_gather(a, 0, lengths)
        runs = self._read_counts(a)[self._order]
        before, totals = np.cumsum(runs, axis=0) - runs, runs.sum(axis=0)
        taken = _count_kept(runs, before, totals, capacity, order)
        before, taken = self._by_rank(before), self._by_rank(taken)
        kept = self._sum_by_rank(taken)
        return GlobalCounts(totals, before[self._own],
                            kept.reshape(*(axis.size for axis in self.directions), -1))

    def _sum_by_rank(self, of_runs: np.ndarray) -> np.ndarray:
        """Sum integers of all runs, in the order of the ranks, for each rank."""
        sums = np.concatenate([0 * of_runs[:1], np.cumsum(of_runs, axis=0)])
        return sums[self._firsts + self._runs] - sums[self._firsts]

    def _read_counts(self, a: Array) -> np.ndarray:
        """Return the gathered counts of all runs, in the order of the ranks."""
        return self.backend.to_host(a)

    def _by_rank(self, a: np.ndarray) -> np.ndarray:
        """Reorder runs from the order of the tokens to the order of the ranks."""
        out = np.empty_like(a)
        out[self._order] = a
        return out


def _runs_of_replica(space: Space) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return how many runs each rank of a replica has, and each run's first token and length.

    Tokens are counted from the first of the replica.
    """
    layout, grid = Layout(space.rows), space.grid.shape
    sizes = [grid[c] for c in layout.letters]
    places = dict(zip(layout.letters, map(np.ravel, np.indices(sizes))))
    row, rows, position, length = (
        np.broadcast_to(part, math.prod(sizes))
        for one in layout.slices(grid, (space.batch, space.seq), places)
        for part in (one.start, one.stop - one.start))
    whole = grid.ranks_along(layout.dims[1]) == 1
    runs = np.where(whole, 1, rows)
    ranks = np.repeat(np.arange(len(runs)), runs)
    number = np.arange(len(ranks)) - np.repeat(np.cumsum(runs) - runs, runs)
    return (runs, (row[ranks] + number) * space.seq + position[ranks],
            (length * np.where(whole, rows, 1))[ranks])


def _count_kept(runs: np.ndarray, before: np.ndarray, totals: np.ndarray, capacity: int | None,
                order: str) -> np.ndarray:
    """Count the pairs of each run, (runs, k, E), that experts take: (runs, E)."""
    if capacity is None:
        return runs.sum(axis=1)
    if order == "position":
        return np.clip(capacity - before.sum(axis=1), 0, runs.sum(axis=1))
    first = before + np.cumsum(totals, axis=0) - totals
    return np.clip(capacity - first, 0, runs).sum(axis=1)


def capacity_of(experts: ExpertOptions, tokens: int) -> int | None:
    """Return how many (token, choice) pairs an expert takes, as the convention computes it.

    They are at most the global number of tokens, since a token is sent to an expert once; None
    when nothing is dropped.  Raises ValueError when an expert would take no token, or the choices
    cannot be counted.
    """
    experts.check_tokens(tokens)
    if experts.capacity is None:
        return None
    factor, top, count = experts.capacity, experts.top, experts.count
    if experts.convention == "mm3d":
        # A decimal factor is meant as written: 1.1 * 10 is 11, not a float above it.
        taken = math.ceil(Fraction(str(factor)) * top * tokens / count)
    elif experts.convention == "megatron":
        taken = math.ceil(top * tokens / count * factor)
    elif experts.convention == "deepspeed":
        taken = math.ceil(np.float32(tokens / count) * np.float32(factor * top))    # as it rounds
    else:
        taken = int(factor * (top * tokens / count))
    taken = min(max(taken, experts.least_capacity), tokens)
    if not taken:
        raise ValueError(f"capacity={factor!r} drops every one of {tokens} tokens sent to {top} "
                         f"of {count} experts: at least capacity={count / (top * tokens):.6g}, "
                         f"or None to drop none, would do")
    return taken


def counts(chosen: np.ndarray, experts: int) -> np.ndarray:
    """Count how many tokens have each expert as their first, second ... choice: int64, (k, E).

    `chosen` are the experts of the tokens, (tokens, k).
    """
    return np.stack([np.bincount(column, minlength=experts) for column in chosen.T])


def positions(chosen: np.ndarray, before: np.ndarray, totals: np.ndarray,
              order: str) -> np.ndarray:
    """Return the place of each of this rank's (token, choice) pairs in its expert, from 0 on.

    `chosen`, int64 (tokens, k), has the experts of this rank's tokens, which follow each other in
    the global order; `before` and `totals`, int64 (k, E), are `counts` summed over all tokens
    before this rank's first, and over all.  By the order "position" tokens come in their global
    order; by "choice" all first choices come before all second choices, each in the global order
    of the tokens.  The result is int64, (tokens, k).
    """
    count = totals.shape[1]
    if order == "position":
        flat = chosen.ravel()
        return (_places(flat, count) + before.sum(0)[flat]).reshape(chosen.shape)
    first = before + np.cumsum(totals, axis=0) - totals
    return np.stack([_places(column, count) + first[n][column]
                     for n, column in enumerate(chosen.T)], axis=1)


def _places(numbers: np.ndarray, count: int) -> np.ndarray:
    """Return for each number, below `count`, how many equal ones come before it."""
    order = np.argsort(numbers, kind="stable")
    many = np.bincount(numbers, minlength=count)
    places = np.empty(len(numbers), np.int64)
    places[order] = np.arange(len(numbers)) - np.repeat(np.cumsum(many) - many, many)
    return places


def kept(places: np.ndarray, capacity: int | None) -> np.ndarray:
    """Return which (token, choice) pairs their experts take, (tokens, k), from their `positions`.

    With the capacity None all are taken.
    """
    return np.ones(places.shape, bool) if capacity is None else places < capacity


LARGEST_PATTERN = 2 ** 24    # numbers of a pattern


class ChoicePattern:
    """Give each token its experts by its number: a pattern that repeats, by E and k alone.

    Raises ValueError when the pattern of that many experts would take too much memory.
    """

    def __init__(self, experts: ExpertOptions) -> None:
        E, k = experts.count, experts.top
        period = E // math.gcd(E, k)
        if period * k * E > LARGEST_PATTERN:
            raise ValueError(f"{E} experts with top={k}: their choices repeat after {period} "
                             f"tokens, a table of {period * k * E} numbers: fewer experts would "
                             f"do, so that there are at most {LARGEST_PATTERN}")
        self._table = np.arange(period * k).reshape(period, k) % E
        each = np.zeros((len(self._table) + 1, k, E), np.int64)
        for n in range(k):
            each[np.arange(len(self._table)) + 1, n, self._table[:, n]] = 1
        self._before = np.cumsum(each, axis=0)

    def chosen(self, start: int, stop: int) -> np.ndarray:
        """Return the experts of the tokens from `start` up to but not `stop`, (tokens, k)."""
        return self._table[np.arange(start, stop) % len(self._table)]

    def counts_before(self, tokens: np.ndarray) -> np.ndarray:
        """Count the choices of all tokens before each of these: (tokens, k, E)."""
        times, rest = np.divmod(tokens, len(self._table))
        return times[:, None, None] * self._before[-1] + self._before[rest]


class AssumedOrder(TokenOrder):
    """Order the tokens of all ranks, whose experts are assumed, as in dry runs.

    Arrays have no contents there, so the choice is a function of a token's global number.  All
    experts get equally many pairs, as near as whole numbers can be, and every rank's tokens go to
    all experts alike, whatever their groups.  All that follows, capacity among it, is as in a real
    run whose router chooses so.
    """

    def __init__(self, space: Space, replicas: Sequence[Axis], spaces: Sequence[Space] | None,
                 experts: ExpertOptions) -> None:
        super().__init__(space, replicas, spaces)
        self.experts, self.pattern = experts, ChoicePattern(experts)

    @property
    def assumed(self) -> np.ndarray:
        return self._chosen_in(self._runs_of(self._place))

    def _runs_of(self, place: tuple) -> list[int]:
        """Return the numbers of the runs of the ranks at these coordinates, in their order."""
        ranks = np.arange(len(self._runs)).reshape(self._tokens.shape)[place]
        return [self._firsts[rank] + n for rank in np.ravel(ranks)
                for n in range(self._runs[rank])]

    def _chosen_in(self, runs: list[int]) -> np.ndarray:
        """Return the experts of the tokens of some runs, (tokens, k)."""
        every = [self.pattern.chosen(self.starts[run], self.stops[run]) for run in runs]
        return np.concatenate([*every, self.pattern.chosen(0, 0)])

    def _read_counts(self, a: Array) -> np.ndarray:
        before = self.pattern.counts_before
        return before(self.stops) - before(self.starts)

    def gather_chosen(self, chosen: np.ndarray, axis: Axis) -> np.ndarray:
        axis.all_gather(self.backend.asarray(chosen), 0, self.tokens_along(axis))
        before, order = self.pattern.counts_before, self.experts.dropping_order
        totals, found = before(np.array([self.tokens]))[0], [self.pattern.chosen(0, 0)]
        capacity = capacity_of(self.experts, self.tokens)
        for run in self._runs_of(self._line(axis)):
            every = self._chosen_in([run])
            places = positions(every, before(self.starts[run:run + 1])[0], totals, order)
            found.append(np.where(kept(places, capacity), every, -1))
        return np.concatenate(found)
