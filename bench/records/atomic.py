"""Write files so that they appear complete and on the disk, or not at all.

A file is written as a part beside its final place, synced, and renamed; then its folder is synced.
A full disk or an error leaves nothing behind, a kill at most the part, whose name ends in
``.part``.  A writer holds a lock on its part, which the kernel releases when it ends.
"""

import contextlib
import errno
import fcntl
import os
import secrets
from pathlib import Path
from typing import Iterator

LOCAL = Path("results", "local")    # measured here: git ignores it, beside committed results
SHARED = 0o666    # permissions of a file, less the process' umask


def create_file(path: str | os.PathLike, data: bytes | memoryview) -> None:
    """Write `data` as the new file `path`.

    Only the writer that has created PATH.part, which must not exist before, may create PATH.  Two
    writers thus never write the same file, and no file is replaced.

    Raises FileExistsError when the file, or its part, exists; OSError when it cannot be written.
    """
    final = Path(path)
    with _written(final, final.with_name(f"{final.name}.part"), SHARED) as descriptor:
        if os.path.lexists(final):    # also a link to nothing
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
        _write(descriptor, data)


def replace(path: str | os.PathLike, data: str | bytes | memoryview, mode: int = SHARED) -> None:
    """Write `data` to the file `path`; if that fails, its old contents stay.

    The file need not exist; a link is followed; a device or a pipe is written to, and stays one.
    Text is written as UTF-8, and the bytes of a path as they are.  Permissions are `mode`, less
    the process' umask.

    Raises OSError when it cannot be written; the error names `path`, not its part.
    """
    whole = data.encode(errors="surrogateescape") if isinstance(data, str) else data
    try:
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
            with open(path, "wb") as device:
                device.write(whole)
            return
        final = Path(os.path.realpath(path))
        if final.is_symlink():    # in a loop of links, which has no end
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        # Each writer has a part of its own; the last one to end determines the contents.
        part = final.with_name(f"{final.stem}-{secrets.token_hex(4)}{final.suffix}.part")
        with _written(final, part, mode) as descriptor:
            _write(descriptor, whole)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def remove_parts(folder: Path) -> None:
    """Delete the parts that killed calls of `replace` have left in a folder.

    Parts that are locked stay, since their writers are at work, and so do those of other users;
    where files cannot be locked, all stay.
    """
    for path in folder.glob(f"*-{'[0-9a-f]' * 8}*.part"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def _written(final: Path, part: Path, mode: int) -> Iterator[int]:
    """Open the new file `part`, which is renamed to `final` at the end of the block."""
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
    """Write all of `data`, which may take several system calls."""
    left = memoryview(data).cast("B")
    while left:
        left = left[os.write(descriptor, left):]
