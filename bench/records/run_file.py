"""Write one run as one HDF5 file, and read it back.

A file appears under its final name only when it is complete and on the disk, and is never
written again.  So neither a kill, nor a full disk, nor a second writer loses anything that was
finished.  ``bench/records/README.rst`` describes the schema.
"""

import io
import os
import stat
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Iterable, Iterator

import h5py

from bench.errors import StoreError, Unreadable
from bench.records import atomic
from bench.records.measurements import (Measurements, fill_measurements, parse_measurements,
                                        read_attribute)
from bench.records.model_run import CLASSES
from mm3d.console import complain

FORMAT = "mm3d run"
SCHEMA = 3    # the version that is written, and the only one that is read
SUFFIX = ".h5"
SIGNATURE = b"\x89HDF\r\n\x1a\n"    # the first bytes of every file that `write_run` writes
# Errors of h5py, and of its callers, where a file holds something else than it should.
DAMAGE = (OSError, RuntimeError, MemoryError)
UNLIKE = (KeyError, ValueError, TypeError, AttributeError, IndexError, ArithmeticError)
MAX_SAME_NAMES = 999    # files of one name, numbered, in a folder


def write_run(run: Measurements, folder: str | os.PathLike, name: str) -> Path:
    """Write `run` as NAME-TIME.h5, numbered if there is one, or raise StoreError; return it."""
    image = io.BytesIO()
    with h5py.File(image, "w", libver="v110") as file:
        file.attrs.update({"format": FORMAT, "schema_version": SCHEMA})
        fill_measurements(file, run)
    stamp = datetime.fromisoformat(run.created).strftime("%Y%m%dT%H%M%SZ")
    try:
        return _publish(image.getbuffer(), Path(folder), f"{name}-{stamp}")
    except OSError as error:
        raise StoreError(f"{name} could not be written in {folder} ({error.strerror}); the "
                         f"files that are there are untouched") from error


def _publish(data: memoryview, folder: Path, stem: str) -> Path:
    """Write `data` under the next free name that begins with `stem`."""
    for attempt in range(1, MAX_SAME_NAMES + 1):
        final = folder / (f"{stem}.h5" if attempt == 1 else f"{stem}-{attempt}.h5")
        try:
            atomic.create_file(final, data)
        except FileExistsError:
            continue
        return final
    raise FileExistsError(0, f"{stem}.h5 and {MAX_SAME_NAMES} numbered names are all taken")


def read_run(path: str | os.PathLike) -> Measurements:
    """Read the run in the file `path`: a `Run` of a row of the tables.

    Raises Unreadable when the file is there but cannot be read; StoreError when the file is
    truncated, damaged, of another kind, or of another schema.
    """
    with open_file(path) as file:
        return parse_run(file, path)


def list_files(folder: str | os.PathLike, prefix: str = "") -> list[Path]:
    """List the files of results in a folder, by name; none if it is missing, else Unreadable."""
    try:
        return sorted(Path(folder, name) for name in os.listdir(folder)
                      if name.startswith(prefix) and name.endswith(SUFFIX))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Unreadable(f"{folder} cannot be listed ({error.strerror})") from error


def files_among(sources: Iterable[str]) -> list[Path]:
    """List the files among `sources`, and in folders of them; StoreError where there is none."""
    files: list[Path] = []
    for source in map(Path, sources):
        if not os.path.lexists(source):
            raise StoreError(f"{source} does not exist")
        here = list_files(source) if source.is_dir() else [source]
        if not here:
            raise StoreError(f"there is no .h5 file in {source}")
        files += here
    return list(dict.fromkeys(files))


def report_left_out(problems: Iterable[object]) -> int:
    """Print to standard error why files were left out, a line each; return 1 for any, else 0."""
    lines = [f"left out: {problem}" for problem in dict.fromkeys(map(str, problems))]
    if lines:
        complain(*lines)
    return int(bool(lines))


@contextmanager
def open_file(path: str | os.PathLike) -> Iterator[h5py.File]:
    """Open a file of results, as it is now: later writers do not change what is read.

    Raises Unreadable, StoreError as in `read_run`; errors of the caller's block pass unchanged.
    """
    image = io.BytesIO(_read_bytes(path))
    try:
        file = h5py.File(image, "r")
    except (*DAMAGE, *UNLIKE) as error:
        raise StoreError(f"{path} is truncated, damaged, or no HDF5 file: {error}") from error
    with file:
        yield file


def _read_bytes(path: str | os.PathLike) -> bytes:
    """Read a file as a whole.

    No lock is taken, and none that another program holds matters, since files never change once
    they are written.  A pipe is refused, not waited for.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(
                name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise StoreError(f"{path} is no file of results, but a device or a pipe")
            start = file.read(len(SIGNATURE))
            if start != SIGNATURE:
                raise StoreError(f"{path} is truncated, damaged, or no HDF5 file: it does not "
                                 f"begin like one")
            return start + file.read()
    except IsADirectoryError as error:
        raise StoreError(f"{path} is no file of results, but a folder") from error
    except FileNotFoundError as error:
        what = "is a link to nothing" if os.path.islink(path) else "does not exist"
        raise StoreError(f"{path} {what}") from error
    except OSError as error:
        raise Unreadable(f"{path} cannot be read ({error.strerror})") from error
    except MemoryError as error:
        raise Unreadable(f"{path} cannot be read: it is larger than the memory") from error


def parse_run(file: h5py.Group | None, path: str | os.PathLike) -> Measurements:
    """Read the run in an open file or group, if any, called `path`; StoreError if it is none."""
    try:
        if file is None:
            raise StoreError(f"{path} is damaged: it is no group")
        if read_attribute(file, "format", "") != FORMAT:
            raise StoreError(f"{path} is an HDF5 file, but not an mm3d run")
        version = read_attribute(file, "schema_version", 0)
        if version != SCHEMA:
            raise StoreError(f"{path} has schema version {version}; this mm3d reads version "
                             f"{SCHEMA}" + ": update mm3d to read it" * (version > SCHEMA))
        kind = read_attribute(file, "kind", "model")
        return parse_measurements(file, kind, CLASSES.get(kind, Measurements))
    except DAMAGE as error:
        raise StoreError(f"{path} is truncated, damaged, or no HDF5 file: {error}") from error
    except UNLIKE as error:
        raise StoreError(f"{path} is damaged or not a complete run: {error}") from error
