"""Merge runs into one file, in which each is a group ``/runs/NAME``, like the root of its file."""

import io
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Iterator

import h5py
import numpy as np

from bench.errors import StoreError
from bench.records import atomic
from bench.records.measurements import Measurements
from bench.records.run_file import DAMAGE, SCHEMA, SUFFIX, UNLIKE, open_file, parse_run

FORMAT = "mm3d runs"


def runs_in_file(path: str | os.PathLike) -> tuple[list[Measurements], list[str]]:
    """Return the runs in a file of one or several, and a message for each that cannot be read."""
    problems: list[str] = []
    return [run for run, _, _ in _readable(path, problems)], problems


def _readable(path: str | os.PathLike, problems: list[str]) -> Iterator[
        tuple[Measurements, h5py.Group, str]]:
    """Iterate over the runs of a file, each with its group and name; note why others are none."""
    try:
        with open_file(path) as file:
            for place, group in run_groups(file, path):
                try:
                    found = parse_run(group, place)
                except StoreError as error:
                    problems.append(str(error))
                else:
                    yield found, group, place
    except StoreError as error:
        problems.append(str(error))


def is_merged(file: h5py.File) -> bool:
    """Return whether an open file holds merged runs."""
    return np.array_equal(file.attrs.get("format"), FORMAT)


def run_groups(file: h5py.File,
               path: str | os.PathLike) -> Iterator[tuple[str, h5py.Group | None]]:
    """Iterate over the runs of an open file: the name of each in messages, and its group.

    If something else is there instead of a run's group, the group is None: `parse_run` refuses it.

    Raises StoreError when it is a merged file without runs.
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

    The files have one run, or are merged ones; a run found twice is written once.  The new file
    appears when it is complete and on the disk, and only `anew` in the place of another.

    Returns their number, and a message for each run or file that cannot be read.  Raises
    StoreError, and changes nothing, when there are none, or `target` cannot be written so.
    """
    if target.suffix != SUFFIX:
        raise StoreError(f"{target} would not be read with its folder, as its name does not end "
                         f"in {SUFFIX}: {target.name}{SUFFIX} would do")
    image, written, problems = io.BytesIO(), {}, []
    with h5py.File(image, "w", libver="v110") as made:
        made.attrs.update({"format": FORMAT, "schema_version": SCHEMA,
                           "created": datetime.now(timezone.utc).isoformat()})
        for path in paths:
            for run, group, place in _readable(path, problems):
                stem = group.name.rpartition("/")[2] or path.stem
                while written.get(stem, run.created) != run.created:
                    stem += "-other"
                if stem in written:
                    continue
                try:
                    _copy_group(group, made.create_group(f"runs/{stem}"))
                except (*DAMAGE, *UNLIKE) as error:    # in what readers need not look at
                    del made[f"runs/{stem}"]
                    problems.append(f"{place} is damaged: {error}")
                else:
                    written[stem] = run.created
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


def _copy_group(source: h5py.Group, target: h5py.Group) -> None:
    """Copy the contents of a group, with dimension scales and their attachments.

    HDF5's own copying loses the attachments, which are references.
    """
    target.attrs.update(source.attrs)
    datasets = {}
    for name, item in source.items():
        if isinstance(item, h5py.Group):
            _copy_group(item, target.create_group(name))
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
