"""Results: one run is one HDF5 file.

A file appears under its final name only when it is complete and on the disk, and is never
written again, so that neither a kill, nor a full disk, nor a second writer loses anything that
was finished.  ``results/README.rst`` describes the schema.
"""

import io
import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Iterator

import h5py
import numpy as np

from bench.errors import StoreError
from bench.records import atomic
from bench.records.measurements import (Check, Group, Measurements, Setting, fill_checks,
                                        fill_group, fill_measurements, grid_shape, parse_checks,
                                        parse_group, parse_measurements, read_settings,
                                        write_dataset, write_scale)
from mm3d.grid.axis import COLLECTIVES
from mm3d.grid.shape import GridShape
from mm3d.tracing.events import PHASES

FORMAT = "mm3d run"
SCHEMA = 3

AXES = ("x", "y", "z")    # the directions that every record has
COUNTS = {"calls": "1", "messages": "1", "words": "1", "bytes": "byte"}
CONFIGURATION = ("table", "scheme", "preset", "grid", "grid_axes", "layers", "hidden", "heads",
                 "batch", "seq", "mlp_factor", "dtype", "warmup", "repetitions", "overridden",
                 "verified_measured_model")
ENVIRONMENT = ("ranks", "cores", "ranks_per_core", "oversubscribed", "cpu_model", "backend", "mpi",
               "blas", "blas_architecture", "blas_threads", "python", "numpy_version",
               "git_commit", "git_clean")
PUBLISHED = {"gpus": "1", "batch": "1", "hidden": "1", "forward_time": "s",
             "backward_time": "s", "average_step_time": "s", "recomputed_step_time": "s"}
GROUPS = ("parts", "machine", "memory")


def directions_of(shape: GridShape) -> tuple[str, ...]:
    """Return the directions of a record: those of the grid, then those of `AXES` that it lacks.

    Along the latter nothing moves; readers that know of x, y and z alone find these in all files
    of grids without further directions.
    """
    return (*shape, *(axis for axis in AXES if axis not in shape))


@dataclass
class Run:
    """One measured case.

    Attributes
    ----------
    configuration, environment : dict of str to str, int, float or bool
        What was run, and on what.
    samples : dict of str to ndarray
        For each of `PHASES` the seconds of every repetition and rank, (repetitions, ranks).
    traffic : dict of str to ndarray of int64
        For each of `COUNTS` what was counted of every rank in one step, (phases, ranks,
        directions, collectives) in the orders of `PHASES`, `directions` and `COLLECTIVES`; and
        "moved", float64, the words that its transport moved (`mm3d.grid.axis.Traffic`), absent in
        files of before.
    expected_words : ndarray of int64
        The closed form of the words summed over ranks, (phases, directions, collectives).
    checks : list of Check
        The verification.
    published : dict of str to float
        The row that the paper prints, with the keys of `PUBLISHED`; times in seconds.
    created : str
        UTC, ISO 8601.
    late : dict of str to ndarray
        For each of `PHASES` how many seconds after the first rank each began, like `samples`;
        empty in files of version 1.
    ended_by : str
        What ended the repetitions: "width", "repetitions", "seconds" or "stopped".
    clock : dict of str to float
        "resolution" and "offset_error", seconds; empty in files of version 1.
    schema : int
        The version of the schema that it was read from.
    groups : dict of str to Group
        Of `GROUPS` those that were measured: where the time went, what the machine can do, and
        memory; ``results/README.rst`` describes them.  Empty in files before version 3.
    directions : tuple of str
        The directions along which traffic was counted; see `directions_of`.
    """

    configuration: dict[str, Setting]
    environment: dict[str, Setting]
    samples: dict[str, np.ndarray]
    traffic: dict[str, np.ndarray]
    expected_words: np.ndarray
    checks: list[Check]
    published: dict[str, float]
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat())
    late: dict[str, np.ndarray] = field(default_factory=dict)
    ended_by: str = "repetitions"
    clock: dict[str, float] = field(default_factory=dict)
    schema: int = SCHEMA
    groups: dict[str, Group] = field(default_factory=dict)
    directions: tuple[str, ...] = AXES

    @property
    def ranks(self) -> int:
        """Ranks of the run."""
        return self.samples["forward"].shape[1]

    @property
    def grid(self) -> GridShape:
        """The grid that the configuration states."""
        return grid_shape(self.configuration)


