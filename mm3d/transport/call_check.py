"""Encode collective calls as numbers that the ranks of a line compare at a barrier.

A rank that makes another call than the rest, or passes another array, is found before any array
is read.
"""

import functools
import struct
from typing import Iterable, Sequence

import numpy as np

MAX_DIMS = 8                 # of an array that are compared
CALL_WORDS = 5 + MAX_DIMS    # of an encoded call
NO_SIZES = (0,) * MAX_DIMS

KINDS = ("a barrier", "all-gather", "reduce-scatter", "all-reduce", "broadcast", "reduce",
         "more memory", "all-to-all")
(BARRIER, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, REDUCE, MORE_MEMORY,
 ALL_TO_ALL) = range(len(KINDS))

KNOWN_CALLS = 1024           # which are remembered: a step repeats those of the step before

_packing = struct.Struct(f"={CALL_WORDS}q")


class PackedCall(tuple[int, ...]):
    """Describe a collective call in `CALL_WORDS` numbers, `packed` as they are in memory."""

    packed: bytes


@functools.lru_cache(KNOWN_CALLS)
def encode_call(kind: int, dtype: np.dtype | None = None, shape: tuple[int, ...] = (),
                dim: int = 0, counts: tuple[int, ...] = ()) -> PackedCall:
    """Encode a collective call.

    `dtype` and `shape` are those of the whole array, if there is one; in an all-to-all its length
    along `dim` counts as 0.  `dim` is the dimension that is divided into blocks of the lengths
    `counts`, or the root of a broadcast or reduce.
    """
    call = PackedCall((kind, ord(dtype.char) if dtype else 0, dim, hash(counts), len(shape),
                       *shape[:MAX_DIMS], *NO_SIZES[len(shape):]))
    call.packed = _packing.pack(*call)
    return call


def format_call(words: Sequence[int]) -> str:
    """Format a call for an error message."""
    kind, letter, dim, _, ndim, *shape = words[:CALL_WORDS]
    if kind in (BARRIER, MORE_MEMORY):
        return KINDS[kind]
    where = {ALL_REDUCE: "", BROADCAST: f" from rank {dim}", REDUCE: f" to rank {dim}"}
    return (f"{KINDS[kind]} of {tuple(shape[:ndim])} in {_dtype_name(chr(letter))}"
            + where.get(kind, f" along dimension {dim}"))


def _dtype_name(letter: str) -> str:
    """Return a dtype's name, also of bfloat16, which NumPy does not find by its letter."""
    try:
        return np.dtype(letter).name
    except TypeError:
        return {"E": "bfloat16"}.get(letter, f"a dtype of letter {letter}")


def format_call_difference(found: Iterable[tuple[int, Sequence[int]]]) -> str:
    """Format an error message about ranks, each with its encoded call, whose calls differ."""
    ranks: dict[tuple, list[int]] = {}
    for rank, words in found:
        ranks.setdefault(tuple(words[:CALL_WORDS]), []).append(rank)
    if len(ranks) == 1:
        return ("before this call the ranks of this line made different ones: all ranks of an "
                "axis must make the same calls, also of Split.empty and Split.term")
    calls = {format_call(words) for words in ranks}
    listed = "; ".join(
        f"rank{'s' * (len(callers) > 1)} {', '.join(map(str, callers))}: {format_call(words)}"
        for words, callers in ranks.items())
    return (f"the ranks of this line make different calls ({listed}): give the same dtype and "
            f"{'counts' if len(calls) == 1 else 'blocks of one array'} on all of them")
