"""List the checkpoints in a folder, and remove old ones.

A checkpoint is a folder ``step-00000010``, or ``step-00000010.1`` if that step was written before.
A folder with such a name is complete: it is written under another name
(`mm3d.checkpoints.writer`), and renamed before it is removed.
"""

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from mm3d.checkpoints.together import describe_error

NAME = re.compile(r"step-([0-9]+)(?:\.([0-9]+))?")
INDEX_FILE = "index.h5"
OWN = re.compile(r"index\.h5|blocks-[0-9]+\.h5")    # all files that a checkpoint has
DELETING = "deleting"


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, by rising step, then in the order written.

    A link counts, wherever it points to: what was moved away is no less a checkpoint.
    """
    found = []
    for path in entries(folder):
        match = NAME.fullmatch(path.name)
        if match and (path.is_symlink() or os.path.isdir(path)):
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for *_, path in sorted(found)]


def entries(folder: Path) -> list[Path]:
    """Return what is in a folder, sorted; nothing if it is missing."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except PermissionError as error:
        raise OSError(f"who may not list {folder} cannot find checkpoints there: chmod u+rwx "
                      f"as its owner, or give another folder") from error


def step_of(path: Path) -> int:
    """Return the step of a checkpoint by its name."""
    return int(NAME.fullmatch(path.name)[1])


def remove_old(folder: Path, keep: int, newest: Path) -> list[str]:
    """Remove all checkpoints except `newest` and those of the last `keep` steps.

    Returns a line for each that could not be removed.
    """
    try:
        found = checkpoints(folder)
    except OSError as error:
        return [f"older checkpoints in {folder} were not removed: {describe_error(error)}"]
    said = []
    kept = sorted({step_of(path) for path in found})[-keep:]
    for path in found:
        if step_of(path) not in kept and path != newest:
            try:
                _remove(path)
            except OSError as error:
                said.append(f"{path} could not be removed: {describe_error(error)}")
    return said


def _remove(path: Path) -> None:
    """Remove a checkpoint, of a link the link alone; a folder with foreign files stays."""
    with suppress(FileNotFoundError):    # another job was faster
        if path.is_symlink():
            path.unlink()
            return
        strange = [name for name in os.listdir(path) if not OWN.fullmatch(name)]
        if strange:
            raise OSError(f"it also holds {strange[0]}")
        gone = path.with_name(f".{path.name}-{secrets.token_hex(4)}.{DELETING}")
        path.rename(gone)     # a half removed folder must not look like a checkpoint
        remove_files(gone)


def remove_files(path: Path) -> None:
    """Remove a folder of files, the index last; what another job removes meanwhile is no error."""
    if path.is_symlink():
        raise OSError("it is a link")
    with suppress(FileNotFoundError):
        for name in sorted(os.listdir(path), key=lambda name: name == INDEX_FILE):
            with suppress(FileNotFoundError):
                (path / name).unlink()
        path.rmdir()


def sync(path: Path) -> None:
    """Wait until the entries of a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
