"""Results: one run is one HDF5 file.

A file appears under its final name only when it is complete and on the disk, and is never
written again, so that neither a kill, nor a full disk, nor a second writer loses anything that
was finished.  ``results/README.rst`` describes the schema.
"""

import io
import os
import secrets
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import h5py
import numpy as np

FORMAT = "mm3d run"
SCHEMA = 1

PHASES = ("forward", "backward")
AXES = ("x", "y", "z")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")
COUNTS = {"calls": "1", "messages": "1", "words": "1", "bytes": "byte"}
CONFIGURATION = ("table", "scheme", "preset", "grid", "grid_axes", "layers", "hidden", "heads",
                 "batch", "seq", "mlp_factor", "dtype", "warmup", "repetitions", "overridden",
                 "verified_measured_model")
ENVIRONMENT = ("ranks", "cores", "ranks_per_core", "oversubscribed", "cpu_model", "backend", "mpi",
               "blas", "blas_architecture", "blas_threads", "python", "numpy_version",
               "git_commit", "git_clean")
PUBLISHED = {"gpus": "1", "batch": "1", "hidden": "1", "forward_time": "s",
             "backward_time": "s", "average_step_time": "s", "recomputed_step_time": "s"}

Setting = str | int | float | bool


class StoreError(Exception):
    """A results folder that cannot be written, or a file that is no run; says which and why."""


@dataclass(frozen=True)
class Check:
    """One quantity compared with its reference.

    Attributes
    ----------
    quantity : str
        Such as "output" or "gradient of layers.0.mlp.up.weight".
    error : float
        Relative Frobenius error.
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
        For each of `COUNTS` what every rank moved in one step, (phases, ranks, axes,
        collectives) in the orders of `PHASES`, `AXES` and `COLLECTIVES`.
    expected_words : ndarray of int64
        The closed form of the words summed over ranks, (phases, axes, collectives).
    checks : list of Check
        The verification.
    published : dict of str to float
        The row that the paper prints, with the keys of `PUBLISHED`; times in seconds.
    created : str
        UTC, ISO 8601.
    """

    configuration: dict[str, Setting]
    environment: dict[str, Setting]
    samples: dict[str, np.ndarray]
    traffic: dict[str, np.ndarray]
    expected_words: np.ndarray
    checks: list[Check]
    published: dict[str, float]
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat())

    @property
    def ranks(self) -> int:
        """Ranks of the run."""
        return self.samples["forward"].shape[1]


def check_folder(folder: str | os.PathLike) -> Path:
    """Make `folder` if need be, and make sure that files can be written in it.

    Raises
    ------
    StoreError
        When they cannot.
    """
    folder = Path(folder)
    probe = folder / f".probe-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(probe, "xb") as file:
            file.write(b"0")
        probe.unlink()
    except OSError as error:
        raise StoreError(f"results folder {folder} cannot be written ({error.strerror}): name "
                         f"another with --out") from error
    return folder


