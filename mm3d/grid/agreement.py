"""Compare what the ranks of a communicator pass to the same call, which none then makes alone.

A rank with arguments of its own would wait for messages that nobody sends, or compute another
model in silence.
"""

import dataclasses
import hashlib
import numbers
import zlib
from contextlib import contextmanager
from typing import Any, Iterator, Mapping, Sequence

import numpy as np
from mpi4py import MPI

from mm3d.transport.silent import DryCommunicator

Facts = Mapping[str, str]    # values as texts, by name
REFUSED = "refused"
_compared = 0                # calls around this one whose arguments were the same on all ranks
SHOWN = 60                   # letters of a value in a message
LISTED = 8                   # differences in a message


@contextmanager
def same_arguments(comm: MPI.Intracomm | DryCommunicator, call: str) -> Iterator[dict[str, Any]]:
    """Compare the arguments of a call over all ranks, after they were checked in the block.

    Every rank enters the block, and puts its arguments into the dictionary that it gets, by name.
    A ValueError in the block is raised when all ranks have met, so that none waits for another.
    Inside `compared` nothing is exchanged.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or DryCommunicator
        The ranks.
    call : str
        The name of the call, which is compared too.

    Raises
    ------
    ValueError
        On every rank alike, when arguments differ or some ranks refuse theirs; the error of the
        block where all ranks raise the same.
    """
    given: dict[str, Any] = {}
    problem = None
    try:
        yield given
    except ValueError as error:
        problem = error
    if not (_compared or isinstance(comm, DryCommunicator) or comm.size == 1):
        facts = {"call": call} | {name: text_of(value) for name, value in given.items()}
        _compare(comm, facts | ({REFUSED: str(problem)} if problem else {}))
    if problem is not None:
        raise problem


@contextmanager
def compared() -> Iterator[None]:
    """Make calls in the block that follow from arguments which were compared: one exchange."""
    global _compared
    _compared += 1
    try:
        yield
    finally:
        _compared -= 1


def _compare(comm: MPI.Intracomm, facts: Facts) -> None:
    """Raise ValueError on every rank unless the facts are the same on all; one small exchange."""
    digest = hashlib.blake2b(repr(sorted(facts.items())).encode(), digest_size=8).digest()
    digests = np.empty(comm.size, np.int64)
    comm.Allgather(np.frombuffer(digest, np.int64), digests)
    if (digests != digests[0]).any():
        raise ValueError(format_difference(comm.allgather(dict(facts))))


def gather_alike(comm: MPI.Intracomm, call: str, own: Any, **facts: Any) -> list[Any]:
    """Gather what each rank has, and compare in the same exchange what all should have alike.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks, all of which call this.
    call : str
        The name of the call that needs it.
    own : object
        What this rank has; returned by rank.
    **facts
        What is compared, such as checksums.

    Raises
    ------
    ValueError
        On every rank alike, when facts or calls differ.
    """
    texts = {"call": call} | {name: text_of(value) for name, value in facts.items()}
    every = comm.allgather((texts, own))
    if any(one != every[0][0] for one, _ in every):
        raise ValueError(format_difference([one for one, _ in every]))
    return [one for _, one in every]


def checksum(a: np.ndarray) -> str:
    """Return a checksum of an array's elements, in about a second for a few gigabytes."""
    return f"checksum {zlib.crc32(np.ascontiguousarray(a).reshape(-1).view(np.uint8)):08x}"


def checksums(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Return the checksums of arrays by name, in float64; the type of what are no numbers."""
    found = {}
    for name, a in arrays.items():
        try:
            a = np.asarray(a)
        except ValueError:    # lists that make no array, which whoever uses them refuses
            found[name] = type(a).__name__
        else:
            real = np.can_cast(a.dtype, np.float64, "same_kind")
            what = checksum(a.astype(np.float64, copy=False)) if real else a.dtype
            found[name] = f"{what} of {a.shape}"
    return found


def format_difference(found: Sequence[Facts]) -> str:
    """Format an error about ranks with different facts, which `found` has in their order."""
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
        parts.append(f"refused on {_format_ranks(ranks)}: {text}")
    return f"{calls[0]}: {'; '.join(parts)}"


def _by_value(values: Sequence[str]) -> str:
    """Format the values of the ranks, each with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{_shortened(value)} on {_format_ranks(of)}" for value, of in ranks.items())


def _shortened(text: str) -> str:
    """Return a text, or its beginning and a checksum if it is long."""
    if len(text) <= SHOWN:
        return text
    checksum = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{text[:SHOWN]}... (checksum {checksum})"


def _format_ranks(ranks: Sequence[int]) -> str:
    """Format ascending numbers of ranks, with runs of three or more as their ends."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [f"{first} to {last}" if last > first + 1 else
             ", ".join(map(str, dict.fromkeys((first, last)))) for first, last in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"


def text_of(value: Any) -> str:
    """Return the text by which a value is compared: the same where the type does not matter.

    1, 1.0 and NumPy's 1 are the same, and so are a dtype and its name, a tuple and a list.  Of
    functions the name counts, and of what is unknown the type.
    """
    if type(value) in (int, str):    # first: a schedule may have 100,000
        return str(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(text_of, value))})"
    if value is None or isinstance(value, (str, np.dtype)):
        return str(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()    # of NumPy and other libraries
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
