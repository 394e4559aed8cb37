"""Multiply the rows of each expert by a weight of its own, under any tensor parallelism.

It is the scheme's product for all experts of a rank at once: A, B and C are gathered and scattered
along the same directions, in one collective instead of one for each expert.  Rows stay where they
are, in blocks of any length without padding, so the words equal those of the scheme's product of
as many rows as are sent to experts.
"""

import math
from dataclasses import dataclass
from typing import Sequence

from mm3d.arrays.backend import Array, namespace
from mm3d.arrays.blocks import block_lengths
from mm3d.arrays.grouped_products import (Segment, grouped_matmul, grouped_matmul_nt,
                                          grouped_matmul_tn)
from mm3d.grid.activations import Space
from mm3d.grid.axis import Axis
from mm3d.grid.layout import Layout, divided_directions
from mm3d.grid.split import FaceSplit, Split
from mm3d.model.functional import (add_rows, bias_gelu_backward, bias_gelu_forward, gelu_backward,
                                   gelu_forward, sum_rows)
from mm3d.model.layers import swiglu_backward, swiglu_forward
from mm3d.schemes.product import Product


@dataclass(frozen=True)
class DividedRows:
    """Describe the rows of experts that a group of ranks multiplies together.

    All ranks of the group hold parts of the same rows, in the same order: in the outer space one
    rank's rows after the other's, and in the inner space contiguous parts of that order.
    """

    # The experts of all rows, numbered from the first one of this rank.
    segments: Sequence[Segment]
    # Rows of each rank along the direction that divides them, in either space.
    outer: list[int]
    inner: list[int]
    # The experts of this rank's rows.
    outer_segments: Sequence[Segment]
    inner_segments: Sequence[Segment]


class RowLine:
    """Gather the rows of experts, and scatter sums of them, along a direction that divides rows.

    With `face` its first rank holds all rows, as with the scheme "faces".
    """

    def __init__(self, axis: Axis, face: bool) -> None:
        self.axis, self.face = axis, face
        self.size, self.rank = axis.size, axis.rank

    @classmethod
    def between(cls, space: Space, other: Space) -> "RowLine | None":
        """Return the line that divides rows of `space` and features of `other`; None without."""
        rows = Layout(space.rows)
        return next((cls(space.grid[c], c in rows.faces) for c in other.features
                     if c in rows.letters and space.grid[c].size > 1), None)

    def divide(self, rows: int) -> list[int]:
        """Return how many of `rows` rows each rank has in the layout of the space."""
        return [rows] + [0] * (self.size - 1) if self.face else block_lengths(rows, self.size)

    def all_gather(self, a: Array, lengths: list[int]) -> Array:
        """Gather the rows of all ranks, `lengths` by rank."""
        if self.face:
            return FaceSplit(self.axis, 0, sum(lengths)).all_gather(a)
        return self.axis.all_gather(a, 0, lengths)

    def reduce_scatter(self, a: Array, lengths: list[int]) -> Array:
        """Sum terms of all rows, and return this rank's."""
        if self.face:
            return FaceSplit(self.axis, 0, sum(lengths)).reduce_scatter(a)
        return self.axis.reduce_scatter(a, 0, lengths)


