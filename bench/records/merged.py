"""Merge runs into one file, in which each is a group ``/runs/NAME``, like the root of its file."""

import io
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Iterator

import h5py

from bench.errors import StoreError
from bench.records import atomic
from bench.records.measurements import Measurements
from bench.records.model_run import Run
from bench.records.run_file import open_file, parse_run

FORMAT = "mm3d runs"


def runs_in_file(path: str | os.PathLike) -> list[Run | Measurements]:
    """Read the run in a file, or all runs of a merged one.

    Raises
    ------
    StoreError
        When the file, or one of the runs in it, cannot be read.
    """
    with open_file(path) as file:
        return [parse_run(group, place) for place, group in run_groups(file, path)]


def run_groups(file: h5py.File, path: str | os.PathLike) -> Iterator[tuple[str, h5py.Group]]:
    """Iterate over the runs of an open file: the name of each in messages, and its group."""
    if file.attrs.get("format") != FORMAT:
        yield str(path), file
        return
    for name, group in file["runs"].items():
        yield f"{path}, run {name},", group


def merge_files(paths: list[Path], target: Path, anew: bool = False) -> int:
    """Write the runs of some files into one file, and return their number.

    Parameters
    ----------
    paths : list of Path
        Files of one run, or merged ones; a run found twice is written once.
    target : Path
        The new file, which appears when it is complete and on the disk.
    anew : bool
        Whether an existing file may be replaced.

    Raises
    ------
    StoreError
        When a file cannot be read, there are no runs, the versions of the schema differ, or
        `target` exists already and is not to be made `anew`, or cannot be written; no file is
        changed then.
    """
    image, versions, written = io.BytesIO(), {}, {}
    with h5py.File(image, "w", libver="v110") as made:
        made.attrs.update({"format": FORMAT, "created": datetime.now(timezone.utc).isoformat()})
        for path in paths:
            with open_file(path) as file:
                for place, group in run_groups(file, path):
                    run = parse_run(group, place)
                    versions.setdefault(run.schema, place)
                    stem = group.name.rpartition("/")[2] or Path(path).stem
                    while written.get(stem, run.created) != run.created:
                        stem += "-other"
                    if stem not in written:
                        written[stem] = run.created
                        copy_group(group, made.create_group(f"runs/{stem}"))
        if not written:
            raise StoreError(f"there are no runs to merge in {target}: name files that have some")
        if len(versions) > 1:
            found = "; ".join(f"version {version} in {place}"
                              for version, place in sorted(versions.items()))
            raise StoreError(f"files of different versions of the schema are not merged: {found}")
        made.attrs["schema_version"] = max(versions)
        count = len(made["runs"])
    try:
        (atomic.replace if anew else atomic.create)(target, image.getbuffer())
    except FileExistsError as error:
        if target.exists():
            raise StoreError(f"{target} is there already: name a new file") from error
        raise StoreError(f"{target}.part is there, of a merge that goes on or was killed: delete "
                         f"it if none goes on, or name another file") from error
    except OSError as error:
        raise StoreError(f"{target} could not be written ({error.strerror}); nothing was "
                         f"changed") from error
    return count


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
                target[name].dims[index].attach_scale(target[scale.name.rpartition("/")[2]])
