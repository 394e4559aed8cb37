"""Name the checkpoints in a folder, and put complete ones in their place.

A checkpoint is a folder ``step-00000010``, or ``step-00000010.1`` if that step was written before.
It is written aside, under a name that starts with a point, and renamed when all of it is on the
disk: what has the name is complete.
"""

import os
import re
import shutil
from pathlib import Path

NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
WRITING, DELETING = "writing", "deleting"


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, by rising step, of a step as written."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for *_, path in sorted(found)]


def step_of(path: Path) -> int:
    """Return the step of a checkpoint by its name."""
    return int(NAME.fullmatch(path.name)[1])


def begin(folder: Path, step: int) -> tuple[Path, Path]:
    """Create a folder to write a checkpoint in; return it, and the place it shall have.

    What earlier jobs left unfinished is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".step-*"):
        if left.suffix in (f".{WRITING}", f".{DELETING}"):
            shutil.rmtree(left)
    names = {path.name for path in checkpoints(folder)}
    name, number = f"step-{step:08d}", 0
    while name in names:
        number += 1
        name = f"step-{step:08d}.{number}"
    aside = folder / f".{name}.{WRITING}"
    aside.mkdir()
    return aside, folder / name


def finish(aside: Path, place: Path) -> None:
    """Give what was written aside its name, after all of it has reached the disk."""
    sync(aside)
    aside.rename(place)
    sync(place.parent)


def remove_old(folder: Path, keep: int, newest: Path) -> None:
    """Remove all checkpoints but those of the last `keep` steps, and `newest`."""
    found = checkpoints(folder)
    kept = sorted({step_of(path) for path in found})[-keep:]
    for path in found:
        if step_of(path) not in kept and path != newest:
            gone = folder / f".{path.name}.{DELETING}"
            path.rename(gone)     # a half removed folder must not look like a checkpoint
            shutil.rmtree(gone)


def sync(path: Path) -> None:
    """Wait until the entries of a folder, or the contents of a file, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
