"""Look up tokens and positions in tables divided over the grid; compute logits by such a table."""

import re
from typing import Any, Iterator

import numpy as np

from mm3d.arrays.backend import Array, accumulation_dtype, namespace
from mm3d.arrays.elementwise import as_rows
from mm3d.grid.axis import Axis
from mm3d.grid.grid import Grid
from mm3d.grid.layout import Layout, divided_directions
from mm3d.model.builder import Builder
from mm3d.model.layers import Linear
from mm3d.model.parameters import Parameter
from mm3d.model.token_functions import add_rows_by_id, look_up_rows


class Embedding:
    """Compute x = E[token] + P[position], or E[token] alone.

    Both tables are stored as the weight of a product down, so that logits can be x E^T: their
    rows, of any number, are divided along one direction without padding.  All ranks along that
    direction know all of its tokens, and each looks up the rows of its block; a reduce-scatter or
    an all-reduce of x sums the terms.  At most two terms are not zero: one rank has the token's
    row, and one the position's.  Where products gather the weight along another direction, the
    tables are gathered there.

    `build` makes E, vocab x hidden, and P, seq x hidden, globally; seq is None without P.  x is in
    the outer space.
    """

    def __init__(self, build: Builder, vocab: int, seq: int | None, hidden: int) -> None:
        build.named(self, "embedding", "embedding")
        self.outer = outer = build.outer
        grid, layout = outer.grid, Layout(build.scheme.down_weight)
        product = build.scheme.product(build.inner, build.outer, (vocab, hidden), (1, 1))
        self.weight = build.create_parameter("embedding.weight", layout, (vocab, hidden),
                                             product.gathered_along)
        self.parameters = [self.weight]
        if seq is not None:
            self.parameters.append(build.create_parameter("positions.weight", layout,
                                                          (seq, hidden)))
        along = product.gathered_along and product.gathered_along.axis.name
        self._tables = [_Table(p, grid, layout, along) for p in self.parameters]
        vocabulary = layout.dims[0].replace(along or " ", "")    # what divides gathered tables
        self._rows = [outer.rows_split(c) for c in vocabulary if c in outer.rows]
        self._sums = [grid[c] for c in vocabulary if c not in outer.rows]
        self._copies = [grid[c] for c in divided_directions(outer.rows)
                        if c not in layout.letters]
        rows = re.sub(f"[{vocabulary}]0?", "", outer.rows) if vocabulary else outer.rows
        self._place = Layout(rows).slices(grid, (outer.batch, outer.seq))    # of all its tokens
        width = outer.local_shape(hidden)[-1]
        self._shape = tuple(s.stop - s.start for s in self._place) + (width,)

    def forward(self, tokens: np.ndarray, within: None = None) -> tuple[Array, None]:
        """Compute this rank's block of x from the global tokens, (batch, seq) on the host."""
        library, dtype = self.outer.grid.backend, self.weight.dtype
        term = (self._rows[-1].term if self._rows else library.empty)(self._shape, dtype)
        table, *positions = (one.gather() for one in self._tables)
        flat = as_rows(term)
        look_up_rows(table, tokens[self._place].ravel(), self._tables[0].first, flat)
        for rows in positions:
            for here, there in self._shared_positions():
                term[:, here, :] += rows[there, :]
        for split in self._rows:
            term = split.reduce_scatter(term)
        for axis in self._sums:
            term = axis.all_reduce(term)
        return term, None

    def _shared_positions(self) -> Iterator[tuple[slice, slice]]:
        """Yield the positions shared by this rank's tokens and its block of P, within each."""
        table, before = self._tables[1], 0
        for run in self.outer.runs(self._place[1]):
            start = max(run.start, table.first)
            stop = max(start, min(run.stop, table.first + table.count))
            yield (slice(before + start - run.start, before + stop - run.start),
                   slice(start - table.first, stop - table.first))
            before += len(run)

    def backward(self, dx: Array, tokens: np.ndarray, within: None = None) -> None:
        """Add the gradients of both tables, from this rank's block of dx and the global tokens."""
        for split in reversed(self._rows):
            dx = split.all_gather(dx)
        xp, (E, *positions) = namespace(dx), self._tables
        gradient = E.begin_gradient()
        add_rows_by_id(as_rows(dx), tokens[self._place].ravel(), E.first, gradient)
        E.finish_gradient(gradient, self._copies)
        for P in positions:
            gradient = P.begin_gradient()
            for here, there in self._shared_positions():
                total = xp.sum(dx[:, here, :], axis=0, dtype=accumulation_dtype(dx))
                gradient[there, :] = xp.astype(total, gradient.dtype, copy=False)
            P.finish_gradient(gradient, self._copies)


