"""Describe the kinds of records, a file each: schema, derived variables, and tables.

``NAME.py`` in this folder is the kind NAME ("gpu" stands for all that begin so and have no file)
and needs to be named nowhere else. All of these may be in it:

- ``derive(record)`` returns the variables that follow from the raw ones: numbers and units by
  name, whose dimensions the schema states;
- ``check_texts(record)`` checks texts that readers parse;
- ``tables(records)`` makes the tables of records of this kind, with notes, from columns
  (`bench.document.Column`). Without it, tables show all variables by their dimensions
  (`bench.reports.micro_tables`).

``SCHEMAS`` has, by the name of a kind, or KIND.GROUP of a further group of its files:

- ``settings``, ``environment``: the names in these that its readers need;
- ``group``: the group of its variables, by default "measurements"; a further one is in every file
  if it is ``required``;
- ``variables``, ``optional``, ``derived``: dimensions of the variables that every file has, may
  have, and that follow from others. Files may hold more;
- ``labels``: the labels that a dimension may have, where readers look for labels by name;
- ``needs``: what a record must have beside a variable, or a setting that is not "" or "none";
- ``verified``: whether every record has its verification;
- variables that are ``positive``, greater than 0 wherever they are numbers, as reports divide by
  them; ``signed``, which may be below 0 as differences of two measurements; ``spent``, whose sums
  over the last dimension are greater than 0; ``complete``, without NaN; ``whole``, integers; and
  dimensions that may be ``empty``.
"""

import functools
import importlib
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Sequence

import numpy as np

from bench.cluster.spec import Cluster
from bench.statistics import median_interval

BOUNDS = ("median", "low", "high", "confidence")
Derived = dict[str, tuple[Any, str]]    # numbers and units, by name
KIND_NAMES = {path.stem for path in Path(__file__).parent.glob("*.py")} - {"__init__"}


def derive(record: Any) -> Derived:
    """Compute what follows from the measured numbers.

    Raises one of `run_file.UNLIKE` where a record is not what its schema says.
    """
    find = getattr(module_of(record.kind), "derive", lambda record: {})
    with np.errstate(all="ignore"):    # checks of the record find NaN and infinity
        return find(record)


def check_texts(run: Any) -> None:
    """Check the texts of a record that its readers parse; ValueError names one that is wrong."""
    if run.environment.get("emulated_cluster"):
        named("environment/emulated_cluster", Cluster.parse,
              str(run.environment["emulated_cluster"]))
    getattr(module_of(run.kind), "check_texts", lambda run: None)(run)


def named(name: str, parse: Callable[..., Any], *given: Any) -> Any:
    """Parse a text; ValueError with its name where it cannot be."""
    try:
        return parse(*given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def require_as_many(name: str, found: Sequence, labels: Sequence, dim: str) -> None:
    """Raise ValueError unless there is one for each label of a dimension."""
    if len(found) != len(labels):
        raise ValueError(f"{name} names {len(found)}, which should be {len(labels)}: one for each "
                         f"{dim}")


def schemas_of(kind: str) -> dict[str, dict[str, Any]]:
    """Return the schemas in the file of a kind; none for an unknown kind."""
    return getattr(module_of(kind), "SCHEMAS", {})


def module_of(kind: str) -> ModuleType | None:
    """Return the file of a kind; None without one."""
    name = kind.replace("-", "_")
    if name not in KIND_NAMES and kind.startswith("gpu-"):
        name = "gpu"
    return importlib.import_module(f"{__name__}.{name}") if name in KIND_NAMES else None


def each(make: Callable[[Any], list]) -> Callable[[Sequence[Any]], list]:
    """Turn a function that makes the tables of one record into ``tables``."""
    @functools.wraps(make)
    def tables(records: Sequence[Any]) -> list:
        return list(itertools.chain.from_iterable(map(make, records)))
    return tables


def medians(samples: np.ndarray) -> np.ndarray:
    """Compute medians and intervals of the last dimension, (..., bound); NaN without samples."""
    lines = [line[~np.isnan(line)] for line in samples.reshape(-1, samples.shape[-1])]
    found = [median_interval(line) if len(line) else [np.nan] * len(BOUNDS) for line in lines]
    return np.reshape(found, (*samples.shape[:-1], len(BOUNDS)))
