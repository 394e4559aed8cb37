"""Keep the journal of a results folder: the lock on it, and the progress of ``reproduce``.

``journal.jsonl`` has one JSON object a line, each appended by a single write.  A process that
measures into a folder holds a lock on its journal, which the kernel releases when the process
ends, however it ends.  The result files say which rows are finished; the journal says which files
belong to the reproduction under way.
"""

import atexit
import contextlib
import errno
import fcntl
import json
import os
import tempfile
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.agreement import make_on_rank_0
from bench.errors import StoreError
from bench.records import atomic
from mm3d.console import complain

JOURNAL = "journal.jsonl"
# Hands the token of its entry in the journal from `reproduce` to the ranks that it starts.
ENTRY_ENV = "BENCH_JOURNAL_ENTRY"
UNSUPPORTED = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


class Journal:
    """The journal of an existing folder, opened for appending and made if it does not exist.

    Raises StoreError when it cannot be opened.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self.folder = Path(folder)
        self.path = self.folder / JOURNAL
        self.claimed = False
        self._descriptor = self._open()

    def _open(self) -> int:
        """Open the file; programs that this one starts do not inherit it, and with it the lock."""
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, atomic.SHARED)
        except OSError as error:
            raise StoreError(f"{self.path} cannot be opened ({error.strerror}): name another "
                             f"folder with --out") from error

    def claim(self) -> None:
        """Lock the folder until this process ends or `close` is called, or raise StoreError."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            while not self._is_there():    # another process has just removed it, empty
                self.close()
                self._descriptor = self._open()
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.claimed = True
            atexit.register(self._remove_empty)
        except BlockingIOError as error:
            raise StoreError(
                f"{self.folder} is in use: another run or reproduce measures into it. Wait for "
                f"it, or name another folder with --out (python -m bench merge joins folders)"
            ) from error
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise StoreError(f"{self.path} cannot be locked ({error.strerror})") from error
            complain(f"warning: {self.folder} has no locks ({error.strerror}): see to it yourself "
                     f"that nothing else measures into it")

    def close(self) -> None:
        """Release the folder."""
        os.close(self._descriptor)

    def _is_there(self) -> bool:
        """Return whether the file that is open is that in the folder."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _remove_empty(self) -> None:
        """Remove the file if it has no entry; only who holds the lock may."""
        with contextlib.suppress(OSError):    # it has been closed, or removed
            if os.fstat(self._descriptor).st_size == 0 and self._is_there():
                self.path.unlink()

    def write(self, event: str, **entry: Any) -> None:
        """Append an entry; if it cannot be written, print a warning and go on."""
        try:
            append_entry(self._descriptor, {"event": event, "at": utc_now(), **entry})
        except OSError as error:
            complain(f"warning: {self.path} could not be written ({error.strerror}); what was "
                     f"measured is in files of its own")

    def entries(self) -> list[dict]:
        """Read all complete entries."""
        return read_journal(self.path)

    def held_by_parent(self) -> bool:
        """Return whether the reproduction that has locked the folder started this process."""
        tokens = [entry.get("token") for entry in self.entries()
                  if entry["event"] in ("begin", "resume")]
        return bool(tokens) and tokens[-1] == os.environ.get(ENTRY_ENV)


def append_entry(descriptor: int, entry: dict[str, Any]) -> None:
    """Append a line of JSON to a file by one write, and sync it; OSError if it is incomplete."""
    line = json.dumps(entry) + "\n"
    end = os.fstat(descriptor).st_size
    if end and os.pread(descriptor, 1, end - 1) != b"\n":
        line = "\n" + line    # after an entry that a kill or a full disk has cut short
    data = line.encode()
    if os.write(descriptor, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(descriptor)


def read_entries(path: Path, **fields: Any) -> list[dict[str, Any]]:
    """Read the complete entries of a file: fields of these names are of these types, if there."""
    found = []
    for line in path.read_text("utf-8", "replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, RecursionError):    # cut short, or another program's
            found.append(json.loads(line))
    return [entry for entry in found if isinstance(entry, dict) and all(
        isinstance(entry[name], kind) for name, kind in fields.items() if name in entry)]


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Read the complete entries of a journal."""
    return [entry for entry in read_entries(path, event=str, at=str, order=int, settings=dict,
                                            rows=list) if "event" in entry]