def check_folder(folder: str | os.PathLike, what: str = "results folder",
                 option: str = "--out") -> Path:
    """Make `folder` if need be, and make sure that files can be written in it.

    Parameters
    ----------
    folder : path
        The folder.
    what, option : str
        What it is, and the option that names it, for the message when it cannot be.

    Raises
    ------
    StoreError
        When they cannot.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic.probe_folder(folder)
    except OSError as error:
        raise StoreError(f"{what} {folder} cannot be written ({error.strerror}): name another "
                         f"with {option}") from error
    return folder


def write_run(run: Run | Measurements, folder: str | os.PathLike, name: str) -> Path:
    """Write `run` into `folder` as a file of its own.

    Parameters
    ----------
    run : Run or Measurements
        What to write.
    folder : path
        An existing folder.
    name : str
        How the file's name begins; the time and ``.h5`` are added, and a number where another
        run has that name already.

    Returns
    -------
    Path
        The file, complete and on the disk.

    Raises
    ------
    StoreError
        When it cannot be written; nothing is left behind then.
    """
    image = io.BytesIO()
    with h5py.File(image, "w", libver="v110") as file:
        file.attrs.update({"format": FORMAT, "schema_version": SCHEMA, "created": run.created,
                           "kind": "model" if isinstance(run, Run) else run.kind})
        for group in ("configuration", "environment"):
            file.create_group(group).attrs.update(getattr(run, group))
        fill_checks(file, run.checks)
        (_fill if isinstance(run, Run) else fill_measurements)(file, run)
    stamp = datetime.fromisoformat(run.created).strftime("%Y%m%dT%H%M%SZ")
    try:
        return _publish(image.getbuffer(), Path(folder), f"{name}-{stamp}")
    except OSError as error:
        raise StoreError(f"{name} could not be written in {folder} ({error.strerror}); the "
                         f"files that are there are untouched") from error


def read_run(path: str | os.PathLike) -> Run | Measurements:
    """The run in the file `path`: of a model, or of a microbenchmark.

    Raises
    ------
    StoreError
        When the file is truncated, damaged, of another kind, or of a newer schema.
    """
    with open_file(path) as file:
        return parse_run(file, path)


@contextmanager
def open_file(path: str | os.PathLike) -> Iterator[h5py.File]:
    """A file of results; what cannot be opened or read in it is a StoreError."""
    try:
        with h5py.File(path, "r") as file:
            yield file
    except StoreError:
        raise
    except FileNotFoundError as error:
        raise StoreError(f"{path} does not exist") from error
    except (OSError, RuntimeError) as error:
        raise StoreError(f"{path} is truncated, damaged, or no HDF5 file: {error}") from error
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} is damaged or not a complete run: {error}") from error


def parse_run(file: h5py.Group, path: str | os.PathLike) -> Run | Measurements:
    """The run in an open file, or in a group of one; `path` is what messages call it."""
    _check_kind(file, path)
    kind = str(file.attrs.get("kind", "model"))
    try:
        run = _parse(file) if kind == "model" else parse_measurements(file, kind)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} is damaged or not a complete run: {error}") from error
    run.schema = int(file.attrs["schema_version"])
    return run


def _publish(data: memoryview, folder: Path, stem: str) -> Path:
    """Write `data` as the next free name of `stem`."""
    for attempt in range(1, 1000):
        final = folder / (f"{stem}.h5" if attempt == 1 else f"{stem}-{attempt}.h5")
        try:
            atomic.create(final, data)
        except FileExistsError:
            continue
        return final
    raise FileExistsError(0, f"{stem}.h5 and 999 numbered names are all taken")


def _fill(file: h5py.File, run: Run) -> None:
    repetitions, ranks = run.samples["forward"].shape
    samples = file.create_group("samples")
    write_scale(samples, "repetition", np.arange(repetitions))
    write_scale(samples, "rank", np.arange(ranks))
    for phase in PHASES:
        write_dataset(samples, phase, run.samples[phase].astype(np.float64), "s",
                      ("repetition", "rank"))
        if run.late:
            write_dataset(samples, f"{phase}_late", run.late[phase].astype(np.float64), "s",
                          ("repetition", "rank"))
    samples.attrs["ended_by"] = run.ended_by
    for name, seconds in run.clock.items():
        file.require_group("clock").create_dataset(name, data=seconds).attrs["units"] = "s"
    traffic = file.create_group("traffic")
    for name, labels in (("phase", PHASES), ("axis", run.directions),
                         ("collective", COLLECTIVES)):
        write_scale(traffic, name, list(labels))
    write_scale(traffic, "rank", np.arange(ranks))
    for name, unit in COUNTS.items():
        write_dataset(traffic, name, run.traffic[name].astype(np.int64), unit,
                      ("phase", "rank", "axis", "collective"))
    if "moved" in run.traffic:
        write_dataset(traffic, "moved", run.traffic["moved"].astype(np.float64), "1",
                      ("phase", "rank", "axis", "collective"))
    write_dataset(traffic, "expected_words", run.expected_words.astype(np.int64), "1",
                  ("phase", "axis", "collective"))
    published = file.create_group("published")
    for name, unit in PUBLISHED.items():
        published.create_dataset(name, data=run.published[name]).attrs["units"] = unit
    for name, group in run.groups.items():
        fill_group(file, name, group)


def _check_kind(file: h5py.File, path) -> None:
    if file.attrs.get("format") != FORMAT:
        raise StoreError(f"{path} is an HDF5 file, but not an mm3d run")
    schema = int(file.attrs["schema_version"])
    if schema > SCHEMA:
        raise StoreError(f"{path} has schema version {schema}; this mm3d reads versions up to "
                         f"{SCHEMA}: update mm3d to read it")


def _parse(file: h5py.File) -> Run:
    samples = {phase: file["samples"][phase][...] for phase in PHASES}
    repetitions, ranks = samples["forward"].shape
    traffic = {name: file["traffic"][name][...] for name in (*COUNTS, "moved")
               if name in COUNTS or name in file["traffic"]}
    directions = _directions(file["traffic"])
    counted = (len(PHASES), ranks, len(directions), len(COLLECTIVES))
    expected = file["traffic"]["expected_words"][...]
    shapes = [(f"samples/{phase}", samples[phase].shape, (repetitions, ranks))
              for phase in PHASES]
    shapes += [(f"traffic/{name}", traffic[name].shape, counted) for name in traffic]
    shapes += [("traffic/expected_words", expected.shape, counted[:1] + counted[2:])]
    late = {phase: file[f"samples/{phase}_late"][...] for phase in PHASES
            if f"{phase}_late" in file["samples"]}
    shapes += [(f"samples/{phase}_late", found.shape, (repetitions, ranks))
               for phase, found in late.items()]
    for name, shape, wanted in shapes:
        if shape != wanted:
            raise ValueError(f"{name} has the shape {shape}, which should be {wanted}")
    return Run(read_settings(file, "configuration", CONFIGURATION),
               read_settings(file, "environment", ENVIRONMENT),
               samples, traffic, expected, parse_checks(file),
               {name: float(file["published"][name][()]) for name in PUBLISHED},
               str(file.attrs["created"]), late,
               str(file["samples"].attrs.get("ended_by", "repetitions")),
               {name: float(value[()]) for name, value in file.get("clock", {}).items()},
               groups={name: parse_group(file[name]) for name in GROUPS if name in file},
               directions=directions)


def _directions(traffic: h5py.Group) -> tuple[str, ...]:
    """The directions that a file counts traffic along; `AXES` where it does not say."""
    if "axis" not in traffic:
        return AXES
    found = tuple(label.decode() for label in traffic["axis"][...].tolist())
    if len(set(found)) != len(found):
        raise ValueError(f"traffic/axis has a direction twice: {' '.join(found)}")
    return found
