"""Sum the rows of tokens, and split gradients by (token, choice) pair, on one rank."""

import numpy as np

from mm3d.arrays.backend import Array, accumulation_dtype, backend_of
from mm3d.model.token_functions import look_up_rows


def take_pairs(tokens: Array, pairs: np.ndarray, top: int) -> Array:
    """Copy the rows of the tokens of `pairs`, which are numbered ``top token + choice``."""
    library = backend_of(tokens)
    return library.take_rows(tokens, pairs // top,
                             library.empty((len(pairs), tokens.shape[1]), tokens.dtype))


def sum_by_token(rows: Array, places: np.ndarray, gates: Array | None = None) -> Array:
    """Sum the rows of each token's pairs, times their gates, in the order of the choices.

    Parameters
    ----------
    rows : Array
        (pairs, features).
    places : ndarray of int64
        (tokens, k): the row of each pair; -1 for none, which adds nothing.
    gates : Array, optional
        (tokens, k); by default all are 1.

    Returns
    -------
    Array
        (tokens, features), in float32 at least.
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


def split_by_pair(dy: Array, rows: Array, pairs: np.ndarray,
                  gates: Array) -> tuple[Array, Array]:
    """Compute the gradients of rows and gates of `sum_by_token` from the gradient of its result.

    Parameters
    ----------
    dy : Array
        (tokens, features).
    rows, gates : Array
        The arguments of `sum_by_token`.
    pairs : ndarray of int64
        The pair, ``k token + choice``, of each row.

    Returns
    -------
    drows, dgates : Array
        (pairs, features) in the type of dy; and (tokens, k), sums over these features, 0 for
        pairs without a row.
    """
    library, top = backend_of(dy), gates.shape[1]
    xp, count = library.xp, gates.shape[0] * top
    drows = take_pairs(dy, pairs, top)
    wide = xp.astype(drows, accumulation_dtype(dy), copy=False)
    products = xp.sum(wide * xp.astype(rows, wide.dtype, copy=False), axis=1, keepdims=True)
    dgates = library.empty((count, 1), gates.dtype)
    dgates[...] = 0
    library.put_rows(dgates, pairs, xp.astype(products, gates.dtype, copy=False))
    of_pair = library.take_rows(xp.reshape(gates, (count, 1)), pairs,
                                library.empty((len(pairs), 1), gates.dtype))
    wide *= of_pair
    return xp.astype(wide, dy.dtype, copy=False), xp.reshape(dgates, gates.shape)
