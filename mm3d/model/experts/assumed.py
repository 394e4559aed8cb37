"""Assume which experts tokens choose, where arrays have no contents, as in dry runs.

The router's logits are not known there, so the choice is a function of a token's global number.
All experts get equally many pairs, as near as whole numbers can be, and every rank's tokens go to
all experts alike.  Or the experts of one rank, the busiest, get a stated multiple of their equal
share, and the others equally what is left.  Everything that follows from the choice, capacity
among it, is computed as in a real run whose router chooses so.
"""

import math
from fractions import Fraction
from typing import Sequence

import numpy as np

from mm3d.arrays.backend import Array
from mm3d.grid.activations import Space
from mm3d.grid.axis import Axis
from mm3d.model.experts.capacity import capacity_of, kept, positions
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.experts.token_order import TokenOrder

UNEVEN_PERIOD = 8    # tokens for each expert, in the pattern of uneven choices
LARGEST_PATTERN = 2 ** 24    # numbers of a pattern


class ChoicePattern:
    """Give each token its experts by its number: a pattern that repeats.

    Parameters
    ----------
    experts : ExpertOptions
        The options, of which the numbers E and k are used.
    busy : range
        The experts of the busiest rank.
    imbalance : float
        How many times their equal share these get.

    Raises
    ------
    ValueError
        When the busiest experts cannot get so much, as a token chooses an expert once at most, or
        there are so many experts that the pattern would take much memory.
    """

    def __init__(self, experts: ExpertOptions, busy: range, imbalance: float = 1.0) -> None:
        E, k = experts.count, experts.top
        period = E // math.gcd(E, k) if imbalance == 1 else UNEVEN_PERIOD * E
        if period * k * E > LARGEST_PATTERN:
            raise ValueError(f"{E} experts with top={k}: their choices repeat after {period} "
                             f"tokens, a table of {period * k * E} numbers: fewer experts would "
                             f"do, so that there are at most {LARGEST_PATTERN}")
        if imbalance == 1:
            self._table = np.arange(period * k).reshape(period, k) % E
        else:
            _check_imbalance(experts, busy, imbalance)
            self._table = _uneven_table(E, k, busy, Fraction(str(imbalance)))
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


def _check_imbalance(experts: ExpertOptions, busy: range, imbalance: float) -> None:
    """Raise ValueError unless tokens can choose the busiest experts so often."""
    E, k = experts.count, experts.top
    if len(busy) == E:
        raise ValueError(f"imbalance={imbalance:g}: a rank that has all {E} experts gets all "
                         f"tokens: divide the experts among replicas, or leave it out")
    most = min(k, len(busy)) * E / (k * len(busy))
    if not 1 <= imbalance <= most:
        raise ValueError(f"imbalance={imbalance:g}: {len(busy)} of {E} experts, of which a token "
                         f"chooses {k}, can get 1 to {most:g} times their equal share")


def _uneven_table(E: int, k: int, busy: range, imbalance: Fraction) -> np.ndarray:
    """Return the experts of a period of tokens, (tokens, k), the busiest ones first.

    The number of busy experts of a token is spread evenly over the tokens, and each group of
    experts is taken in turn.
    """
    others = [e for e in range(E) if e not in busy]
    mean, table = imbalance * k * len(busy) / E, []
    taken = left = 0
    for token in range(UNEVEN_PERIOD * E):
        own = max(math.floor((token + 1) * mean) - taken, k - len(others))
        table.append([busy[(taken + n) % len(busy)] for n in range(own)]
                     + [others[(left + n) % len(others)] for n in range(k - own)])
        taken, left = taken + own, left + k - own
    return np.array(table)


class AssumedOrder(TokenOrder):
    """Order the tokens of all ranks, whose experts are assumed; nothing is received.

    Parameters
    ----------
    space, replicas, spaces
        As for `TokenOrder`.
    experts : ExpertOptions
        The options.
    busy : range
        This rank's experts.
    imbalance : float
        See `ChoicePattern`.
    """

    def __init__(self, space: Space, replicas: Sequence[Axis], spaces: Sequence[Space] | None,
                 experts: ExpertOptions, busy: range, imbalance: float = 1.0) -> None:
        super().__init__(space, replicas, spaces)
        self.experts, self.pattern = experts, ChoicePattern(experts, busy, imbalance)

    @property
    def assumed(self) -> np.ndarray:
        return self._chosen_in(self._runs_of(self._place))

    def _runs_of(self, place: tuple) -> list[int]:
        """Return the numbers of the runs of the ranks at these coordinates, in their order."""
        ranks = np.arange(len(self._lengths)).reshape(self._tokens.shape)[place]
        firsts = np.cumsum(self._lengths) - self._lengths
        return [firsts[rank] + n for rank in np.ravel(ranks) for n in range(self._lengths[rank])]

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