def write(run: Run, folder: str | os.PathLike, name: str) -> Path:
    """Write `run` into `folder` as a file of its own.

    Parameters
    ----------
    run : Run
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
        _fill(file, run)
    stamp = datetime.fromisoformat(run.created).strftime("%Y%m%dT%H%M%SZ")
    try:
        return _publish(image.getbuffer(), Path(folder), f"{name}-{stamp}")
    except OSError as error:
        raise StoreError(f"{name} could not be written in {folder} ({error.strerror}); the "
                         f"files that are there are untouched") from error


def read(path: str | os.PathLike) -> Run:
    """The run in the file `path`.

    Raises
    ------
    StoreError
        When the file is truncated, damaged, of another kind, or of a newer schema.
    """
    try:
        with h5py.File(path, "r") as file:
            _check_kind(file, path)
            return _parse(file)
    except StoreError:
        raise
    except FileNotFoundError as error:
        raise StoreError(f"{path} does not exist") from error
    except (OSError, RuntimeError) as error:
        raise StoreError(f"{path} is truncated, damaged, or no HDF5 file: {error}") from error
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} is damaged or not a complete run: {error}") from error


def _publish(data: memoryview, folder: Path, stem: str) -> Path:
    """Write `data` as the next free name of `stem`: part, fsync, rename, fsync of the folder.

    Who holds NAME.h5.part, which can be made only where there is none, alone may make NAME.h5:
    no two writers meet, and no file is replaced.
    """
    for attempt in range(1, 1000):
        name = stem if attempt == 1 else f"{stem}-{attempt}"
        part, final = folder / f"{name}.h5.part", folder / f"{name}.h5"
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            continue
        try:
            with os.fdopen(descriptor, "wb") as file:
                if final.exists():
                    continue
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(part, final)
        finally:
            part.unlink(missing_ok=True)
        _sync_folder(folder)
        return final
    raise FileExistsError(0, f"{stem}.h5 and 999 numbered names are all taken")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fill(file: h5py.File, run: Run) -> None:
    file.attrs.update({"format": FORMAT, "schema_version": SCHEMA, "created": run.created})
    for name in ("configuration", "environment"):
        file.create_group(name).attrs.update(getattr(run, name))
    repetitions, ranks = run.samples["forward"].shape
    samples = file.create_group("samples")
    _scale(samples, "repetition", np.arange(repetitions))
    _scale(samples, "rank", np.arange(ranks))
    for phase in PHASES:
        _dataset(samples, phase, run.samples[phase].astype(np.float64), "s",
                 ("repetition", "rank"))
    traffic = file.create_group("traffic")
    for name, labels in (("phase", PHASES), ("axis", AXES), ("collective", COLLECTIVES)):
        _scale(traffic, name, list(labels))
    _scale(traffic, "rank", np.arange(ranks))
    for name, unit in COUNTS.items():
        _dataset(traffic, name, run.traffic[name].astype(np.int64), unit,
                 ("phase", "rank", "axis", "collective"))
    _dataset(traffic, "expected_words", run.expected_words.astype(np.int64), "1",
             ("phase", "axis", "collective"))
    verification = file.create_group("verification")
    _scale(verification, "quantity", [check.quantity for check in run.checks])
    for name in ("error", "tolerance"):
        values = np.array([getattr(check, name) for check in run.checks], np.float64)
        _dataset(verification, name, values, "1", ("quantity",))
    published = file.create_group("published")
    for name, unit in PUBLISHED.items():
        published.create_dataset(name, data=run.published[name]).attrs["units"] = unit


def _scale(group: h5py.Group, name: str, values) -> None:
    group.create_dataset(name, data=values).make_scale(name)


def _dataset(group: h5py.Group, name: str, values: np.ndarray, units: str,
             dims: tuple[str, ...]) -> None:
    """A dataset with a checksum, its units, and `group`'s scales as its dimensions."""
    dataset = group.create_dataset(name, data=values, chunks=values.shape, fletcher32=True,
                                   compression="gzip")
    dataset.attrs["units"] = units
    for index, dim in enumerate(dims):
        dataset.dims[index].attach_scale(group[dim])


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
    traffic = {name: file["traffic"][name][...] for name in COUNTS}
    counted = (len(PHASES), ranks, len(AXES), len(COLLECTIVES))
    expected = file["traffic"]["expected_words"][...]
    shapes = [(f"samples/{phase}", samples[phase].shape, (repetitions, ranks))
              for phase in PHASES]
    shapes += [(f"traffic/{name}", traffic[name].shape, counted) for name in COUNTS]
    shapes += [("traffic/expected_words", expected.shape, counted[:1] + counted[2:])]
    for name, shape, wanted in shapes:
        if shape != wanted:
            raise ValueError(f"{name} has the shape {shape}, which should be {wanted}")
    group = file["verification"]
    checks = [Check(quantity.decode(), float(error), float(tolerance)) for quantity, error,
              tolerance in zip(group["quantity"][...], group["error"][...],
                               group["tolerance"][...], strict=True)]
    return Run(_settings(file, "configuration", CONFIGURATION),
               _settings(file, "environment", ENVIRONMENT),
               samples, traffic, expected, checks,
               {name: float(file["published"][name][()]) for name in PUBLISHED},
               str(file.attrs["created"]))


def _settings(file: h5py.File, group: str, required: tuple[str, ...]) -> dict[str, Setting]:
    """Attributes of a group as plain Python values; KeyError when a required one is missing."""
    attributes = file[group].attrs
    for name in required:
        if name not in attributes:
            raise KeyError(f"{group}/{name} is missing")
    return {name: value.item() if isinstance(value, np.generic) else value
            for name, value in attributes.items()}
