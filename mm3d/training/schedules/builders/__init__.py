"""Build schedules by name: one function each, found without a list.

A function in a module of this folder with the decorator `builder` is a builder.  It takes the
numbers of ranks and of micro-batches, and any of the conditions of `build` as parameters.
"""

import functools
import importlib
import inspect
import pkgutil
from numbers import Integral
from typing import Any

from mm3d.names import find_name
from mm3d.training.schedules.schedule import BUILDERS, MOST_STEPS, Schedule, builder

__all__ = ["build", "builder", "check_request", "check_size", "full_name", "all_builders"]


def all_builders() -> list[str]:
    """Return the names of all builders."""
    _import_all()
    return sorted(BUILDERS)


@functools.cache
def _import_all() -> None:
    """Import all modules of this folder, once: a model asks for its builder."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def build(name: str, ranks: int, microbatches: int, **conditions: Any) -> Schedule:
    """Build the schedule called `name`.

    Parameters
    ----------
    name : str
        One of `all_builders`; ``NAME:N`` for N chunks a rank where the builder has a choice, as in
        ``interleaved:3``.
    ranks, microbatches : int
        At least 1 each.
    **conditions
        A builder gets the ones that it has a parameter for: ``chunks`` a rank; ``times`` of its
        stages (`mm3d.training.schedules.clock.Times`), a limit of ``memory`` and the share
        ``kept`` for the gradient of the weights, as in
        `mm3d.training.schedules.clock.peak_in_flight`.

    Raises
    ------
    ValueError
        When the name is unknown, or no such schedule has these numbers of ranks and
        micro-batches, or it has more forward steps than its builder allows.
    """
    plain, given = _request(name, ranks, microbatches, conditions)
    return BUILDERS[plain][0](ranks, microbatches, **given)


def check_request(name: str, ranks: int, microbatches: int) -> None:
    """Raise ValueError when `build` would refuse this name, or so large a schedule."""
    _request(name, ranks, microbatches, {})


def check_size(ranks: int, microbatches: int, chunks: int = 1, most: int = MOST_STEPS) -> None:
    """Raise ValueError when schedules of these sizes have more than `most` forward steps."""
    if (size := ranks * chunks * microbatches) > most:
        raise ValueError(f"{ranks * chunks} stages and {microbatches} micro-batches have {size} "
                         f"forward steps: at most {most} would do")


def full_name(name: str) -> str:
    """Return the name in the spelling of `all_builders`: ``zb-h1`` for ``ZB_H1``.

    Raises ValueError where there is no such schedule.
    """
    plain, colon, count = name.partition(":")
    return find_name(plain, all_builders(), "schedule") + colon + count


def _request(name: str, ranks: int, microbatches: int,
             conditions: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the plain name, and the conditions that its builder gets."""
    plain, colon, count = full_name(name).partition(":")
    function, most, fixed = BUILDERS[plain]
    known = inspect.signature(function).parameters
    given = {key: value for key, value in conditions.items() if key in known}
    if colon:
        if "chunks" not in known:
            raise ValueError(f"schedule {name!r}: {plain} has no choice of chunks")
        if not count.isdecimal() or int(count) < 1:
            raise ValueError(f"schedule {name!r}: a number of chunks of at least 1 is expected "
                             f"after the colon")
        given["chunks"] = int(count)
    chunks = given.get("chunks", known["chunks"].default if "chunks" in known else fixed)
    if not all(isinstance(number, Integral) and number >= 1
               for number in (ranks, microbatches, chunks)):
        raise ValueError(f"{ranks!r} ranks with {chunks!r} chunks and {microbatches!r} "
                         f"micro-batches: whole numbers of at least 1 would do")
    check_size(ranks, microbatches, chunks, most)
    return plain, given