class _Table:
    """Gather a block of a table `along` the direction that products gather a weight along, if any.

    Of the gathered block `first` is the first row, `count` the number of its rows.
    """

    def __init__(self, parameter: Parameter, grid: Grid, layout: Layout, along: str | None
                 ) -> None:
        self.parameter, shape = parameter, parameter.shape
        self._split = layout.split(grid, shape, along) if along and grid[along].size > 1 else None
        gathered = Layout(re.sub(f"{along}0?", "", layout.spec)) if along else layout
        rows, columns = gathered.slices(grid, shape)
        self.first, self.count = rows.start, rows.stop - rows.start
        self._width = columns.stop - columns.start
        self._empty = self._split.term if self._split else parameter.empty_gradient

    def gather(self) -> Array:
        """Gather the block."""
        value = self.parameter.value
        return self._split.all_gather(value) if self._split else value

    def begin_gradient(self) -> Array:
        """Return zeros to which the rows of the gradient of this pass are added."""
        terms = self._empty((self.count, self._width), self.parameter.master.dtype)
        terms[...] = 0
        return terms

    def finish_gradient(self, terms: Array, copies: list[Axis]) -> None:
        """Sum the gradient over the ranks that have other rows of x, and add it."""
        for axis in copies:
            terms = axis.all_reduce(terms)
        self.parameter.accumulate(self._split.reduce_scatter(terms) if self._split else terms)


class Head(Linear):
    """Compute logits = x W, in the inner space; globally W is hidden x vocab."""

    table = None    # of the embedding

    def __init__(self, build: Builder, hidden: int, vocab: int) -> None:
        super().__init__(build, "head", "up", (hidden, vocab), has_bias=False)


class TiedHead:
    """Compute logits = x E^T, with the table E of the embedding.

    On the rank of the table the weight is a second use of it, with a gradient of its own.  Both
    are summed at the end of a step, the embedding's first, so that the result does not depend on
    the order of forward and backward passes, nor on the stages where embedding and head are.  The
    global shape of E is vocab x hidden.  Without a `table` a copy is made, as the table is on
    another stage.
    """

    def __init__(self, build: Builder, hidden: int, vocab: int,
                 table: Parameter | None = None) -> None:
        build.named(self, "head", "head")
        shape, self.table, self.parameters = (vocab, hidden), table, []
        self.product = build.scheme.product(build.inner, build.outer, shape, (1, 1))
        if table is not None:
            self.weight = table.twin()
        else:
            copy = self.weight = build.create_parameter(
                "embedding.weight", self.product.weight, shape, self.product.gathered_along)
            copy.first_copy, self.parameters = False, [copy]
        self.product.use_weight(self.weight)

    def forward(self, x: Array, within: None = None) -> tuple[Array, Any]:
        """Compute the logits, in the inner space; return them with x."""
        return self.product.forward_transposed(x, self.weight.value), x

    def backward(self, dlogits: Array, saved: Any, within: None = None) -> Array:
        """Compute dx = dlogits E; add dE to the gradient."""
        dx, dE = self.product.backward_transposed(dlogits, saved, self.weight.value)
        self.weight.accumulate(dE)
        return dx
