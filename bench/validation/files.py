"""Check files against the schema and the rules of a run.

A file with a violation must not be cited; each violation is explained in a line.  Warnings are
for the reader.  All that follows from samples or sizes is computed anew.
"""

from pathlib import Path
from typing import Iterator

import h5py

from bench.errors import StoreError
from bench.records import merged
from bench.records.measurements import Measurements
from bench.records.run_file import FORMAT, SCHEMA, open_file, parse_run
from bench.validation import rules
from bench.validation.warnings import list_warnings
from mm3d import ModelSizes


def check_file(path: Path) -> tuple[list[str], list[str]]:
    """Check a file of one run or a merged one.

    Returns
    -------
    list of str, list of str
        Its violations of the rules, and warnings.
    """
    errors: list[str] = []
    warnings: list[str] = []
    try:
        with open_file(path) as file:
            for place, group in merged.run_groups(file, path):
                where = "" if group.name == "/" else f"{group.name.rpartition('/')[2]}: "
                found_errors, found_warnings = check_run(group, place)
                errors += [where + line for line in found_errors]
                warnings += [where + line for line in found_warnings]
            if file.attrs.get("format") == merged.FORMAT:
                errors += check_versions(file)
    except StoreError as error:
        errors.append(str(error))
    return errors, warnings


def check_run(group: h5py.Group, place: str) -> tuple[list[str], list[str]]:
    """Check one run; return its violations and warnings."""
    if group.attrs.get("format") != FORMAT:
        return [f"{place} is an HDF5 file, but not an mm3d run"], []
    errors = [*check_schema(group), *rules.find_private_text(group), *check_dimensions(group)]
    if group.attrs.get("kind", "model") in rules.VERIFIED and "verification" not in group:
        return [*errors, "there is no verification: no time counts without one"], []
    try:
        run = parse_run(group, place)
        if not isinstance(run, Measurements):
            ModelSizes.from_settings(run.configuration).check()
    except (StoreError, ValueError) as error:
        return [*errors, str(error)], []
    common = rules.MEASUREMENTS if isinstance(run, Measurements) else rules.MODEL
    for rule in common:
        errors += rule(run)
    return errors, list(list_warnings(run))


def check_schema(group: h5py.Group) -> Iterator[str]:
    """Check that the schema version is known."""
    version = group.attrs.get("schema_version")
    if version is None or not 1 <= int(version) <= SCHEMA:
        yield f"schema version {version}: there are versions 1 to {SCHEMA}"


def check_versions(file: h5py.File) -> Iterator[str]:
    """Check that all runs of a merged file have its schema version."""
    for name, group in file["runs"].items():
        if group.attrs.get("schema_version") != file.attrs.get("schema_version"):
            yield (f"{name} has schema version {group.attrs.get('schema_version')}, the merged "
                   f"file {file.attrs.get('schema_version')}: versions must not be mixed")


def check_dimensions(group: h5py.Group) -> Iterator[str]:
    """Check that every dataset has units, and every dimension a scale of its length."""
    lines: list[str] = []

    def visit(name: str, item: h5py.HLObject) -> None:
        if not isinstance(item, h5py.Dataset) or item.is_scale:
            return
        if "units" not in item.attrs:
            lines.append(f"{name} has no units")
        for index, dim in enumerate(item.dims):
            if len(dim) != 1 or len(dim[0]) != item.shape[index]:
                lines.append(f"dimension {index} of {name} has no scale of its length")
    group.visititems(visit)
    yield from lines
