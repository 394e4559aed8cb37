"""The journal of a results folder: who writes in it, and how far ``reproduce`` has come.

``journal.jsonl`` has one JSON object a line, each appended by a single write.  Whoever measures
into a folder holds a lock on its journal, which the kernel takes back when the process ends,
however it ends.  What counts as finished are the result files themselves: the journal says which
of them belong to the reproduction that is under way.
"""

import errno
import fcntl
import json
import os
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.agreement import make_on_rank_0
from bench.errors import StoreError
from bench.records import run_file

NAME = "journal.jsonl"
# Tells the ranks that `reproduce` starts which of the journal's entries is its own.
VARIABLE = "BENCH_JOURNAL_ENTRY"
UNSUPPORTED = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


class Journal:
    """The journal of `folder`, opened for appending and made if need be.

    Parameters
    ----------
    folder : path
        An existing folder of results.

    Raises
    ------
    StoreError
        When it cannot be opened.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self.folder = Path(folder)
        self.path = self.folder / NAME
        self.claimed = False
        try:
            # Not inherited by the programs that this one starts, which would keep the lock.
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise StoreError(f"{self.path} cannot be opened ({error.strerror}): name another "
                             f"folder with --out") from error

    def claim(self) -> None:
        """Be the only one that measures into the folder, until this process ends or `close`.

        Raises
        ------
        StoreError
            When another is.
        """
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.claimed = True
        except BlockingIOError as error:
            raise StoreError(
                f"{self.folder} is in use: another run or reproduce measures into it. Wait for "
                f"it, or name another folder with --out (python -m bench merge joins folders)"
            ) from error
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise StoreError(f"{self.path} cannot be locked ({error.strerror})") from error
            print(f"warning: {self.folder} has no locks ({error.strerror}): see to it yourself "
                  f"that nothing else measures into it", file=sys.stderr)

    def close(self) -> None:
        """Give the folder back."""
        os.close(self._descriptor)

    def write(self, event: str, **entry: Any) -> None:
        """Append an entry; one that cannot be written is said and does not end anything."""
        try:
            append_entry(self._descriptor, {"event": event, "at": utc_now(), **entry})
        except OSError as error:
            print(f"warning: {self.path} could not be written ({error.strerror}); what was "
                  f"measured is in files of its own", file=sys.stderr)

    def entries(self) -> list[dict]:
        """All entries that are whole."""
        return [entry for entry in read_entries(self.path) if "event" in entry]

    def lent(self) -> bool:
        """Whether this process was started by the reproduction that has the folder."""
        tokens = [entry.get("token") for entry in self.entries()
                  if entry["event"] in ("begin", "resume")]
        return bool(tokens) and tokens[-1] == os.environ.get(VARIABLE)


def append_entry(descriptor: int, entry: dict[str, Any]) -> None:
    """Append a line to a file of entries, by a single write, and see it on the disk.

    Parameters
    ----------
    descriptor : int
        The file, opened for reading and appending.
    entry : dict
        What JSON can say.

    Raises
    ------
    OSError
        When the entry is not there as a whole.
    """
    line = json.dumps(entry) + "\n"
    end = os.fstat(descriptor).st_size
    if end and os.pread(descriptor, 1, end - 1) != b"\n":
        line = "\n" + line    # after an entry that a kill or a full disk has cut short
    data = line.encode()
    if os.write(descriptor, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(descriptor)


def read_entries(path: Path) -> list[dict[str, Any]]:
    """The entries of a file that are not cut short."""
    found = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:    # cut short
            continue
    return [entry for entry in found if isinstance(entry, dict)]


_open: dict[Path, Journal] = {}


def claim_folder(out: str | os.PathLike, comm) -> Path:
    """The folder `out`, made by rank 0, found writable and, unless it is lent, claimed.

    Every rank calls this; the claim lasts until rank 0 ends.

    Raises
    ------
    StoreError
        The same on every rank, when the folder cannot be written or is in use.
    """
    folder = Path(out)
    make_on_rank_0(lambda: _take(folder), comm, caught=StoreError, error=StoreError)
    return folder


def _take(folder: Path) -> None:
    """Open the journal of a folder and claim it, unless it is lent."""
    run_file.check_folder(folder)
    _open[folder] = Journal(folder)
    if not _open[folder].lent():
        _open[folder].claim()


def journal_of(folder: Path) -> Journal:
    """The journal of a folder that `claim_folder` has found so; on rank 0."""
    return _open[folder]


def superseded(folder: Path) -> bool:
    """Whether the reproduction that started this process has ended and another has begun."""
    return VARIABLE in os.environ and folder in _open and not (
        _open[folder].claimed or _open[folder].lent())


@dataclass(frozen=True)
class Reproduction:
    """A reproduction that is under way.

    Attributes
    ----------
    order : int
        The seed of its order of rows, which its files have recorded.
    begun : str
        When, UTC, ISO 8601.
    settings : dict
        What its rows are measured with and on: see `bench.verbs.reproduce.row_settings`.
    rows : tuple of str
        The names of all rows that it was asked for, in its beginning or later.
    """

    order: int
    begun: str
    settings: dict[str, Any]
    rows: tuple[str, ...]


def unfinished_reproduction(entries: list[dict]) -> Reproduction | None:
    """The latest reproduction, unless it came to its end."""
    begun, rows = None, []
    for entry in entries:
        if entry["event"] == "begin":
            begun, rows = entry, []
        elif entry["event"] == "end" and entry.get("outcome") == "complete":
            begun = None
        if entry["event"] in ("begin", "resume"):
            rows += entry.get("rows", [])
    try:
        return begun and Reproduction(int(begun["order"]), begun["at"],
                                      dict(begun["settings"]), tuple(dict.fromkeys(rows)))
    except (KeyError, TypeError, ValueError):
        return None    # by another version: nothing of it can be compared


def setting_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between two settings, such as "dtype float64 instead of float32"."""
    return [f"{name.replace('_', ' ')} {new.get(name)} instead of {old.get(name)}"
            for name in [*new, *(old.keys() - new.keys())] if old.get(name) != new.get(name)]


def utc_now() -> str:
    """The time, UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat()
