"""Check files against the schema and the rules of a run.

A file with a violation must not be cited; each violation is explained in a line.  Warnings are
for the reader.  All that follows from samples or sizes is computed anew.
"""

from pathlib import Path
from typing import Any, Callable, Iterator

import h5py
import numpy as np

from bench.errors import StoreError, Unreadable
from bench.records import merged
from bench.records.model_run import Run
from bench.records.run_file import DAMAGE, FORMAT, UNLIKE, open_file, parse_run
from bench.validation import private_text, rules
from bench.validation.warnings import list_warnings
from mm3d import ModelSizes


def check_file(path: Path) -> tuple[list[str], list[str]]:
    """Check a file of one run or a merged one.

    Returns
    -------
    list of str, list of str
        Its violations of the rules, and warnings.

    Raises
    ------
    Unreadable
        When it cannot be read: whether it is valid nobody can tell.
    """
    errors: list[str] = []
    warnings: list[str] = []
    try:
        with open_file(path) as file:
            together = merged.is_merged(file)
            for place, group in merged.run_groups(file, path):
                if group is None:
                    errors.append(f"{place} is damaged: it is no group")
                    continue
                where = f"{group.name.rpartition('/')[2]}: " if together else ""
                found_errors, found_warnings = check_run(group, place)
                errors += [where + line for line in found_errors]
                warnings += [where + line for line in found_warnings]
    except Unreadable:
        raise
    except StoreError as error:
        errors.append(str(error))
    return errors, warnings


def check_run(group: h5py.Group, place: str) -> tuple[list[str], list[str]]:
    """Check one run; return its violations and warnings."""
    if not np.array_equal(group.attrs.get("format"), FORMAT):
        return [f"{place} is an HDF5 file, but not an mm3d run"], []
    errors: list[str] = []
    for look in (private_text.find_private_text, check_dimensions):
        errors += checked(look, group)
    if str(group.attrs.get("kind", "model")) in rules.VERIFIED and "verification" not in group:
        return [*errors, "there is no verification: no time counts without one"], []
    try:
        run = parse_run(group, place)
        if isinstance(run, Run):
            ModelSizes.from_settings(run.configuration).check()
    except (StoreError, ValueError) as error:
        return [*errors, str(error)], []
    for rule in rules.MODEL if isinstance(run, Run) else rules.MEASUREMENTS:
        errors += checked(rule, run)
    return errors, checked(list_warnings, run)


def checked(rule: Callable[[Any], Iterator[str]], what: Any) -> list[str]:
    """Return the violations of a rule; one that says so where its values cannot be judged."""
    try:
        return list(rule(what))
    except (*DAMAGE, *UNLIKE, ArithmeticError) as error:
        about = (rule.__doc__ or rule.__name__).partition("\n")[0].rstrip(".")
        return [f"cannot be judged ({about[:1].lower()}{about[1:]}): {error!r}"]


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
