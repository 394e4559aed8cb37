"""Merge runs into one file, in which each is a group ``/runs/NAME``, like the root of its file."""

import io
import os
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Callable, Iterator

import h5py
import numpy as np

from bench.errors import StoreError
from bench.records import atomic
from bench.records.measurements import Measurements
from bench.records.run_file import DAMAGE, SCHEMA, SUFFIX, UNLIKE, open_file, parse_run

FORMAT = "mm3d runs"


def runs_in_file(path: str | os.PathLike) -> tuple[list[Measurements], list[str]]:
    """Read the run in a file, or all runs of a merged one.

    Returns
    -------
    list of Measurements, list of str
        The runs, and a message for each that could not be read: the others are there.
    """
    runs: list[Measurements] = []
    return runs, take_runs(path, lambda run, group, place: runs.append(run))


def take_runs(path: str | os.PathLike, take: Callable[..., None]) -> list[str]:
    """Give each run, its group and its name away; return messages of those that cannot be read."""
    problems: list[str] = []
    try:
        with open_file(path) as file:
            for place, group in run_groups(file, path):
                try:
                    take(parse_run(group, place), group, place)
                except StoreError as error:
                    problems.append(str(error))
    except StoreError as error:
        problems.append(str(error))
    return problems


def is_merged(file: h5py.File) -> bool:
    """Return whether an open file holds merged runs."""
    return np.array_equal(file.attrs.get("format"), FORMAT)


def run_groups(file: h5py.File,
               path: str | os.PathLike) -> Iterator[tuple[str, h5py.Group | None]]:
    """Iterate over the runs of an open file: the name of each in messages, and its group.

    If something else is there instead of a run's group, the group is None: `parse_run` refuses it.

    Raises
    ------
    StoreError
        When it is a merged file without runs.
    """
    if not is_merged(file):
        yield str(path), file
        return
    runs = _group(file, "runs")
    if runs is None or not len(runs):
        raise StoreError(f"{path} is damaged or not a complete merged file: it has no runs")
    for name in runs:
        yield f"{path}, run {name},", _group(runs, name)


def _group(parent: h5py.Group, name: str) -> h5py.Group | None:
    """Return a group, or None where there is something else, or a link to nothing."""
    try:
        found = parent[name]
    except (KeyError, OSError, RuntimeError):
        return None
    return found if isinstance(found, h5py.Group) else None


def merge_files(paths: list[Path], target: Path, anew: bool = False) -> tuple[int, list[str]]:
    """Write the runs of some files into one file.

    Parameters
    ----------
    paths : list of Path
        Files of one run, or merged ones; a run found twice is written once.
    target : Path
        The new file, which appears when it is complete and on the disk.
    anew : bool
        Whether an existing file may be replaced.

    Returns
    -------
    int, list of str
        The number of runs, and a message for each run or file that was left out, as it cannot be
        read.

    Raises
    ------
    StoreError
        When there are no runs, or `target` is named otherwise than files that are read, or exists
        already and is not to be made `anew`, or cannot be written; no file is changed then.
    """
    if target.suffix != SUFFIX:
        raise StoreError(f"{target} would not be read with its folder, as its name does not end "
                         f"in {SUFFIX}: {target.name}{SUFFIX} would do")
    image, written, problems = io.BytesIO(), {}, []

    def add(path: Path, run: Measurements, group: h5py.Group, place: str) -> None:
        stem = group.name.rpartition("/")[2] or path.stem
        while written.get(stem, run.created) != run.created:
            stem += "-other"
        if stem not in written:
            copy_run(group, made, f"runs/{stem}", place)
            written[stem] = run.created

    with h5py.File(image, "w", libver="v110") as made:
        made.attrs.update({"format": FORMAT, "schema_version": SCHEMA,
                           "created": datetime.now(timezone.utc).isoformat()})
        for path in paths:
            problems += take_runs(path, partial(add, path))
        if not written:
            raise StoreError("\n".join([f"there are no runs to merge into {target}: name files "
                                        f"that have some", *problems]))
    try:
        (atomic.replace if anew else atomic.create_file)(target, image.getbuffer())
    except FileExistsError as error:
        if target.exists():
            raise StoreError(f"{target} is there already: name a new file") from error
        raise StoreError(f"{target}.part is there, of a merge that goes on or was killed: delete "
                         f"it if none goes on, or name another file") from error
    except OSError as error:
        raise StoreError(f"{target} could not be written ({error.strerror}); nothing was "
                         f"changed") from error
    return len(written), problems


def copy_run(source: h5py.Group, made: h5py.File, name: str, place: str) -> None:
    """Copy a run as the new group `name`, or nothing of it.

    Raises
    ------
    StoreError
        When something in it, which its readers need not look at, cannot be read.
    """
    try:
        copy_group(source, made.create_group(name))
    except (*DAMAGE, *UNLIKE) as error:
        del made[name]
        raise StoreError(f"{place} is damaged: {error}") from error


def copy_group(source: h5py.Group, target: h5py.Group) -> None:
    """Copy the contents of a group, with dimension scales and their attachments.

    HDF5's own copying loses the attachments, which are references.
    """
    target.attrs.update(source.attrs)
    datasets = {}
    for name, item in source.items():
        if isinstance(item, h5py.Group):
            copy_group(item, target.create_group(name))
        else:
            datasets[name] = item
    for name, item in datasets.items():
        stored = {key: getattr(item, key) for key in ("chunks", "compression", "fletcher32")
                  if item.chunks}
        made = target.create_dataset(name, data=item[...], dtype=item.dtype, **stored)
        made.attrs.update({key: value for key, value in item.attrs.items() if key not in (
            "CLASS", "NAME", "REFERENCE_LIST", "DIMENSION_LIST")})
        if item.is_scale:
            made.make_scale(name)
    for name, item in datasets.items():
        for index, dim in enumerate(item.dims if not item.is_scale else ()):
            for scale in dim.values():
                if scale.name:    # the file may have lost it
                    target[name].dims[index].attach_scale(target[scale.name.rpartition("/")[2]])
