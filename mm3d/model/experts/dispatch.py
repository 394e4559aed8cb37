"""Send rows of tokens to the ranks that have their experts, and the results back.

A rank has rows for experts everywhere, ordered by expert and then by token.  Along the direction
that divides the experts each rank gets the rows of its own experts from the ranks with its place
in other replicas, an all-to-all of blocks whose lengths follow from the counts that all ranks
know.  It puts them in the order of experts and then of tokens, in which every expert's rows stand
as they would in one process.  The way back is the same in reverse.
"""

from dataclasses import dataclass

import numpy as np

from mm3d.arrays.backend import Array
from mm3d.arrays.blocks import block_lengths
from mm3d.arrays.grouped_products import Segment, cut_segments, segments_of
from mm3d.grid.activations import Space
from mm3d.grid.axis import Axis
from mm3d.grid.layout import divided_directions
from mm3d.model.experts.grouped_product import DividedRows
from mm3d.model.experts.token_order import TokenOrder


@dataclass(frozen=True)
class Plan:
    """Hold where the rows of this rank's tokens go, in integers on the host.

    Attributes
    ----------
    pairs : ndarray of int64
        The (token, choice) pairs that experts take, numbered k token + choice, by expert.
    places : ndarray of int64
        (tokens, k): the place of each pair in `pairs`; -1 where it is dropped.
    sends, receives : list of int
        Rows for, and from, each rank along the direction that divides the experts.
    arrivals : ndarray of int64 or None
        For each row of this rank's experts, by expert and token, its place among the rows
        received; None if they come in that order.
    rows : DividedRows
        The rows of the group of ranks that multiplies together.
    """

    pairs: np.ndarray
    places: np.ndarray
    sends: list[int]
    receives: list[int]
    arrivals: np.ndarray | None
    rows: DividedRows

    @property
    def tokens(self) -> np.ndarray:
        """Return the token of each of `pairs`."""
        return self.pairs // self.places.shape[1]


class Dispatch:
    """Send rows to experts and back.

    Parameters
    ----------
    outer, inner : Space
        The spaces of activations around a pair of products.
    order : TokenOrder
        The order of the tokens.
    experts : int
        Number of experts.
    axis : Axis, optional
        The direction that divides them, one of those of `order`; without it every rank's group
        has all experts.

    Attributes
    ----------
    first, own : int
        The first of this rank's experts, and how many it has.
    """

    def __init__(self, outer: Space, inner: Space, order: TokenOrder, experts: int,
                 axis: Axis | None = None) -> None:
        grid = outer.grid
        self.backend, self.order, self.axis = grid.backend, order, axis
        self._counts = block_lengths(experts, axis.size if axis else 1)
        self._rank = axis.rank if axis else 0
        self.first, self.own = sum(self._counts[:self._rank]), self._counts[self._rank]
        self._line = _line(outer, inner)        # divides rows in the outer space
        self._across = _line(inner, outer)      # and in the inner one

    def plan(self, chosen: np.ndarray, taken: np.ndarray, kept: np.ndarray) -> Plan:
        """Plan the ways of this rank's rows.

        Parameters
        ----------
        chosen : ndarray of int64
            (tokens, k): the experts of this rank's tokens.
        taken : ndarray of bool
            (tokens, k): which pairs their experts take.
        kept : ndarray of int64
            See `mm3d.model.experts.token_order.GlobalCounts`.
        """
        numbers = np.flatnonzero(taken)
        pairs = numbers[np.argsort(chosen.ravel()[numbers], kind="stable")]
        places = np.full(chosen.size, -1)
        places[pairs] = np.arange(len(pairs))
        free = (self.axis, self._line)
        index = tuple(slice(None) if any(axis is one for one in free) else axis.rank
                      for axis in self.order.directions)
        every = kept[index].reshape(self.axis.size if self.axis else 1,
                                    self._line.size if self._line else 1, -1)
        place = self._line.rank if self._line else 0
        sends = [int(part.sum()) for part in
                 np.split(every[self._rank, place], np.cumsum(self._counts)[:-1])]
        own = every[:, :, self.first:self.first + self.own]
        return Plan(pairs, places.reshape(chosen.shape), sends,
                    own[:, place].sum(axis=1).tolist(), _arrivals(own[:, place]),
                    self._divide_rows(own.sum(axis=0)))

    def _divide_rows(self, lengths: np.ndarray) -> DividedRows:
        """Divide the rows of each rank along the line by expert, (ranks, experts)."""
        outer, total = lengths.sum(axis=1).tolist(), int(lengths.sum())
        inner = block_lengths(total, self._across.size if self._across else 1)
        segments = segments_of([*range(self.own)] * len(lengths), lengths.ravel())
        return DividedRows(segments, outer, inner, _own_segments(segments, outer, self._line),
                           _own_segments(segments, inner, self._across))

    def send(self, rows: Array, plan: Plan) -> Array:
        """Send rows, in the order of ``plan.pairs``, to their experts.

        Returns the rows of this rank's experts, by expert and token.
        """
        if self.axis is not None:
            rows = self.axis.all_to_all(rows, plan.sends, plan.receives)
        if plan.arrivals is None:
            return rows
        return self.backend.take_rows(rows, plan.arrivals,
                                      self.backend.empty(rows.shape, rows.dtype))

    def send_back(self, rows: Array, plan: Plan) -> Array:
        """Send rows of this rank's experts back to where their tokens are."""
        if plan.arrivals is not None:
            back = self.backend.empty(rows.shape, rows.dtype)
            self.backend.put_rows(back, plan.arrivals, rows)
            rows = back
        if self.axis is not None:
            rows = self.axis.all_to_all(rows, plan.receives, plan.sends)
        return rows


def _line(space: Space, other: Space) -> Axis | None:
    """Return the direction that divides the rows of `space` and the features of `other`."""
    grid, rows = space.grid, divided_directions(space.rows)
    return next((grid[c] for c in other.features if c in rows and grid[c].size > 1), None)


def _own_segments(segments: list[Segment], lengths: list[int],
                  axis: Axis | None) -> list[Segment]:
    """Return the segments of this rank's rows, of blocks of these lengths along `axis`."""
    rank = axis.rank if axis else 0
    start = sum(lengths[:rank])
    return cut_segments(segments, start, start + lengths[rank])


def _arrivals(lengths: np.ndarray) -> np.ndarray | None:
    """Return where rows, in blocks by rank and expert, are in the order by expert and rank.

    `lengths` is (ranks, experts).
    """
    if len(lengths) == 1:
        return None
    starts = (np.cumsum(lengths) - lengths.ravel()).reshape(lengths.shape)
    blocks = [np.arange(start, start + length)
              for start, length in zip(starts.T.ravel(), lengths.T.ravel())]
    return np.concatenate(blocks) if blocks else np.empty(0, np.int64)
