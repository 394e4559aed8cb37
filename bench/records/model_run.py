"""The record of one run of a model, and its datasets in an HDF5 file."""

from dataclasses import dataclass, field
from datetime import datetime, timezone

import h5py
import numpy as np

from bench.records import texts
from bench.records.measurements import (Check, Group, Setting, fill_group, grid_shape,
                                        parse_checks, parse_created, parse_group, read_attribute,
                                        read_labels, read_numbers, read_settings, write_dataset,
                                        write_scale)
from mm3d.grid.axis import COLLECTIVES
from mm3d.grid.shape import GridShape
from mm3d.tracing.events import PHASES

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
CLOCK = ("resolution", "offset_error")
GROUPS = ("parts", "machine", "memory", "waits", "software", "predicted", "wire")
TRAFFIC_DIMS = ("phase", "rank", "axis", "collective")
SAMPLE_DIMS = ("repetition", "rank")


def directions_of(shape: GridShape) -> tuple[str, ...]:
    """Return the directions of a record: those of the grid, then those of `AXES` that it lacks.

    Along the latter nothing moves; readers that know only x, y and z find these in all files of
    grids without further directions.
    """
    return (*shape, *(axis for axis in AXES if axis not in shape))


@dataclass(frozen=True)
class Run:
    """The record of one run of a model.

    Attributes
    ----------
    configuration, environment : dict of str to str, int, float or bool
        The settings of the run, and the machine and software that it ran on.
    samples : dict of str to ndarray
        Seconds of every repetition and rank, (repetitions, ranks), for each of `PHASES`.
    traffic : dict of str to ndarray of int64
        Counts of one step, (phases, ranks, directions, collectives) in the orders of `PHASES`,
        `directions` and `COLLECTIVES`, for each of `COUNTS`; and "moved", float64, the words that
        the transport moved (`mm3d.grid.axis.Traffic`), absent in older files.
    expected_words : ndarray of int64
        The closed form of the words summed over ranks, (phases, directions, collectives).
    checks : list of Check
        The verification.
    published : dict of str to float
        The row that the paper prints, with the keys of `PUBLISHED`; times in seconds.
    created : str
        UTC, ISO 8601.
    late : dict of str to ndarray
        Seconds by which each rank began after the first one, like `samples`; empty in files of
        version 1.
    ended_by : str
        The limit that ended the repetitions: "width", "repetitions", "seconds" or "stopped".
    clock : dict of str to float
        "resolution" and "offset_error", seconds; empty in files of version 1.
    schema : int
        The version of the schema of the file that it was read from; 0 if it was not read.
    groups : dict of str to Group
        The measured ones of `GROUPS`: parts of the time, rates of the machine, memory, waits and
        bytes between nodes (described in ``bench/records/README.rst``); empty in files before
        version 3.
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
    schema: int = 0
    groups: dict[str, Group] = field(default_factory=dict)
    directions: tuple[str, ...] = AXES

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.samples["forward"].shape[1]

    @property
    def dilation(self) -> float:
        """The factor by which the links and the waits of an emulated cluster were slowed."""
        return float(self.configuration.get("dilation", 1.0))

    @property
    def times(self) -> dict[str, np.ndarray]:
        """The samples over `dilation`: seconds that runs of other factors compare with."""
        return {phase: values / self.dilation for phase, values in self.samples.items()}

    @property
    def grid(self) -> GridShape:
        """The grid that the configuration states."""
        return grid_shape(self.configuration)


def fill_run(file: h5py.File, run: Run) -> None:
    """Write the samples, the traffic, the published row and the groups of `run` into `file`."""
    _fill_samples(file, run)
    _fill_traffic(file, run)
    published = file.create_group("published")
    for name, unit in PUBLISHED.items():
        published.create_dataset(name, data=run.published[name]).attrs["units"] = unit
    for name, group in run.groups.items():
        fill_group(file, name, group)


def _fill_samples(file: h5py.File, run: Run) -> None:
    repetitions, ranks = run.samples["forward"].shape
    samples = file.create_group("samples")
    write_scale(samples, "repetition", np.arange(repetitions))
    write_scale(samples, "rank", np.arange(ranks))
    for phase in PHASES:
        write_dataset(samples, phase, run.samples[phase].astype(np.float64), "s", SAMPLE_DIMS)
        if run.late:
            write_dataset(samples, f"{phase}_late", run.late[phase].astype(np.float64), "s",
                          SAMPLE_DIMS)
    samples.attrs["ended_by"] = run.ended_by
    for name, seconds in run.clock.items():
        file.require_group("clock").create_dataset(name, data=seconds).attrs["units"] = "s"


def _fill_traffic(file: h5py.File, run: Run) -> None:
    traffic = file.create_group("traffic")
    for name, labels in (("phase", PHASES), ("axis", run.directions),
                         ("collective", COLLECTIVES)):
        write_scale(traffic, name, list(labels))
    write_scale(traffic, "rank", np.arange(run.ranks))
    for name, unit in COUNTS.items():
        write_dataset(traffic, name, run.traffic[name].astype(np.int64), unit, TRAFFIC_DIMS)
    if "moved" in run.traffic:
        write_dataset(traffic, "moved", run.traffic["moved"].astype(np.float64), "1",
                      TRAFFIC_DIMS)
    write_dataset(traffic, "expected_words", run.expected_words.astype(np.int64), "1",
                  ("phase", "axis", "collective"))


def parse_model_run(file: h5py.Group) -> Run:
    """Read the run of a model from an open file, or from a group of one.

    Raises
    ------
    KeyError, ValueError, TypeError, AttributeError
        When a dataset or setting is missing, or does not fit the others.
    """
    samples = {phase: read_numbers(file, f"samples/{phase}", 2) for phase in PHASES}
    late = {phase: read_numbers(file, f"samples/{phase}_late", 2) for phase in PHASES
            if f"samples/{phase}_late" in file}
    traffic = {name: _all_collectives(file, name, 4) for name in (*COUNTS, "moved")
               if name in COUNTS or f"traffic/{name}" in file}
    run = Run(read_settings(file, "configuration", CONFIGURATION),
              read_settings(file, "environment", ENVIRONMENT),
              samples, traffic, _all_collectives(file, "expected_words", 3),
              parse_checks(file),
              {name: float(read_numbers(file, f"published/{name}", 0)) for name in PUBLISHED},
              parse_created(file), late,
              read_attribute(file["samples"], "ended_by", "repetitions"),
              {name: float(read_numbers(file, f"clock/{name}", 0)) for name in CLOCK}
              if "clock" in file else {},
              schema=read_attribute(file, "schema_version", 0),
              groups={name: parse_group(file, name, f"model.{name}") for name in GROUPS
                      if name in file},
              directions=_directions(file))
    _check_shapes(run)
    return run


def _all_collectives(file: h5py.Group, name: str, ndim: int) -> np.ndarray:
    """Read counts by collective, with 0 for collectives that an older file does not know."""
    counts = read_numbers(file, f"traffic/{name}", ndim, whole=name != "moved")
    if "traffic/collective" not in file or counts.shape[-1] == len(COLLECTIVES):
        return counts
    known = read_labels(file, "traffic/collective")
    if counts.shape[-1] != len(known) or not set(known) <= set(COLLECTIVES):
        return counts    # `_check_shapes` refuses it
    out = np.zeros((*counts.shape[:-1], len(COLLECTIVES)), counts.dtype)
    out[..., [COLLECTIVES.index(label) for label in known]] = counts
    return out


def _check_shapes(run: Run) -> None:
    """Check that samples and counts have the same ranks, repetitions and directions.

    Also that every time is one, and that the grid can be read.
    """
    repetitions, ranks = run.samples["forward"].shape
    counted = (len(PHASES), ranks, len(run.directions), len(COLLECTIVES))
    shapes = {f"samples/{phase}": (values.shape, (repetitions, ranks))
              for phase, values in run.samples.items()}
    shapes |= {f"traffic/{name}": (values.shape, counted) for name, values in run.traffic.items()}
    shapes["traffic/expected_words"] = run.expected_words.shape, counted[:1] + counted[2:]
    shapes |= {f"samples/{phase}_late": (values.shape, (repetitions, ranks))
               for phase, values in run.late.items()}
    for name, (shape, wanted) in shapes.items():
        if shape != wanted:
            raise ValueError(f"{name} has the shape {shape}, which should be {wanted}")
    for phase, seconds in run.samples.items():
        if not (seconds.size and (seconds > 0).all()):
            raise ValueError(f"samples/{phase} has times that are not greater than 0, or no "
                             f"numbers")
    if not run.checks:
        raise ValueError("verification is empty")
    GridShape.parse(str(run.configuration["grid"]), str(run.configuration["grid_axes"]))
    texts.check_texts("model", run)


def _directions(file: h5py.Group) -> tuple[str, ...]:
    """Return the directions along which a file counts traffic; `AXES` if it does not say."""
    if "traffic/axis" not in file:
        return AXES
    found = tuple(map(str, read_labels(file, "traffic/axis")))
    if len(set(found)) != len(found):
        raise ValueError(f"traffic/axis has a direction twice: {' '.join(found)}")
    return found
