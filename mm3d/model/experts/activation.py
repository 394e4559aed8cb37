"""Apply the function between the products of each expert to its rows."""

from typing import Sequence

from mm3d.arrays.backend import Array, namespace
from mm3d.arrays.grouped_products import Segment
from mm3d.model.functional import (add_rows, bias_gelu_backward, bias_gelu_forward, gelu_backward,
                                   gelu_forward, sum_rows)
from mm3d.model.swiglu import swiglu_backward, swiglu_forward

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
    for one, rows in each_segment(segments):
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
            for one, rows in each_segment(segments)]


def add_biases(rows_of_all: Array, b: Array, segments: Sequence[Segment]) -> None:
    """Add the bias of each expert to its rows, in place."""
    for one, rows in each_segment(segments):
        add_rows(rows_of_all[rows, :], b[one.group, :], rows_of_all[rows, :])


def sum_biases(d: Array, b: Array | None, segments: Sequence[Segment], exact: bool) -> Sums:
    """Sum the rows of each expert, the terms of the gradient of b; none without b."""
    return [] if b is None else [(one.group, sum_rows(d[rows, :], exact))
                                 for one, rows in each_segment(segments)]


def each_segment(segments: Sequence[Segment]) -> list[tuple[Segment, slice]]:
    """Return segments with the slices of their rows."""
    return [(one, slice(one.start, one.stop)) for one in segments]


def _pairs(a: Array) -> Array:
    """View (rows, 2 features) as (rows, 2, features)."""
    return namespace(a).reshape(a, (a.shape[0], 2, a.shape[1] // 2))
