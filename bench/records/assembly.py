"""Put records together from plain numbers: the schema of a kind states their dimensions."""

from typing import Any, Mapping, Sequence

import numpy as np

from bench.records import schema
from bench.records.measurements import Check, Group, Measurements, Setting, Variable

Numbers = Mapping[str, Mapping[str, Any]]    # by units such as "s", and by name


def make_group(kind: str, numbers: Numbers, /, **scales: Sequence) -> Group:
    """Make a group of variables, of a kind or KIND.GROUP.

    Parameters
    ----------
    numbers : mapping
        The numbers of each variable, by units.
    **scales
        Labels of dimensions.  Those of the others are the only ones of so many that the schema
        has, or they are counted from 0.
    """
    dims, labels, variables = schema.dimensions(kind), schema.labels(kind), {}
    for units, named in numbers.items():
        for name, values in named.items():
            variables[name] = Variable(np.asarray(values), units, tuple(dims[name].split()))
            for dim, count in zip(variables[name].dims, np.shape(values)):
                known = [some for some in labels.get(dim, ()) if len(some) == count]
                scales.setdefault(dim, known[0] if len(known) == 1 else range(count))
    return Group(scales, variables)


def make_record(kind: str, configuration: dict[str, Setting], environment: dict[str, Setting],
                numbers: Numbers, checks: list[Check], /, **scales: Sequence) -> Measurements:
    """Make the record of a run; numbers and scales are as of `make_group`."""
    found = make_group(kind, numbers, **scales)
    return Measurements(kind, configuration, environment, found.scales, found.variables, checks)


def add_numbers(record: Measurements, numbers: Numbers, /, **scales: Sequence) -> Measurements:
    """Add further variables to a record, as of `make_group`, and return it."""
    found = make_group(record.kind, numbers, **{**record.scales, **scales})
    record.scales.update(found.scales)
    record.raw.update(found.variables)
    return record


def transport_names(grid: Any) -> str:
    """Return the names of all transports of the grid's collectives; "none" on one rank."""
    names = {getattr(axis.transport, "name", "mpi") for axis in grid.axes.values()
             if axis.size > 1}
    return " ".join(sorted(names)) or "none"
