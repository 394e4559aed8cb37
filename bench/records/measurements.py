"""The datasets that files of every kind of run have, and the record of a microbenchmark."""

from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Mapping, Sequence

import h5py
import numpy as np

from mm3d.grid.shape import GridShape

Setting = str | int | float | bool


@dataclass(frozen=True)
class Check:
    """One quantity compared with its reference.

    Attributes
    ----------
    quantity : str
        Such as "output" or "gradient of layers.0.mlp.up.weight".
    error : float
        Relative Frobenius error, or the error as a multiple of its natural scale.
    tolerance : float
        The largest error that passes.
    """

    quantity: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance (a NaN is not)."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Variable:
    """Numbers over named dimensions.

    Attributes
    ----------
    values : ndarray
        The numbers; NaN where there is none.
    units : str
        "s", "byte", "s byte-1", "1" for plain numbers, and so on.
    dims : tuple of str
        The name of each dimension, one of the scales of its group.
    """

    values: np.ndarray
    units: str
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Variables that share dimensions.

    Attributes
    ----------
    scales : dict of str to sequence
        The labels or numbers along each dimension.
    variables : dict of str to Variable
        The numbers, by name.
    """

    scales: dict[str, Sequence]
    variables: dict[str, Variable]


@dataclass(frozen=True)
class Measurements:
    """One run of a microbenchmark.

    Attributes
    ----------
    kind : str
        "gemm", "collectives", "matmul", "products", "layer", "sweep", "pipeline", "checkpoint",
        "experts", "training", "training-meshes", "training-step", "calibration" or "check"; or
        one that begins with "gpu-".
    configuration, environment : dict of str to str, int, float or bool
        The settings of the run, and the machine and software that it ran on.
    scales : dict of str to sequence
        The labels or numbers along each dimension.
    variables : dict of str to Variable
        The measured and derived numbers, by name.
    checks : list of Check
        The verification; empty if there is nothing to verify.
    created : str
        UTC, ISO 8601.
    schema : int
        The version of the schema of the file that it was read from; 0 if it was not read.
    """

    kind: str
    configuration: dict[str, Setting]
    environment: dict[str, Setting]
    scales: dict[str, Sequence]
    variables: dict[str, Variable]
    checks: list[Check]
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat())
    schema: int = 0


def fill_measurements(file: h5py.File, run: Measurements) -> None:
    """Write the scales and variables of `run` into `file`."""
    fill_group(file, "measurements", Group(run.scales, run.variables))


def parse_measurements(file: h5py.File, kind: str) -> Measurements:
    """Read the record of a microbenchmark of this kind from `file`."""
    found = parse_group(file["measurements"])
    return Measurements(kind, read_settings(file, "configuration"),
                        read_settings(file, "environment"),
                        found.scales, found.variables,
                        parse_checks(file) if "verification" in file else [],
                        str(file.attrs["created"]), int(file.attrs["schema_version"]))


def fill_group(file: h5py.File, name: str, found: Group) -> None:
    """Write a group of variables with their scales."""
    group = file.create_group(name)
    for dim, labels in found.scales.items():
        write_scale(group, dim, list(labels))
    for variable, kept in found.variables.items():
        write_dataset(group, variable, np.asarray(kept.values), kept.units, kept.dims)


def parse_group(group: h5py.Group) -> Group:
    """Read a group that `fill_group` has written."""
    scales, variables = {}, {}
    for name, found in group.items():
        if found.is_scale:
            labels = found[...].tolist()
            scales[name] = [label.decode() if isinstance(label, bytes) else label
                            for label in labels]
        else:
            dims = tuple(dim[0].name.rpartition("/")[2] for dim in found.dims)
            variables[name] = Variable(found[...], str(found.attrs["units"]), dims)
    return Group(scales, variables)


def fill_checks(file: h5py.File, checks: list[Check]) -> None:
    """Write the verification, if any."""
    if not checks:
        return
    group = file.create_group("verification")
    write_scale(group, "quantity", [check.quantity for check in checks])
    for name in ("error", "tolerance"):
        values = np.array([getattr(check, name) for check in checks], np.float64)
        write_dataset(group, name, values, "1", ("quantity",))


def parse_checks(file: h5py.File) -> list[Check]:
    """Read the verification in `file`."""
    group = file["verification"]
    return [Check(quantity.decode(), float(error), float(tolerance)) for quantity, error,
            tolerance in zip(group["quantity"][...], group["error"][...],
                             group["tolerance"][...], strict=True)]


def write_scale(group: h5py.Group, name: str, values) -> None:
    """Write a dimension scale: the labels or numbers along the dimension `name`."""
    group.create_dataset(name, data=values).make_scale(name)


def write_dataset(group: h5py.Group, name: str, values: np.ndarray, units: str,
                  dims: tuple[str, ...]) -> None:
    """Write a dataset with a checksum, its units, and `group`'s scales as its dimensions."""
    stored = (dict(chunks=values.shape, fletcher32=True, compression="gzip")
              if values.size and values.ndim else {})
    found = group.create_dataset(name, data=values, **stored)
    found.attrs["units"] = units
    for index, dim in enumerate(dims):
        found.dims[index].attach_scale(group[dim])


def read_settings(file: h5py.File, group: str,
                  required: tuple[str, ...] = ()) -> dict[str, Setting]:
    """Read the attributes of a group as plain Python values.

    Raises
    ------
    KeyError
        When a required one is missing.
    """
    attributes = file[group].attrs
    for name in required:
        if name not in attributes:
            raise KeyError(f"{group}/{name} is missing")
    return {name: value.item() if isinstance(value, np.generic) else value
            for name, value in attributes.items()}


def grid_settings(shape: GridShape) -> dict[str, Setting]:
    """Return the settings ``grid`` and ``grid_axes`` of a configuration: sizes and directions."""
    return {"grid": str(shape), "grid_axes": " ".join(shape)}


def grid_shape(configuration: Mapping[str, Setting]) -> GridShape:
    """Return the grid that a configuration states.

    Its directions are x, y, z where ``grid_axes`` is missing or has not one for each size, as in
    older files of the microbenchmark ``collectives``, which names those of more than one rank.

    Raises
    ------
    ValueError
        When it states no grid.
    """
    text, axes = str(configuration["grid"]), str(configuration.get("grid_axes", ""))
    complete = len(axes.replace(" ", "")) == len(text.split("x"))
    return GridShape.parse(text, axes if complete else None)
