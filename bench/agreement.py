"""Raise the same error on every rank when one rank cannot go on.

If one rank raised alone, the others would wait for it in their next collective for ever.
"""

from typing import Any, Callable, TypeVar

from bench.errors import StoreError, UsageError

Returned = TypeVar("Returned")


def agree(problem: str | None, comm: Any, error: type[Exception] = UsageError) -> None:
    """Raise `error`, with the first problem found, on every rank if one has a problem."""
    found = next(filter(None, comm.allgather(problem)), None)
    if found:
        raise error(found)


def make_on_each_rank(make: Callable[[], Returned], comm: Any) -> Returned:
    """Call `make` on each rank and return its result.

    UsageError on every rank, when `make` raises a ValueError or an OSError on one; it says on how
    many, if not on all.
    """
    made = problem = None
    try:
        made = make()
    except (ValueError, OSError) as error:
        problem = str(error)
    problems = [text for text in comm.allgather(problem) if text]
    if problems:
        raise UsageError(problems[0] + f" ({len(problems)} of {comm.size} ranks)" * (
            len(problems) < comm.size))
    return made


def make_on_rank_0(make: Callable[[], Returned], comm: Any,
                   wait: Callable[[Any], None] | None = None) -> Returned | None:
    """Call `make` on rank 0 alone and return its result there, None on the other ranks.

    Every rank calls `wait`, with `comm`, before rank 0 broadcasts its problem, such as
    `mm3d.launcher.wait_patiently` where `make` takes long.

    StoreError or UsageError on every rank, when `make` raises a StoreError, or another ValueError;
    any other error ends the job.
    """
    made = problem = None
    if comm.rank == 0:
        try:
            made = make()
        except StoreError as failure:
            problem = failure
        except ValueError as failure:
            problem = UsageError(str(failure))
    if wait:
        wait(comm)
    problem = comm.bcast(problem)
    if problem:
        raise problem
    return made


def broadcast_from_rank_0(make: Callable[[], Returned], comm: Any) -> Returned:
    """Call `make` on rank 0 alone and return its result on every rank; see `make_on_rank_0`."""
    return comm.bcast(make_on_rank_0(make, comm))
