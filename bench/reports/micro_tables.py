"""Make tables of records of any kind: those that the kind declares, or else by dimensions."""

from typing import Callable, Sequence

from bench.document import Column, Notes, Part, make_table, spread
from bench.records import kinds
from bench.records.measurements import Measurements, list_places
from bench.records.notes import describe_machine

# Dimensions of samples and bounds, which have no columns in the tables of an unknown kind.
SAMPLE_DIMS = {"repetition", "rank", "edge", "bound"}


def make_parts(records: Sequence[Measurements]) -> list[Part]:
    """Make the tables and notes of all records, by kind."""
    found: list[Part] = []
    for kind in sorted({record.kind for record in records}):
        make = getattr(kinds.module_of(kind), "tables", show_all)
        found += make([record for record in records if record.kind == kind])
    return found


def showing(show: Callable[[Sequence[Part]], None]) -> Callable[[Measurements], None]:
    """Return a function that shows the tables and notes of a record by `show`."""
    return lambda record: show(make_parts([record]))


@kinds.each
def show_all(record: Measurements) -> list[Part]:
    """Make the tables of a record of any kind: medians and bounds by each set of dimensions."""
    columns: dict[tuple[str, ...], list[Column]] = {}
    for name, variable in record.variables.items():
        dims = tuple(dim for dim in variable.dims if dim not in SAMPLE_DIMS)
        left = [dim for dim in variable.dims if dim in SAMPLE_DIMS]
        if left not in ([], ["bound"]):
            continue
        title = name if variable.units == "1" else f"{name} ({variable.units})"
        first = [Column(dim, of=lambda at, dim=dim: str(at[dim])) for dim in dims]
        columns.setdefault(dims, first).extend(
            spread(lambda at, name=name: at(name), ".4g", title) if left else
            [Column(title, of=lambda at, name=name: at(name))])
    found: list[Part] = [
        make_table(f"{record.kind}: by {', '.join(dims)}" if dims else record.kind, shown,
                   list_places(record, *dims)) for dims, shown in columns.items()]
    settings = ", ".join(f"{name} {value}" for name, value in record.configuration.items())
    about = [f"{settings}.", f"{describe_machine(record)}."]
    return [*found, Notes(f"About {record.kind}:", about)]
