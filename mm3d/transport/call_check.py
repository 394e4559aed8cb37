"""Encode collective calls as numbers that the ranks of a line compare at a barrier.

A rank that makes another call than the rest, or passes another array, is found before any array
is read.
"""

from typing import Iterable, Sequence

import numpy as np

DIMS = 8                  # of an array that are compared
WORDS = 5 + DIMS          # of a call
NOTHING = (0,) * DIMS

KINDS = ("a barrier", "all-gather", "reduce-scatter", "all-reduce", "broadcast", "reduce",
         "more memory")
BARRIER, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, REDUCE, MORE = range(len(KINDS))

Call = tuple[int, ...]


def call(kind: int, dtype: np.dtype | None = None, shape: tuple[int, ...] = (), dim: int = 0,
         counts: Sequence[int] = ()) -> Call:
    """Encode a collective; `shape` is that of the whole array, and `dim` the root if it has one.
    """
    return (kind, ord(dtype.char) if dtype else 0, dim, hash(tuple(counts)), len(shape),
            *shape[:DIMS], *NOTHING[len(shape):])


def text(words: Sequence[int]) -> str:
    """Format a call for an error message."""
    kind, letter, dim, _, ndim, *shape = words[:WORDS]
    if kind in (BARRIER, MORE):
        return KINDS[kind]
    which = {ALL_REDUCE: "", BROADCAST: f" from rank {dim}", REDUCE: f" to rank {dim}"}
    return (f"{KINDS[kind]} of {tuple(shape[:ndim])} in {_name(chr(letter))}"
            + which.get(kind, f" along dimension {dim}"))


def _name(letter: str) -> str:
    """Return a dtype's name, also of bfloat16, which NumPy does not find by its letter."""
    try:
        return np.dtype(letter).name
    except TypeError:
        return {"E": "bfloat16"}.get(letter, f"a dtype of letter {letter}")


def difference(found: Iterable[tuple[int, Sequence[int]]]) -> str:
    """Format an error message about ranks whose calls differ."""
    ranks: dict[tuple, list[int]] = {}
    for rank, words in found:
        ranks.setdefault(tuple(words[:WORDS]), []).append(rank)
    if len(ranks) == 1:
        return ("before this call the ranks of this line made different ones: all ranks of an "
                "axis must make the same calls, also of Split.empty and Split.term")
    calls = {text(words) for words in ranks}
    listed = "; ".join(f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {text(words)}"
                       for words, who in ranks.items())
    return (f"the ranks of this line make different calls ({listed}): give the same dtype and "
            f"{'counts' if len(calls) == 1 else 'blocks of one array'} on all of them")
