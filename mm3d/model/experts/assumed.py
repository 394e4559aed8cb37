"""Assume which experts tokens choose, where arrays have no contents, as in dry runs.

The router's logits are not known there, so the choice is a function of a token's global number.
All experts get equally many pairs, as near as whole numbers can be, and every rank's tokens go to
all experts alike, whatever their groups.  All that follows, capacity among it, is as in a real run
whose router chooses so.
"""

import math
from typing import Sequence

import numpy as np

from mm3d.arrays.backend import Array
from mm3d.grid.activations import Space
from mm3d.grid.axis import Axis
from mm3d.model.experts.token_order import TokenOrder, capacity_of, kept, positions
from mm3d.model.experts.options import ExpertOptions

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
    """Order the tokens of all ranks, whose experts are assumed; nothing is received."""

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
