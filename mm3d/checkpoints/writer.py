"""Write a checkpoint aside, and give it its name when all of it is on the disk.

What is written aside is a folder such as ``.step-00000010-1f0c-5be2.writing``, whose name has the
machine of its writer and a number of its own: two jobs that save the same step never share one.
The writer holds a lock on the index in it, which the kernel releases when the process ends,
however it ends.  So on the same machine leftovers of jobs that have ended can always be told from
folders that are being written.  From another machine a lock shows that a job writes, but no lock
shows nothing, since not every file system carries locks: there a leftover must also be a day old.
"""

import errno
import fcntl
import functools
import hashlib
import itertools
import os
import platform
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from mm3d.checkpoints import folder as folders
from mm3d.checkpoints.block_files import write_all
from mm3d.checkpoints.folder import INDEX_FILE
from mm3d.checkpoints.together import describe_error

ASIDE = re.compile(r"\.step-[0-9.]+(?:-([0-9a-f]+))?(?:-[0-9a-f]+)?\.(writing|deleting)")
BOOT = Path("/proc/sys/kernel/random/boot_id")
OLD = 24 * 3600.0    # seconds without any change after which nobody writes
TRIES = 16           # of taking a folder that other jobs take for a leftover
TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)


@functools.cache
def machine() -> str:
    """Return an identifier of this machine, in hexadecimal digits."""
    # Containers of a machine share it.
    boot = BOOT.read_text(encoding="ascii") if BOOT.exists() else ""
    return hashlib.blake2b((boot or platform.node()).encode(), digest_size=4).hexdigest()


class Writer:
    """Write the files of one checkpoint; on rank 0 alone, but for the blocks.

    In `said` is what the caller should know, though the checkpoint is written: leftovers that
    stay, and other writers.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step, self.said = folder, step, []
        self._aside: Path | None = None
        self._index: int | None = None    # descriptor

    def begin(self) -> Path:
        """Remove the leftovers of other jobs, create the folder aside, and return it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.said += _remove_unfinished(self.folder)
        self._first = self._free_place()
        for _ in range(TRIES):
            self._aside = self.folder / (f".step-{self.step:08d}-{machine()}-"
                                         f"{secrets.token_hex(4)}.writing")
            self._aside.mkdir()
            try:
                self._index = os.open(self._aside / INDEX_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL,
                                      0o666)
                if self._lock():
                    return self._aside
            except FileNotFoundError:    # another job took the empty folder for a leftover
                continue
            self._close()
        raise OSError(f"other jobs remove what is written in {self.folder}")

    def _lock(self) -> bool:
        """Lock the index, where the file system can; return False if it was taken away."""
        try:
            fcntl.flock(self._index, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:    # without locks nobody removes it, until it is old
            pass
        try:
            return os.path.samestat(os.stat(self._aside / INDEX_FILE), os.fstat(self._index))
        except FileNotFoundError:
            return False

    def complete(self, index: bytes) -> Path:
        """Write the index, wait until all is on the disk, and give the checkpoint its name."""
        write_all(self._index, index, 0)
        os.fsync(self._index)
        folders.sync(self._aside)
        while True:
            place = self._free_place()
            try:
                self._aside.rename(place)
                break
            except OSError as error:
                if error.errno not in TAKEN or not os.path.lexists(place):
                    raise
        if place != self._first:
            self.said.append(f"another job saved step {self.step} in {self.folder} meanwhile: "
                             f"this one is {place.name}")
        return place

    def _free_place(self) -> Path:
        """Return the first path of the step that nothing has."""
        names = (f"step-{self.step:08d}{f'.{number}' if number else ''}"
                 for number in itertools.count())
        return next(path for name in names
                    if not os.path.lexists(path := self.folder / name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: Any, *_: Any) -> None:
        """Release the index; after a failure remove what was written, as far as that can be."""
        if failure is not None and self._aside is not None:
            with suppress(OSError):    # the next writer removes it, or says why not
                folders.remove_files(self._aside)
        self._close()

    def _close(self) -> None:
        if self._index is not None:
            os.close(self._index)
            self._index = None


def _remove_unfinished(folder: Path) -> list[str]:
    """Remove what jobs that have ended left in a folder; return a line for each that stays."""
    said = []
    for path in folders.entries(folder):
        if match := ASIDE.fullmatch(path.name):
            try:
                line = (folders.remove_files(path) if match[2] == folders.DELETING
                        else _remove_unwritten(path, match[1] == machine()))
            except FileNotFoundError:    # its writer has just given it its name
                continue
            except OSError as error:
                line = f"{path} could not be removed: {describe_error(error)}"
            if line:
                said.append(line)
    return said


def _remove_unwritten(path: Path, here: bool) -> str | None:
    """Remove a folder aside, unless somebody writes it, or may do so; return why it stays."""
    if path.is_symlink():
        raise OSError("it is a link")
    unknown = (f"{path} stays: a job may be writing it, which cannot be told from here. It is "
               f"removed a day after its last change, or by you")
    names = os.listdir(path)
    dead = here or _is_old(path, names)
    if not dead and INDEX_FILE not in names:
        return unknown
    if not names:
        with suppress(OSError):    # a writer has just begun to fill it
            path.rmdir()
        return None
    if INDEX_FILE not in names:    # which is the first file of a writer
        return folders.remove_files(path)
    descriptor = os.open(path / INDEX_FILE, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return folders.remove_files(path) if dead else unknown
    except BlockingIOError:
        return (f"another job is saving in {path.parent} now, as {path.name}: give each job "
                f"a folder of its own")
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        return folders.remove_files(path) if _is_old(path, names) else unknown
    finally:
        os.close(descriptor)


def _is_old(path: Path, names: list[str]) -> bool:
    """Return whether neither the folder nor a file in it has changed for long."""
    changed = [os.stat(path / name).st_mtime for name in ("", *names)]
    return time.time() - max(changed) > OLD
