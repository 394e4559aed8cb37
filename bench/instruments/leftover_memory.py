"""Find and remove shared memory that killed jobs have left in /dev/shm.

MPICH names the shared memory of a node's ranks, and removes it when the job ends.  A job that is
killed leaves some megabytes, until they are removed or the machine restarts.
"""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

SEGMENT_FOLDER = Path("/dev/shm")
NAME = re.compile(r"mpich_shm_[0-9a-f]+_[0-9]+|mpich_shar_tmp[A-Za-z0-9]{6}")


@dataclass(frozen=True)
class _Segment:
    """A file of shared memory: its path, device, inode number and size in bytes."""

    path: Path
    device: int
    number: int
    bytes: int


def _open_files(process: Path) -> set[tuple[int, int]]:
    """Return device and inode number of each file that a process has open.

    Read these before the mapped files: a file may be closed once it is mapped.
    """
    found = set()
    for name in os.listdir(process / "fd"):
        try:
            status = os.stat(process / "fd" / name)
        except OSError:    # closed meanwhile, or of a kind that has no status
            continue
        found.add((status.st_dev, status.st_ino))
    return found


def abandoned_segments(folder: Path = SEGMENT_FOLDER) -> list[_Segment]:
    """List this user's segments that MPICH has named and no living process has open.

    The list is empty where the system is not Linux, or where a process of this user is listed in
    ``/proc`` but cannot be inspected.  Processes of another PID namespace, such as a container,
    are not listed: if it shares the folder, their segments count as abandoned.
    """
    # The process that made a segment existed before it, and so is among those listed from here on.
    found = [segment for path in sorted(folder.glob("mpich_sh*")) if NAME.fullmatch(path.name)
             and (segment := _own(path))] if Path("/proc/self/maps").exists() else []
    in_use: set[tuple[int, int]] = set()
    for process in Path("/proc").glob("[0-9]*") if found else ():
        try:
            in_use |= _open_files(process) | _mapped_files(process)
        except PermissionError:
            # The first process of a system, which may be hidden, was not started by a launcher.
            if process.name != "1" and _is_own(process):
                return []
        except OSError:    # it has just ended
            continue
    return [one for one in found if (one.device, one.number) not in in_use]


def remove_segments(segments: list[_Segment]) -> list[_Segment]:
    """Remove those of `segments` that are still abandoned, and return them."""
    folders = {one.path.parent for one in segments}
    still = {one for folder in folders for one in abandoned_segments(folder)}
    removed = [one for one in segments if one in still]
    for one in removed:
        one.path.unlink(missing_ok=True)
    return removed


def describe_amount(segments: list[_Segment]) -> str:
    """Return the number of the segments and their total size, in words."""
    return (f"{len(segments)} segment{'s' * (len(segments) != 1)} of shared memory, "
            f"{sum(one.bytes for one in segments) / 1e6:.0f} MB")


def removal_advice(segments: list[_Segment]) -> str:
    """Return a line that says how to remove the segments; "" if there are none."""
    if not segments:
        return ""
    return (f"{describe_amount(segments)} in {segments[0].path.parent}, left by jobs that were "
            f"killed, which no process has open: python -m bench doctor --clean removes them")


def _own(path: Path) -> _Segment | None:
    """Return the segment in a file; None if the file is not this user's, or gone."""
    try:
        status = path.lstat()
    except OSError:    # a job has just ended
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return None
    return _Segment(path, status.st_dev, status.st_ino, status.st_size)


def _is_own(process: Path) -> bool:
    try:
        return process.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _mapped_files(process: Path) -> set[tuple[int, int]]:
    """Return device and inode number of each file that a process has mapped."""
    found = set()
    for line in os.fsdecode((process / "maps").read_bytes()).splitlines():
        _, _, _, device, number, *_ = line.split(maxsplit=5)
        major, minor = (int(part, 16) for part in device.split(":"))
        found.add((os.makedev(major, minor), int(number)))
    return found
