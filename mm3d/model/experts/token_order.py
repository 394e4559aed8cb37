"""Sum up the choices of all ranks in the global order of the tokens.

Tokens are ordered by sequence of the batch and then by position.  A rank's tokens are one run of
that order, or where the positions of a sequence are divided one run for each of its sequences.
The counts of every run, k x E integers, are gathered on all ranks: they say where a token stands
in its expert, and how many rows every rank sends to every expert, so no rank asks another one.
"""

from dataclasses import dataclass
from typing import Sequence

import numpy as np

from mm3d.grid.activations import Space
from mm3d.grid.axis import Axis
from mm3d.grid.layout import Layout, divided_directions


@dataclass(frozen=True)
class GlobalCounts:
    """Hold how often the tokens of all ranks choose each expert.

    Attributes
    ----------
    totals : ndarray of int64
        (k, E): how many tokens have each expert as their first, second ... choice.
    before : ndarray of int64
        (runs of this rank, k, E): these numbers of all tokens before each run.
    kept : ndarray of int64
        (replicas, copies of other rows ..., E): how many pairs of each rank its experts take, by
        the coordinates along `TokenOrder.directions`.
    """

    totals: np.ndarray
    before: np.ndarray
    kept: np.ndarray


class TokenOrder:
    """Order the tokens of all ranks, and gather what is counted in them.

    Every rank must create it.

    Parameters
    ----------
    space : Space
        Space of the activations; that of other replicas may divide rows otherwise.
    replicas : sequence of Axis
        Directions of replicas that have other sequences, the slowest first.

    Attributes
    ----------
    directions : list of Axis
        The directions along which ranks have other tokens, in the order of the dimensions of
        `GlobalCounts.kept`; those of replicas first.
    runs : list of slice
        This rank's tokens, cut into runs.
    tokens : int
        Global number of tokens.
    """

    def __init__(self, space: Space, replicas: Sequence[Axis] = ()) -> None:
        self.backend = space.grid.backend
        self.directions = [*replicas, *(space.grid[c] for c in divided_directions(space.rows))]
        first, batch = 0, space.batch
        for axis in reversed(replicas):
            every = axis.comm.allgather(batch)
            first, batch = first + sum(every[:axis.rank]), sum(every)
        self.tokens = batch * space.seq
        starts, self.runs = _runs(space, first)
        lengths = [len(starts)]
        self._gathers, self._first = [], 0
        for axis in reversed(self.directions):
            every = axis.comm.allgather((starts, lengths)) if axis.size > 1 else [
                (starts, lengths)]
            counts = [len(one) for one, _ in every]
            self._gathers.append((axis, counts))
            self._first += sum(counts[:axis.rank])
            starts, lengths = ([n for one in every for n in one[k]] for k in (0, 1))
        self._order, self._lengths = np.argsort(starts, kind="stable"), lengths

    def gather(self, counts: np.ndarray, capacity: int | None, order: str) -> GlobalCounts:
        """Gather the counts of all ranks' runs; every rank must call it.

        Parameters
        ----------
        counts : ndarray of int64
            (runs of this rank, k, E): how many tokens of each run have each expert as their
            first, second ... choice.
        capacity : int or None
            How many pairs an expert takes; None for all.
        order : {"position", "choice"}
            In which order, see `mm3d.model.experts.capacity.positions`.
        """
        a = self.backend.asarray(np.ascontiguousarray(counts))
        for axis, lengths in self._gathers:
            a = axis.all_gather(a, 0, lengths)
        runs = self.backend.to_host(a)[self._order]
        before, totals = np.cumsum(runs, axis=0) - runs, runs.sum(axis=0)
        taken = _count_kept(runs, before, totals, capacity, order)
        before, taken = self._by_rank(before), self._by_rank(taken)
        starts = np.cumsum(self._lengths) - self._lengths
        kept = np.stack([taken[start:start + length].sum(axis=0)
                         for start, length in zip(starts, self._lengths)])
        return GlobalCounts(totals, before[self._first:self._first + len(self.runs)],
                            kept.reshape(*(axis.size for axis in self.directions), -1))

    def _by_rank(self, a: np.ndarray) -> np.ndarray:
        """Put what is in the order of the tokens into that of the ranks."""
        out = np.empty_like(a)
        out[self._order] = a
        return out


def _runs(space: Space, first: int) -> tuple[list[int], list[slice]]:
    """Return the first global token of each of this rank's runs, and its tokens on this rank.

    `first` is the first sequence of the activations in the batch.
    """
    sequences, positions = Layout(space.rows).slices(space.grid, (space.batch, space.seq))
    length = positions.stop - positions.start
    count = sequences.stop - sequences.start
    numbers = range(first + sequences.start, first + sequences.stop)
    if length == space.seq:
        return [numbers.start * space.seq], [slice(0, count * length)]
    return ([number * space.seq + positions.start for number in numbers],
            [slice(n * length, (n + 1) * length) for n in range(count)])


def _count_kept(runs: np.ndarray, before: np.ndarray, totals: np.ndarray, capacity: int | None,
                order: str) -> np.ndarray:
    """Count the pairs of each run, (runs, k, E), that experts take: (runs, E)."""
    if capacity is None:
        return runs.sum(axis=1)
    if order == "position":
        return np.clip(capacity - before.sum(axis=1), 0, runs.sum(axis=1))
    first = before + np.cumsum(totals, axis=0) - totals
    return np.clip(capacity - first, 0, runs).sum(axis=1)
