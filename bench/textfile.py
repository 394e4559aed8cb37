"""Text files that are replaced in one piece."""

import os
from pathlib import Path


def replace(path: str | os.PathLike, text: str) -> None:
    """Have `text` in the file `path`: all of it and on the disk, or else what was there before.

    Parameters
    ----------
    path : path
        The file, new or not; of a link, what it leads to.
    text : str
        What is to be in it.

    Raises
    ------
    OSError
        When it cannot be written; names `path`, not the file beside it that comes first.
    """
    try:
        _replace(Path(path).resolve(), text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _replace(final: Path, text: str) -> None:
    part = final.with_name(f"{final.name}.part")
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, final)
    finally:
        part.unlink(missing_ok=True)
