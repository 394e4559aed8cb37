"""Compute attention to a window of positions, on one rank's arrays.

On a processor the scores of all positions are computed, by the readable functions of any array
library.
"""

import math

from mm3d.arrays.backend import Array, backend_of
from mm3d.model.functional import (attend, attend_backward, causal_mask,
                                   prefer_backend_kernel)


@prefer_backend_kernel
def window_attention_forward(q: Array, k: Array, v: Array, first: int, window: int,
                             out: Array) -> tuple[Array, Array]:
    """Compute causal attention to the last `window` positions up to a query's own.

    Source: Beltagy, Peters and Cohan, arXiv 2004.05150.  Other parameters and results as in
    `mm3d.model.functional.attention_forward`.
    """
    return attend(q, k, v, window_mask(q, k, first, window), out)


@prefer_backend_kernel
def window_attention_backward(do: Array, q: Array, k: Array, v: Array, lse: Array, first: int,
                              window: int, dq: Array, dk: Array, dv: Array) -> None:
    """Compute dq, dk and dv of `window_attention_forward` in the arrays of these names."""
    attend_backward(do, (q, k, v), lse, window_mask(q, k, first, window), (dq, dk, dv))


def window_mask(q: Array, k: Array, first: int, window: int) -> Array:
    """Return the mask (queries, positions): 0 in the window of each query, -inf elsewhere."""
    library, mask = backend_of(q), causal_mask(q, k, first)
    own = library.arange(first, first + q.shape[1])[:, None]
    near = library.arange(0, k.shape[1])[None, :] + window > own
    return library.xp.where(near, mask, mask - math.inf)


def visible(own: range, keys: range, causal: bool, window: int | None) -> tuple[range, range]:
    """Return the queries that see some of the keys, and the keys that some query sees.

    Both are among the given positions.  Parameters are as of
    `mm3d.model.attention.layer.Attention`.
    """
    if not causal or not own:
        return own, keys
    reach = window or own.stop    # all before
    keys = range(max(keys.start, own.start - reach + 1), min(keys.stop, own.stop))
    return range(max(own.start, keys.start), min(own.stop, keys.stop + reach - 1)), keys
