"""Compare the arguments that ranks pass to the same call: where they differ, all ranks raise.

A rank with arguments of its own would wait for messages that nobody sends, or compute another
model in silence.
"""

import dataclasses
import hashlib
import numbers
import os
import zlib
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Iterator, Mapping, Sequence

import numpy as np
from mpi4py import MPI

from mm3d.transport.communicators import DryCommunicator, Freed

FactTexts = Mapping[str, str]    # values as texts, by name
REFUSED = "refused"    # the fact that says why a rank refuses a call
SHOWN = 60    # letters of a value in a message
LISTED = 8    # differences in a message


@contextmanager
def same_arguments(comm: MPI.Intracomm | DryCommunicator, call: str) -> Iterator[dict[str, Any]]:
    """Compare the arguments of a call over all ranks, after they were checked in the block.

    Every rank enters the block, and puts its arguments into the dictionary that it gets, by name.
    An error in the block is raised when all ranks have met, so that none waits for another.  All
    calls make the same small exchange, with the name of the `call`, so ranks that make different
    ones find that out, too.

    Raises ValueError on every rank alike when arguments differ or some ranks refuse theirs, and
    the error of the block where all ranks raise the same.
    """
    given: dict[str, Any] = {}
    problem, refused = None, {}
    try:
        yield given
    except Exception as error:    # of any kind: the others wait
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        problem, refused = error, {REFUSED: f"{kind}{error}"}
    compare(comm, call, given, refused)
    if problem is not None:
        raise problem


def compare(comm: MPI.Intracomm | DryCommunicator, call: str, given: Mapping[str, Any],
            refused: FactTexts = MappingProxyType({}), largest: float = 0.0) -> float:
    """Compare facts over all ranks in one small exchange; return the largest number of all.

    All ranks should have alike what is `given`, by name; `comm` and `call` are as in
    `same_arguments`.  `refused` says, as `REFUSED`, why this rank refuses; else it is empty.
    `largest` is this rank's number: `mm3d.training.norms` needs the largest, and so saves an
    exchange.

    Raises ValueError on every rank alike, unless the facts are the same on all; TypeError for what
    is no communicator of ranks.
    """
    if comm == MPI.COMM_NULL or not hasattr(comm, "size"):
        raise TypeError(f"{call}: {comm!r} is no communicator of ranks, as MPI.COMM_WORLD is")
    if isinstance(comm, DryCommunicator) or comm.size == 1:
        return largest
    facts = {"call": call} | {name: text_of(value) for name, value in given.items()} | refused
    digest = hashlib.blake2b(repr(sorted(facts.items())).encode(), digest_size=8).digest()
    own = float(int.from_bytes(digest, "big") >> 11)    # whole numbers below 2^53 are exact
    found = np.array([own, -own, largest])    # all are the same if the maximum is the minimum
    comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
    if found[0] != -found[1]:
        raise ValueError(format_difference(comm.allgather(dict(facts))))
    return float(found[2])


def refuse_freed(comm: Any) -> None:
    """Raise RuntimeError when `comm` was freed."""
    if isinstance(comm, Freed):
        comm.refuse()


def environment_facts() -> dict[str, str]:
    """Return the variables of the environment that all ranks must share, unless as by default."""
    defaults = {"MM3D_TRANSPORT": "", "MM3D_NODE_SIZE": "", "MM3D_KERNELS": "", "MM3D_TF32": "0",
                "MM3D_CUDNN": "1"}
    return {name: str(int(text)) if text.isdecimal() else text    # 04 is 4
            for name, default in defaults.items()
            if (text := os.environ.get(name, "")) not in ("", default)}


def checksum(a: np.ndarray) -> str:
    """Return a checksum of an array's elements, in about a second for a few gigabytes."""
    return f"checksum {zlib.crc32(np.ascontiguousarray(a).reshape(-1).view(np.uint8)):08x}"


def checksums(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Return by name the checksum of each array in float64, or its type if it has no numbers."""
    found = {}
    for name, a in arrays.items():
        try:
            a = np.asarray(a)
        except ValueError:    # lists that make no array: refused where they are used
            found[name] = type(a).__name__
        else:
            real = np.can_cast(a.dtype, np.float64, "same_kind")
            what = checksum(a.astype(np.float64, copy=False)) if real else a.dtype
            found[name] = f"{what} of {a.shape}"
    return found


def text_of(value: Any) -> str:
    """Return the text by which a value is compared: the same for equal values of other types.

    1, 1.0 and NumPy's 1 are the same, and so are a dtype and its name, a tuple and a list.
    Functions are compared by name, and unknown objects by type.
    """
    if type(value) in (int, str):    # first: a schedule may have 100,000
        return str(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(text_of, value))})"
    if value is None or isinstance(value, (str, np.dtype)):
        return str(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()    # a number of NumPy or of another library
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        value = float(value)
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {text_of(one)}" for key, one in value.items()) + "}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__ + text_of({
            one.name: getattr(value, one.name) for one in dataclasses.fields(value)})
    return getattr(value, "__qualname__", type(value).__qualname__)


def format_difference(found: Sequence[FactTexts]) -> str:
    """Format an error about ranks whose facts differ; `found` has the facts of each rank."""
    calls = list(dict.fromkeys(one["call"] for one in found))
    if len(calls) > 1:
        return (f"the ranks make different calls ({_by_value([one['call'] for one in found])}): "
                f"all of them should make the same ones")
    refused = {rank: one[REFUSED] for rank, one in enumerate(found) if REFUSED in one}
    differing = []
    for name in dict.fromkeys(name for one in found for name in one if name != REFUSED):
        values = [one.get(name, "nothing") for one in found]
        left_out = any(name not in found[rank] for rank in refused)    # it stopped before
        if len(set(values)) > 1 and not left_out:
            differing.append(f"{name} ({_by_value(values)})")
    more = f" and {len(differing) - LISTED} more" if len(differing) > LISTED else ""
    parts = [f"the ranks differ in {', '.join(differing[:LISTED])}{more}, which should be the "
             f"same on all of them"] if differing else []
    for text in dict.fromkeys(refused.values()):
        ranks = [rank for rank, one in refused.items() if one == text]
        parts.append(f"refused on {format_ranks(ranks)}: {text}")
    return f"{calls[0]}: {'; '.join(parts)}"


def _by_value(values: Sequence[str]) -> str:
    """Format the values of the ranks, each with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{_shortened(value)} on {format_ranks(of)}" for value, of in ranks.items())


def _shortened(text: str) -> str:
    """Return a text, or its beginning and a checksum if it is long."""
    if len(text) <= SHOWN:
        return text
    checksum = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{text[:SHOWN]}... (checksum {checksum})"


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ascending numbers of ranks, as in "ranks 0 to 3, 5, 6"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [f"{first} to {last}" if last > first + 1 else
             ", ".join(map(str, dict.fromkeys((first, last)))) for first, last in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"
