"""Bring the rows of tokens to the ranks that have their experts, and the results back.

Along the direction that divides the experts there are two ways.

- *Exchange*: each rank sends every (token, choice) pair's row to where its expert is, an
  all-to-all of blocks whose lengths follow from counts that all ranks know.  Results come back
  the same way, and are summed where the token is.
- *Gather*: each rank gathers all tokens, and what they chose, and takes the rows of its own
  experts; the sums over its experts are reduce-scattered.

Over all ranks an exchange moves h words per remote (token, expert) pair, a gather about h words
per token and remote rank: less where a token goes to most ranks.  The way that moves fewer words
is taken, by counts that all ranks know.

In both ways a rank gets the rows of its experts in the order of experts and then of tokens, the
order on a single rank.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mm3d.arrays.backend import Array, accumulation_dtype, backend_of
from mm3d.arrays.blocks import block_lengths, block_starts
from mm3d.arrays.grouped_products import Segment, cut_segments, segments_of
from mm3d.grid.activations import Space
from mm3d.grid.axis import Axis
from mm3d.grid.layout import divided_directions
from mm3d.model.experts.grouped_product import DividedRows, RowLine
from mm3d.model.experts.token_order import TokenOrder
from mm3d.model.functional import upcast
from mm3d.model.token_functions import look_up_rows


@dataclass(frozen=True)
class RowRoutes:
    """Hold where rows come from and go to, in integers on the host.

    *Tokens* are this rank's tokens, or after a gather all tokens along the direction.
    """

    # Int64: the (token, choice) pairs, numbered k token + choice, that experts take: all pairs of
    # this rank's tokens, or after a gather all pairs of its experts; by expert.
    pairs: np.ndarray
    # Int64 (tokens, k): the place of each pair in `pairs`; -1 where it has none.
    places: np.ndarray
    rows: DividedRows    # the rows of the group of ranks that multiplies together
    gathers: bool    # whether tokens are gathered
    # Rows for, and from, each rank along the direction, where they are exchanged.
    sends: list[int]
    receives: list[int]
    # Int64 or None: for each row of this rank's experts, by expert and token, its place among the
    # rows received; None if they come in that order.
    arrivals: np.ndarray | None


class Dispatch:
    """Plan where rows go, and move them.

    `outer` and `inner` are the spaces of activations around a pair of products, `order` the order
    of the tokens; a row has `hidden` features globally.  The `experts` are divided by the
    direction `axis`, one of ``order.directions``; without it every rank's group has all.  This
    rank has `own` of them.
    """

    def __init__(self, outer: Space, inner: Space, order: TokenOrder, experts: int, hidden: int,
                 axis: Axis | None = None) -> None:
        grid = outer.grid
        self.backend, self.order, self.hidden = grid.backend, order, hidden
        self.axis = axis if axis is not None and axis.size > 1 else None
        size, self._rank = (axis.size, axis.rank) if self.axis else (1, 0)
        self._experts = block_lengths(experts, size)
        self._starts, self.own = block_starts(self._experts), self._experts[self._rank]
        self._line = RowLine.between(outer, inner)      # divides rows in the outer space
        self._across = RowLine.between(inner, outer)    # and in the inner one
        self._tokens = order.tokens_along(self.axis) if self.axis else []
        # Ranks that share a token, and what they have of a row together.
        self._sharing = grid.size // grid.shape.ranks_along(divided_directions(outer.rows))
        self._width = hidden * self._sharing // grid.shape.ranks_along(outer.features)

    def plan(self, chosen: np.ndarray, taken: np.ndarray, kept: np.ndarray) -> RowRoutes:
        """Plan where this rank's rows go; every rank must call it.

        `chosen` are the experts of this rank's tokens and `taken` which pairs these take, both
        (tokens, k); `kept` is that of `mm3d.model.experts.token_order.GlobalCounts`.
        """
        chosen = np.where(taken, chosen, -1)
        gathers = self._gathers(kept, chosen.shape[1])
        if gathers:
            chosen = self.order.gather_chosen(chosen, self.axis)
            mine = chosen - self._starts[self._rank]
            chosen = np.where((mine >= 0) & (mine < self.own), chosen, -1)
        numbers = np.flatnonzero(chosen >= 0)
        pairs = numbers[np.argsort(chosen.ravel()[numbers], kind="stable")]
        places = np.full(chosen.size, -1)
        places[pairs] = np.arange(len(pairs))
        free = (self.axis, self._line and self._line.axis)
        index = tuple(slice(None) if any(axis is one for one in free) else axis.rank
                      for axis in self.order.directions)
        every = kept[index].reshape(len(self._experts), self._line.size if self._line else 1, -1)
        place, first = self._line.rank if self._line else 0, self._starts[self._rank]
        sends = [int(part.sum()) for part in
                 np.split(every[self._rank, place], self._starts[1:])]
        own = every[:, :, first:first + self.own]
        return RowRoutes(pairs, places.reshape(chosen.shape), self._divide_rows(own.sum(axis=0)),
                         gathers, sends, own[:, place].sum(axis=1).tolist(),
                         _arrivals(own[:, place]))

    def _gathers(self, kept: np.ndarray, top: int) -> bool:
        """Return whether a gather moves fewer words than an exchange of these pairs."""
        return self.axis is not None and self.gather_words(top) < self.exchange_words(kept)

    def exchange_words(self, kept: np.ndarray) -> int:
        """Count the words of all ranks when rows are exchanged, forward and backward together."""
        number = next(n for n, one in enumerate(self.order.directions) if one is self.axis)
        by_rank = np.moveaxis(kept, number, 0).reshape(len(self._experts), -1, kept.shape[-1])
        at_home = sum(int(part[:, start:start + count].sum()) for part, start, count in
                      zip(by_rank, self._starts, self._experts))
        return 4 * (int(kept.sum()) - at_home) * self._width

    def gather_words(self, top: int) -> int:
        """Count the words of all ranks when tokens are gathered, forward and backward together.

        They are x, y and their gradients, and k chosen experts, gates and gradients of gates.
        """
        others = (len(self._experts) - 1) * self.order.tokens
        return others * (4 * self._width + 3 * top * self._sharing)

    def _divide_rows(self, lengths: np.ndarray) -> DividedRows:
        """Describe the rows of the ranks along the line, `lengths` by (rank, expert)."""
        outer, total = lengths.sum(axis=1).tolist(), int(lengths.sum())
        inner = self._across.divide(total) if self._across else [total]
        segments = segments_of([*range(self.own)] * len(lengths), lengths.ravel())
        return DividedRows(segments, outer, inner, _own_segments(segments, outer, self._line),
                           _own_segments(segments, inner, self._across))

    def send(self, tokens: Array, plan: RowRoutes) -> Array:
        """Send rows to their experts; return the rows of this rank's, by expert and token."""
        rows = _take_pairs(self._gather(tokens, plan), plan.pairs, plan.places.shape[1])
        return self._exchange(rows, plan)

    def send_backward(self, drows: Array, plan: RowRoutes) -> Array:
        """Compute the gradient of the tokens from the rows' gradient, in float32 at least."""
        return self._scatter(_sum_by_token(self._exchange_back(drows, plan), plan.places), plan)

    def combine(self, rows: Array, gates: Array, plan: RowRoutes) -> tuple[Array, Any]:
        """Sum the results of each token's experts, times the gates.

        Returns the sum, in the type of the rows; and rows and gates of the plan's pairs, saved for
        backward.
        """
        rows, gates = self._exchange_back(rows, plan), self._gather(gates, plan)
        y = self.backend.xp.astype(_sum_by_token(rows, plan.places, gates), rows.dtype, copy=False)
        return self._scatter(y, plan), (rows, gates)

    def combine_backward(self, dy: Array, saved: Any, plan: RowRoutes) -> tuple[Array, Array]:
        """Compute the gradients of the rows of this rank's experts, and of its gates.

        The gradients of the gates are sums over this rank's features.
        """
        rows, gates = saved
        drows, dgates = _split_by_pair(self._gather(dy, plan), rows, plan.pairs, gates)
        return self._exchange(drows, plan), self._scatter(dgates, plan)

    def _gather(self, a: Array, plan: RowRoutes) -> Array:
        """Gather a row for each token, if the plan gathers."""
        return self.axis.all_gather(a, 0, self._tokens) if plan.gathers else a

    def _scatter(self, a: Array, plan: RowRoutes) -> Array:
        """Sum terms of a row for each token, and return this rank's, if the plan gathers."""
        return self.axis.reduce_scatter(a, 0, self._tokens) if plan.gathers else a

    def _exchange(self, rows: Array, plan: RowRoutes) -> Array:
        """Send rows of pairs to their experts, if the plan exchanges them."""
        if self.axis is None or plan.gathers:
            return rows
        rows = self.axis.all_to_all(rows, plan.sends, plan.receives)
        return self.backend.take_rows(rows, plan.arrivals,
                                      self.backend.empty(rows.shape, rows.dtype))

    def _exchange_back(self, rows: Array, plan: RowRoutes) -> Array:
        """Send rows of experts back to their tokens, if the plan exchanges them."""
        if self.axis is None or plan.gathers:
            return rows
        back = self.backend.empty(rows.shape, rows.dtype)
        self.backend.put_rows(back, plan.arrivals, rows)
        return self.axis.all_to_all(back, plan.receives, plan.sends)


