"""Files that appear whole and on the disk, or not at all.

A file is written as a part beside its place, synced, and renamed, and so is its entry in the
folder.  A full disk or an error leaves nothing behind; a kill at most the part, which ends in
``.part``.  A writer holds a lock on its part, which the kernel takes back when it ends.
"""

import contextlib
import errno
import fcntl
import os
import secrets
from pathlib import Path
from typing import Iterator


def create(path: str | os.PathLike, data: bytes | memoryview) -> None:
    """Write `data` as the new file `path`.

    Who holds PATH.part, which can be made only where there is none, alone may make PATH: no two
    writers meet, and no file is replaced.

    Raises
    ------
    FileExistsError
        When the file, or its part, is there.
    OSError
        When it cannot be written.
    """
    final = Path(path)
    with _written(final, final.with_name(f"{final.name}.part"), 0o644) as descriptor:
        if final.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
        _write(descriptor, data)


def replace(path: str | os.PathLike, data: str | bytes | memoryview, mode: int = 0o666) -> None:
    """Have `data` in the file `path`: all of it, or else what was there before.

    Parameters
    ----------
    path : path
        The file, new or not; of a link, what it leads to.
    data : str or bytes
        Its contents; text is written as UTF-8.
    mode : int, optional
        Its permissions, less those that the process takes from all its files.

    Raises
    ------
    OSError
        When it cannot be written; names `path`, not the file beside it that comes first.
    """
    try:
        final = Path(path).resolve()
        # Another writer of the file has a part of its own; the last one to end has it.
        part = final.with_name(f"{final.stem}-{secrets.token_hex(4)}{final.suffix}.part")
        with _written(final, part, mode) as descriptor:
            _write(descriptor, data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def probe_folder(folder: Path) -> None:
    """Make sure that files can be written in an existing folder, by writing one.

    Raises
    ------
    OSError
        When they cannot.
    """
    path = folder / f".probe-{secrets.token_hex(4)}"
    try:
        with open(path, "xb") as file:
            file.write(b"0")
    finally:
        path.unlink(missing_ok=True)


def remove_parts(folder: Path) -> None:
    """Delete the parts that killed calls of `replace` have left in a folder.

    Those stay whose writers are at work, which their locks tell, and all where files cannot be
    locked.
    """
    for path in folder.glob(f"*-{'[0-9a-f]' * 8}*.part"):
        with contextlib.suppress(FileNotFoundError):    # its writer has just come to its end
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            else:
                path.unlink()
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def _written(final: Path, part: Path, mode: int) -> Iterator[int]:
    """The descriptor of the new file `part`, which becomes `final` at the end of the block."""
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        try:
            with contextlib.suppress(OSError):    # a file system may have no locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(part, final)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(descriptor: int, data: bytes | memoryview) -> None:
    """All of `data`, which a system call may take in several pieces."""
    left = memoryview(data).cast("B")
    while left:
        left = left[os.write(descriptor, left):]