_open: dict[Path, Journal] = {}


def claim_folder(out: str | os.PathLike, comm) -> Path:
    """Make the folder `out`, check that it is writable, and lock it unless the parent has.

    Every rank calls this; the lock lasts until rank 0 ends.

    The same StoreError on every rank when the folder cannot be written or is in use.
    """
    folder = Path(out)

    def claim() -> None:
        check_folder(folder)
        _open[folder] = Journal(folder)
        if not _open[folder].held_by_parent():
            _open[folder].claim()
    make_on_rank_0(claim, comm)
    return folder


def journal_of(folder: Path) -> Journal:
    """Return the journal of a folder that `claim_folder` has opened; on rank 0."""
    return _open[folder]


def superseded(folder: Path) -> bool:
    """Return whether another reproduction has replaced the one that started this process."""
    return ENTRY_ENV in os.environ and folder in _open and not (
        _open[folder].claimed or _open[folder].held_by_parent())


@dataclass(frozen=True)
class Reproduction:
    """A reproduction under way."""

    order: int    # the seed of its order of rows, which its files record
    begun: str    # its beginning, UTC, ISO 8601
    settings: dict[str, Any]    # and environment of its rows: see `reproduce.row_settings`
    rows: tuple[str, ...]    # the names of all requested of it, at its beginning or later


def unfinished_reproduction(entries: list[dict]) -> Reproduction | None:
    """Return the latest reproduction among `entries`, or None if it is complete."""
    begun, rows = None, []
    for entry in entries:
        if entry["event"] == "begin":
            begun, rows = entry, []
        elif entry["event"] == "end" and entry.get("outcome") == "complete":
            begun = None
        if entry["event"] in ("begin", "resume"):
            rows += entry.get("rows", [])
    try:
        return begun and Reproduction(begun["order"], begun["at"], begun["settings"],
                                      tuple(dict.fromkeys(rows)))
    except (KeyError, TypeError):
        return None    # written by another version: it cannot be compared


def setting_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Describe each difference of two settings, such as "dtype float64 instead of float32"."""
    return [f"{name.replace('_', ' ')} {new.get(name)} instead of {old.get(name)}"
            for name in [*new, *(old.keys() - new.keys())] if old.get(name) != new.get(name)]


def utc_now() -> str:
    """Return the time, UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat()


def check_folder(folder: str | os.PathLike, option: str = "--out", keep: bool = False) -> Path:
    """Make the `folder` of an `option` if need be, and make sure that files can be written in it.

    A folder that it made and that is empty when the program ends is removed, unless `keep`: a
    refused command leaves nothing behind.

    Raises StoreError when files cannot be written in it.
    """
    folder = Path(folder)
    try:
        made = [one for one in (folder, *folder.parents) if not one.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        atexit.register(_remove_empty, [] if keep else made)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as file:
            file.write(b"0")
    except OSError as error:
        raise StoreError(f"{option}'s folder {folder} cannot be written ({error.strerror}): name "
                         f"another with {option}") from error
    return folder


def check_output(file: str | os.PathLike, option: str) -> None:
    """Make sure that the file of an `option` can be written, or raise StoreError."""
    path = Path(file)
    try:
        if path.is_dir():
            raise StoreError(f"{option} {file} is a folder: the name of a file would do")
        is_device = path.exists() and not path.is_file()    # or a pipe
    except OSError as error:    # such as of a name that is too long
        raise StoreError(f"{option} {file} cannot be written ({error.strerror}): the name of "
                         f"another file would do") from error
    if not is_device:
        check_folder(path.parent, option)


def _remove_empty(folders: list[Path]) -> None:
    """Remove nested folders that are empty, the innermost first."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:    # it holds something, or somebody else removed it
            return