def _own_segments(segments: list[Segment], lengths: list[int],
                  line: RowLine | None) -> list[Segment]:
    """Return the segments of this rank's rows, of blocks of these lengths along `line`."""
    rank = line.rank if line else 0
    start = sum(lengths[:rank])
    return cut_segments(segments, start, start + lengths[rank])


def _arrivals(lengths: np.ndarray) -> np.ndarray | None:
    """Return the places of rows by expert and rank among rows in blocks by rank and expert.

    `lengths` is (ranks, experts).
    """
    if len(lengths) == 1:
        return None
    starts = (np.cumsum(lengths) - lengths.ravel()).reshape(lengths.shape)
    return np.concatenate([np.arange(start, start + length)
                           for start, length in zip(starts.T.ravel(), lengths.T.ravel())])


def _take_pairs(tokens: Array, pairs: np.ndarray, top: int) -> Array:
    """Copy the rows of the tokens of `pairs`, which are numbered ``top token + choice``."""
    library = backend_of(tokens)
    return library.take_rows(tokens, pairs // top,
                             library.empty((len(pairs), tokens.shape[1]), tokens.dtype))


def _sum_by_token(rows: Array, places: np.ndarray, gates: Array | None = None) -> Array:
    """Sum the rows of each token's pairs, times their gates, in the order of the choices.

    `rows` is (pairs, features); `places`, int64 (tokens, k), says the row of each pair, -1 for
    none, which adds nothing; `gates` are (tokens, k), by default all 1.  The result is (tokens,
    features), in float32 at least.
    """
    library, (tokens, top) = backend_of(rows), places.shape
    found = library.empty((tokens, rows.shape[1]), rows.dtype)
    total = None
    for n in range(top):
        look_up_rows(rows, places[:, n], 0, found)
        term = library.xp.astype(found, accumulation_dtype(found), copy=total is None)
        if gates is not None:
            term *= gates[:, n:n + 1]
        if total is None:
            total = term
        else:
            total += term
    return total


def _split_by_pair(dy: Array, rows: Array, pairs: np.ndarray,
                   gates: Array) -> tuple[Array, Array]:
    """Compute the gradients of rows and gates of `_sum_by_token` from the gradient of its result.

    dy is (tokens, features); `rows` and `gates` are the arguments of `_sum_by_token`; `pairs`,
    int64, has the pair, ``k token + choice``, of each row.  Returns drows, (pairs, features) in
    the type of dy, and dgates, (tokens, k): sums over these features, 0 for pairs without a row.
    """
    library, top = backend_of(dy), gates.shape[1]
    xp, count = library.xp, gates.shape[0] * top
    drows = _take_pairs(dy, pairs, top)
    wide = upcast(drows)
    products = xp.sum(wide * upcast(rows), axis=1, keepdims=True)
    dgates = library.empty((count, 1), gates.dtype)
    dgates[...] = 0
    library.put_rows(dgates, pairs, xp.astype(products, gates.dtype, copy=False))
    of_pair = library.take_rows(xp.reshape(gates, (count, 1)), pairs,
                                library.empty((len(pairs), 1), gates.dtype))
    wide *= of_pair
    return xp.astype(wide, dy.dtype, copy=False), xp.reshape(dgates, gates.shape)
