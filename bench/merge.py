"""The verb ``merge``: the runs of many files and folders in one new file."""

from pathlib import Path
from typing import Iterable

from mm3d import merged
from mm3d.store import StoreError


def merge(target: str, sources: Iterable[str]) -> str:
    """Join the runs of `sources` in the new file `target`; a line that says so.

    Raises
    ------
    StoreError
        When something cannot be read or written, or versions of the schema differ.
    """
    files = [path for path in found(sources) if path.resolve() != Path(target).resolve()]
    count = merged.merge(files, Path(target))
    return f"{target}: {count} runs of {len(files)} files"


def found(sources: Iterable[str]) -> list[Path]:
    """The files that are named, and those in the folders that are.

    Raises
    ------
    StoreError
        When one is not there, or there is none in a folder.
    """
    files: list[Path] = []
    for source in map(Path, sources):
        here = sorted(source.glob("*.h5")) if source.is_dir() else [source]
        if not here:
            raise StoreError(f"there is no .h5 file in {source}")
        files += here
    return list(dict.fromkeys(files))
