"""Decide which tokens an expert takes, from the global order of the tokens.

A token's place in an expert is the number of (token, choice) pairs of that expert that come before
it among all ranks.  `mm3d.model.experts.token_order` supplies the counts of all tokens before a
run, an exclusive scan of k x E integers; everything here is integers in host memory, so that all
meshes drop the same tokens.
"""

import math
from fractions import Fraction

import numpy as np

from mm3d.model.experts.options import ExpertOptions


def capacity_of(experts: ExpertOptions, tokens: int) -> int | None:
    """Return how many (token, choice) pairs an expert takes, as the convention computes it.

    Returns
    -------
    int or None
        At most the global number of tokens, since a token is sent to an expert once; None when
        nothing is dropped.

    Raises
    ------
    ValueError
        When an expert would take no token, or the choices cannot be counted.
    """
    experts.check_tokens(tokens)
    if experts.capacity is None:
        return None
    factor, top, count = experts.capacity, experts.top, experts.count
    if experts.convention == "mm3d":
        # A decimal factor is meant as written: 1.1 * 10 is 11, not a float above it.
        taken = math.ceil(Fraction(str(factor)) * top * tokens / count)
    elif experts.convention == "megatron":
        taken = math.ceil(top * tokens / count * factor)
    elif experts.convention == "deepspeed":
        taken = math.ceil(np.float32(tokens / count) * np.float32(factor * top))    # as it rounds
    else:
        taken = int(factor * (top * tokens / count))
    taken = min(max(taken, experts.least_capacity), tokens)
    if not taken:
        raise ValueError(f"capacity={factor!r} drops every one of {tokens} tokens sent to {top} "
                         f"of {count} experts: at least capacity={count / (top * tokens):.6g}, "
                         f"or None to drop none, would do")
    return taken


def counts(chosen: np.ndarray, experts: int) -> np.ndarray:
    """Count how many tokens have each expert as their first, second ... choice: int64, (k, E).

    `chosen` are the experts of the tokens, (tokens, k).
    """
    return np.stack([np.bincount(column, minlength=experts) for column in chosen.T])


def positions(chosen: np.ndarray, before: np.ndarray, totals: np.ndarray,
              order: str) -> np.ndarray:
    """Return the place of each of this rank's (token, choice) pairs in its expert, from 0 on.

    Parameters
    ----------
    chosen : ndarray of int64
        (tokens, k): the experts of this rank's tokens, which follow each other in the global
        order.
    before : ndarray of int64
        (k, E): `counts` summed over all tokens before this rank's first.
    totals : ndarray of int64
        (k, E): `counts` summed over all tokens.
    order : str
        "position": tokens in their global order; "choice": all first choices come before all
        second choices, each in the global order of the tokens.

    Returns
    -------
    ndarray of int64
        (tokens, k).
    """
    count = totals.shape[1]
    if order == "position":
        flat = chosen.ravel()
        return (_places(flat, count) + before.sum(0)[flat]).reshape(chosen.shape)
    first = before + np.cumsum(totals, axis=0) - totals
    return np.stack([_places(column, count) + first[n][column]
                     for n, column in enumerate(chosen.T)], axis=1)


def _places(numbers: np.ndarray, count: int) -> np.ndarray:
    """Return for each number, below `count`, how many equal ones come before it."""
    order = np.argsort(numbers, kind="stable")
    many = np.bincount(numbers, minlength=count)
    places = np.empty(len(numbers), np.int64)
    places[order] = np.arange(len(numbers)) - np.repeat(np.cumsum(many) - many, many)
    return places


def kept(places: np.ndarray, capacity: int | None) -> np.ndarray:
    """Return which (token, choice) pairs their experts take, (tokens, k), from their `positions`.

    With the capacity None all are taken.
    """
    return np.ones(places.shape, bool) if capacity is None else places < capacity