class GroupedProduct:
    """Compute C_e = A_e B_e for the rows of all experts e, and both gradients.

    The layouts of the spaces say what is moved.  A direction that divides

    - the features of A and the rows of C reduce-scatters terms of C, and gathers dC, by rows;
    - the rows of A and the features of C gathers A, and reduce-scatters terms of dA, by rows;
    - the features of both gathers A, and reduce-scatters dA, by features;
    - the features of A alone all-reduces terms of C; the features of C alone, terms of dA;
    - the weight alone gathers it, and reduce-scatters its gradient.

    Where the first rank of a direction holds all, these are broadcasts from it and reductions onto
    it.

    `source` and `target` are the spaces of A and of C, one outer and one inner; the `way` "up"
    leads from the outer space into the inner one, "down" back.  One expert's B has the layout
    `weight` and the global `shape` (N, ..., K); C has the dimensions after N as one.  The layout
    `stack` is of the weights of all experts, (experts, N, ..., K); other attributes are as in
    `mm3d.schemes.product.Product`.
    """

    accumulate_float32, empty_gradient, use_weight = False, None, Product.use_weight

    def __init__(self, source: Space, target: Space, way: str, weight: Layout,
                 shape: tuple[int, ...]) -> None:
        grid, self._names = source.grid, ("outer", "inner")[::1 if way == "up" else -1]
        rows = [divided_directions(space.rows) for space in (source, target)]

        def line(letters: list[str]) -> Axis | None:
            return next((grid[c] for c in letters if grid[c].size > 1), None)
        self._rows_of_A = RowLine.between(source, target)
        self._rows_of_C = RowLine.between(target, source)
        features = line([c for c in source.features if c in target.features])
        self._columns = features and Split(features, 1, shape[0])
        self._sum_C = line([c for c in source.features if c not in rows[1] + target.features])
        self._sum_dA = line([c for c in target.features if c not in rows[0] + source.features])
        self.stack = Layout("," + weight.spec, {dim + 1: n for dim, n in weight.units.items()})
        self._weight = [self.stack.split(grid, (1, *shape), c) for c in weight.letters
                        if c not in source.features + target.features and grid[c].size > 1]
        self._copies = [grid[c] for c in rows[0]
                        if c not in weight.letters + target.features and grid[c].size > 1]

    def forward(self, A: Array, B: Array, rows: DividedRows) -> Array:
        """Compute this rank's block of C; backward needs A of the operands."""
        terms = grouped_matmul(self._gather_A(A, rows), self._gather_B(B), rows.segments)
        if self._rows_of_C is not None:
            return self._rows_of_C.reduce_scatter(terms, getattr(rows, self._names[1]))
        return terms if self._sum_C is None else self._sum_C.all_reduce(terms)

    def backward(self, dC: Array, A: Array, B: Array, rows: DividedRows) -> tuple[Array, Array]:
        """Compute dA_e = dC_e B_e^T and dB_e = A_e^T dC_e; dB_e is zero without rows."""
        if self._rows_of_C is not None:
            dC = self._rows_of_C.all_gather(dC, getattr(rows, self._names[1]))
        dA = self._sum_terms(grouped_matmul_nt(dC, self._gather_B(B), rows.segments), rows)
        dB = grouped_matmul_tn(self._gather_A(A, rows), dC, rows.segments, B.shape[0],
                               self.empty_gradient, self.accumulate_float32)
        if middle := B.shape[2:-1]:
            last = dB.shape[2] // math.prod(middle)
            dB = namespace(dB).reshape(dB, (*dB.shape[:2], *middle, last))
        for axis in self._copies:
            dB = axis.all_reduce(dB)
        for split in self._weight:
            dB = split.reduce_scatter(dB)
        return dA, dB

    def _gather_A(self, A: Array, rows: DividedRows) -> Array:
        """Gather rows or features of A."""
        if self._rows_of_A is not None:
            return self._rows_of_A.all_gather(A, getattr(rows, self._names[0]))
        return A if self._columns is None else self._columns.all_gather(A)

    def _sum_terms(self, dA: Array, rows: DividedRows) -> Array:
        """Sum the terms of dA over the ranks that gather A, or that hold copies of it."""
        if self._rows_of_A is not None:
            return self._rows_of_A.reduce_scatter(dA, getattr(rows, self._names[0]))
        if self._columns is not None:
            return self._columns.reduce_scatter(dA)
        return dA if self._sum_dA is None else self._sum_dA.all_reduce(dA)

    def _gather_B(self, B: Array) -> Array:
        """Gather the weights of this rank's experts, (experts, N, K)."""
        for split in reversed(self._weight):
            B = split.all_gather(B)
        return namespace(B).reshape(B, (*B.shape[:2], math.prod(B.shape[2:])))


Sums = list[tuple[int, Array]]    # over rows of an expert


def activation_forward(U: Array, b: Array | None, segments: Sequence[Segment], gates: int,
                       out: Array) -> Array:
    """Compute GELU(u + b_e), or SiLU(g) u of (g, u) + b_e where there are two `gates`.

    U is (rows, gates x features), the gate first; two gates add b to it in place.  b has the
    biases of this rank's experts, (experts, gates x features), or is None; `segments` are the
    experts of the rows; `out`, (rows, features), receives the result.
    """
    if gates == 2:
        if b is not None:
            add_biases(U, b, segments)
        return swiglu_forward(_pairs(U), out)
    if b is None:
        return gelu_forward(U, out)
    for one, rows in _each_segment(segments):
        bias_gelu_forward(U[rows, :], b[one.group, :], out[rows, :])
    return out


def activation_backward(dG: Array, U: Array, b: Array | None, segments: Sequence[Segment],
                        gates: int, exact: bool, out: Array) -> Sums:
    """Compute dU in `out` from what `activation_forward` had; return the terms of db.

    The sums are in float32 at least where they should be `exact`.
    """
    if gates == 2:
        swiglu_backward(dG, _pairs(U), _pairs(out))
        return sum_biases(out, b, segments, exact)
    if b is None:
        gelu_backward(dG, U, out)
        return []
    return [(one.group, bias_gelu_backward(dG[rows, :], U[rows, :], b[one.group, :],
                                           out[rows, :], exact)[1])
            for one, rows in _each_segment(segments)]


def add_biases(rows_of_all: Array, b: Array, segments: Sequence[Segment]) -> None:
    """Add the bias of each expert to its rows, in place."""
    for one, rows in _each_segment(segments):
        add_rows(rows_of_all[rows, :], b[one.group, :], rows_of_all[rows, :])


def sum_biases(d: Array, b: Array | None, segments: Sequence[Segment], exact: bool) -> Sums:
    """Sum the rows of each expert, the terms of the gradient of b; none without b."""
    return [] if b is None else [(one.group, sum_rows(d[rows, :], exact))
                                 for one, rows in _each_segment(segments)]


def _each_segment(segments: Sequence[Segment]) -> list[tuple[Segment, slice]]:
    """Return segments with the slices of their rows."""
    return [(one, slice(one.start, one.stop)) for one in segments]


def _pairs(a: Array) -> Array:
    """View (rows, 2 features) as (rows, 2, features)."""
    return namespace(a).reshape(a, (a.shape[0], 2, a.shape[1] // 2))
