"""Sum up the choices of all ranks in the global order of the tokens.

Tokens are ordered by sequence of the batch and then by position.  A rank's tokens are one run of
that order, or where the positions of a sequence are divided one run for each of its sequences.
The counts of every run, k x E integers, are gathered on all ranks: they say where a token stands
in its expert, and how many rows every rank sends to every expert, so no rank asks another one.
"""

from dataclasses import dataclass
from typing import Sequence

import numpy as np

from mm3d.arrays.backend import Backend
from mm3d.grid.activations import Space
from mm3d.grid.axis import Axis


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
        Space of the activations.
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
        grid = self.grid = space.grid
        sequences, _, positions = space.rows.partition(",")
        batch, seq = space.local_shape(1)[:2]
        divided = any(grid[c].size > 1 for c in positions)
        own = batch if divided else 1
        length = batch * seq // own if own else 0
        self.runs = [slice(n * length, (n + 1) * length) for n in range(own)]
        outer = [*replicas, *(grid[c] for c in sequences)]
        inner = [grid[c] for c in positions]
        self.directions = [*outer, *inner]
        self._sizes = [axis.size for axis in self.directions]
        self._gathers: list[tuple[Axis, int, list[int]]] = []
        self._column, columns = 0, 1
        for axis in reversed(inner):
            self._gathers.append((axis, 1, [columns] * axis.size))
            self._column += axis.rank * columns
            columns *= axis.size
        self.tokens = space.batch * space.seq
        for axis in replicas:
            self.tokens = sum(axis.comm.allgather(self.tokens))
        self._first, lengths = 0, [own]
        for axis in reversed(outer):
            every = axis.comm.allgather(lengths) if axis.size > 1 else [lengths]
            counts = [sum(one) for one in every]
            self._gathers.append((axis, 0, counts))
            self._first += sum(counts[:axis.rank])
            lengths = [n for one in every for n in one]
        self._lengths, self._columns = lengths, columns

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
        library: Backend = self.grid.backend
        a = library.asarray(np.ascontiguousarray(counts[:, None]))
        for axis, dim, lengths in self._gathers:
            a = axis.all_gather(a, dim, lengths)
        every = library.to_host(a)                      # (sequences, positions, k, E)
        runs = every.reshape(-1, *every.shape[2:])
        before = np.cumsum(runs, axis=0) - runs
        totals = runs.sum(axis=0)
        taken = _count_kept(runs, before, totals, capacity, order)
        own = before.reshape(every.shape)[self._first:self._first + len(self.runs), self._column]
        return GlobalCounts(totals, own, self._sum_ranks(taken.reshape(*every.shape[:2], -1)))

    def _sum_ranks(self, kept: np.ndarray) -> np.ndarray:
        """Sum the runs of each rank: (sequences, positions, E) to the shape of `kept`."""
        starts = np.cumsum(self._lengths) - self._lengths
        found = [kept[start:start + length].sum(axis=0)
                 for start, length in zip(starts, self._lengths)]
        return np.stack(found).reshape(*self._sizes, kept.shape[-1])


def _count_kept(runs: np.ndarray, before: np.ndarray, totals: np.ndarray, capacity: int | None,
                order: str) -> np.ndarray:
    """Count the pairs of each run, (runs, k, E), that experts take: (runs, E)."""
    if capacity is None:
        return runs.sum(axis=1)
    if order == "position":
        return np.clip(capacity - before.sum(axis=1), 0, runs.sum(axis=1))
    first = before + np.cumsum(totals, axis=0) - totals
    return np.clip(capacity - first, 0, runs).sum(axis=1)
