"""The record of a run of any kind, and how its groups are written and read."""

import functools
import math
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Iterator, Mapping, Sequence

import h5py
import numpy as np

from bench.records import kinds, schema
from mm3d.grid.shape import GridShape

Setting = str | int | float | bool
MOST_BYTES = 2 ** 30    # of a dataset: far more than any run has, yet any machine can read it
FEW_LABELS = 32    # that are stored as they are


@dataclass(frozen=True)
class Check:
    """One quantity compared with its reference."""

    quantity: str    # such as "output" or "gradient of layers.0.mlp.up.weight"
    error: float    # relative Frobenius error, or the error as a multiple of its natural scale
    tolerance: float    # the largest error that passes

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance (a NaN is not)."""
        return self.error <= self.tolerance

    @property
    def share(self) -> float:
        """The error as a share of the tolerance, which is 0 where numbers must be equal."""
        exact = math.inf if self.error else 0.0
        return self.error / self.tolerance if self.tolerance else exact


def failed_checks(checks: Sequence[Check]) -> Iterator[str]:
    """List the quantities whose verification failed."""
    for check in checks:
        if not check.passed:
            yield (f"verification of {check.quantity} has failed: error {check.error:g}, "
                   f"tolerance {check.tolerance:g}; its times must not be written")


@dataclass(frozen=True)
class Variable:
    """Numbers over named dimensions."""

    values: np.ndarray    # NaN where one is missing
    units: str    # "s", "byte", "s byte-1", "1" for plain numbers, and so on
    dims: tuple[str, ...]    # the name of each dimension, one of the scales of its group


@dataclass(frozen=True)
class Group:
    """Variables that share dimensions."""

    scales: dict[str, Sequence]    # the labels or numbers along each dimension
    variables: dict[str, Variable]


@dataclass(frozen=True)
class Measurements:
    """The record of one run of any kind."""

    # "model" of a row of the tables, "gemm", "layer" and so on of a microbenchmark: one that
    # `bench.records.kinds` describes, or any other.
    kind: str
    # The settings of the run, and the machine and software that it ran on.
    configuration: dict[str, Setting]
    environment: dict[str, Setting]
    scales: dict[str, Sequence]    # the labels or numbers along each dimension of the samples
    raw: dict[str, Variable]
    checks: list[Check]    # the verification; empty if there is nothing to verify
    # UTC, ISO 8601.
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat())
    # Numbers with dimensions of their own, by the name of their group in the file.
    groups: dict[str, Group] = field(default_factory=dict)

    def values(self, name: str, **at: int) -> np.ndarray:
        """Return the numbers of a variable; along the dimensions in `at` only those at a place."""
        found = self.variables[name]
        return found.values[tuple(at.get(dim, slice(None)) for dim in found.dims)]

    def of_group(self, group: str, name: str) -> np.ndarray | None:
        """Return the numbers of a variable of a further group; None if it was not recorded."""
        found = self.groups[group].variables.get(name) if group in self.groups else None
        return found and found.values

    def most(self, group: str, name: str) -> float:
        """Return the greatest of these numbers, which may be the only one; NaN if there is none.
        """
        found = self.of_group(group, name)
        return math.nan if found is None else float(found.max())

    @functools.cached_property
    def derived(self) -> dict[str, Variable]:
        """What follows from the raw variables, if the schema has it; see `bench.records.kinds`."""
        dims = schema.derived(self.kind)
        return {name: Variable(np.asarray(values), units, tuple(dims[name].split()))
                for name, (values, units) in kinds.derive(self).items() if name in dims}

    @property
    def variables(self) -> dict[str, Variable]:
        """All variables, raw and derived; derived ones in earlier files are not read."""
        return self.raw | self.derived


@dataclass(frozen=True)
class Place:
    """A place along some dimensions of a record: a row of one of its tables."""

    record: Measurements
    at: dict[str, int]    # the index along each of these dimensions

    def __call__(self, name: str) -> np.ndarray:
        """Return the numbers of a variable here, along its further dimensions."""
        return self.record.values(name, **self.at)

    def __getitem__(self, name: str) -> Any:
        """Return the label along a dimension, or a setting."""
        return (self.record.scales[name][self.at[name]] if name in self.at else
                self.record.configuration[name])


def list_places(record: Measurements, *dims: str) -> list[Place]:
    """List the places along some dimensions; the last dimension varies fastest."""
    return [Place(record, dict(zip(dims, place)))
            for place in np.ndindex(*(len(record.scales[dim]) for dim in dims))]


def fill_measurements(file: h5py.File, run: Measurements) -> None:
    """Write `run` into `file`."""
    file.attrs.update({"created": run.created, "kind": run.kind})
    for group in ("configuration", "environment"):
        file.create_group(group).attrs.update({
            name: schema.printable(value) for name, value in getattr(run, group).items()})
    own = {schema.main_group(run.kind): Group(run.scales, run.raw)}
    if run.checks:
        own["verification"] = Group({"quantity": [check.quantity for check in run.checks]}, {
            name: Variable(np.array([getattr(check, name) for check in run.checks], np.float64),
                           "1", ("quantity",)) for name in ("error", "tolerance")})
    for name, group in (own | run.groups).items():
        _fill_group(file.create_group(name), group)


def _fill_group(file: h5py.Group, found: Group) -> None:
    """Write scales, and variables with a checksum, their units and their scales.

    Many labels are compressed, which HDF5 does with texts of one length alone.
    """
    for dim, values in found.scales.items():
        labels, stored = list(values), {}
        if len(labels) > FEW_LABELS and all(isinstance(one, str) for one in labels):
            encoded = np.char.encode(labels, "utf-8")
            labels = encoded.astype(h5py.string_dtype("utf-8", encoded.dtype.itemsize))
            stored = dict(chunks=labels.shape, compression="gzip")
        file.create_dataset(dim, data=labels, **stored).make_scale(dim)
    for name, variable in found.variables.items():
        numbers = np.asarray(variable.values)
        stored = (dict(chunks=numbers.shape, fletcher32=True, compression="gzip")
                  if numbers.size and numbers.ndim else {})
        made = file.create_dataset(name, data=numbers, **stored)
        made.attrs["units"] = variable.units
        for index, dim in enumerate(variable.dims):
            made.dims[index].attach_scale(file[dim])


def parse_measurements(file: h5py.Group, kind: str,
                       record: type[Measurements] = Measurements) -> Measurements:
    """Read a run of this kind from `file`, as a `record`.

    KeyError, ValueError, TypeError or AttributeError when something is missing, or is not what its
    kind has.
    """
    found = _parse_group(file, schema.main_group(kind), kind)
    settings, environment = (
        _read_settings(file, group, schema.required(kind, name))
        for group, name in (("configuration", "settings"), ("environment", "environment")))
    checks = []
    if "verification" in file:
        own = _parse_group(file, "verification", "verification")
        checks = [Check(str(quantity), float(error), float(tolerance))
                  for quantity, error, tolerance in zip(
                      own.scales["quantity"], own.variables["error"].values,
                      own.variables["tolerance"].values, strict=True)]
    created = read_attribute(file, "created", "")
    if datetime.fromisoformat(created).tzinfo is None:
        raise ValueError(f"created {created} states no time zone")
    run = record(kind, settings, environment, found.scales, found.variables, checks, created,
                 {name: _parse_group(file, name, f"{kind}.{name}")
                  for name in schema.further_groups(kind, file)})
    if schema.of_kind(kind).get("verified") and not run.checks:
        raise ValueError("verification is empty")
    if "grid" in run.configuration:
        grid_shape(run.configuration)
    schema.check_needs(kind, {**run.environment, **run.configuration, **run.raw})
    kinds.check_texts(run)
    schema.check_group(kind, {**run.scales, "bound": kinds.BOUNDS}, run.variables)
    return run


def _parse_group(file: h5py.Group, name: str, kind: str) -> Group:
    """Read a group that `_fill_group` has written; `kind` is the name of its schema."""
    scales: dict[str, Sequence] = {}
    variables: dict[str, Variable] = {}
    for key in file[name]:
        if key in schema.derived(kind):    # in an earlier file
            continue
        found = file[f"{name}/{key}"]
        if not isinstance(found, h5py.Dataset) or found.shape is None:
            raise ValueError(f"{name}/{key} is no array")
        if found.size * found.dtype.itemsize > MOST_BYTES:
            raise ValueError(f"{name}/{key} has {found.size} elements, more than any run")
        if found.is_scale:
            scales[key] = _read_labels(found)
        else:
            if not all(found.dims):
                raise ValueError(f"{name}/{key} has a dimension without a scale")
            dims = tuple(dim.keys()[0] for dim in found.dims)
            variables[key] = Variable(found[...], read_attribute(found, "units", ""), dims)
    try:
        schema.check_group(kind, scales, variables)
    except ValueError as error:
        raise ValueError(f"{name}/{error}") from error
    return Group(scales, variables)


def _read_labels(scale: h5py.Dataset) -> list:
    """Read the labels or numbers of a dimension scale; ValueError if it has something else."""
    values = scale[...]
    if values.ndim == 1 and values.dtype.kind in "iufSO":
        labels = [label.decode() if isinstance(label, bytes) else label
                  for label in values.tolist()]
        if all(isinstance(label, (int, float, str)) for label in labels):
            return labels
    raise ValueError(f"{scale.name[1:]} is no list of labels or numbers")


def read_attribute(item: h5py.HLObject, name: str, default: Any) -> Any:
    """Read an attribute of the type of `default`, which stands for one that is missing.

    Raises ValueError when it is of another type, or a list.
    """
    value = item.attrs.get(name, default)
    value = value.item() if isinstance(value, np.generic) else value
    if type(value) is not type(default):
        raise ValueError(f"the attribute {name} is {value!r:.60}, which should be of type "
                         f"{type(default).__name__}")
    return value


def _read_settings(file: h5py.File, group: str, required: Sequence[str]) -> dict[str, Setting]:
    """Read the attributes of a group as plain Python values, and check them."""
    # In earlier files "ended_by" of a row is an attribute of its samples.
    places = [*["samples"] * (group == "configuration" and "samples" in file), group]
    found = {name: value.item() if isinstance(value, np.generic) else value
             for place in places for name, value in file[place].attrs.items()}
    for name, value in found.items():
        if not isinstance(value, (str, int, float)):
            raise ValueError(f"{group}/{name} is no text, number or truth value")
    schema.check_settings(group, found, required)
    return found


def grid_settings(shape: GridShape) -> dict[str, Setting]:
    """Return the settings ``grid`` and ``grid_axes`` of a configuration: sizes and directions."""
    return {"grid": str(shape), "grid_axes": " ".join(shape)}


def grid_shape(configuration: Mapping[str, Setting]) -> GridShape:
    """Return the grid that a configuration states; ValueError when it states none."""
    return GridShape.parse(str(configuration["grid"]), str(configuration["grid_axes"]))
