"""Shared memory that killed jobs have left behind in /dev/shm.

MPICH gives the memory of a node's ranks a name, and takes it away when the job ends; what is
killed leaves it, some megabytes each time, until somebody removes it or the machine restarts.
"""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("/dev/shm")
NAME = re.compile(r"mpich_shm_[0-9a-f]+_[0-9]+|mpich_shar_tmp[A-Za-z0-9]{6}")


@dataclass(frozen=True)
class Segment:
    """A file of shared memory: where, on which device and as which file there, and its bytes."""

    path: Path
    device: int
    number: int
    bytes: int


def abandoned_segments(folder: Path = FOLDER) -> list[Segment]:
    """Segments of this user's that MPICH has named and no living process has open.

    Nothing is said of those that a process of this user may have which is listed in ``/proc`` but
    cannot be looked into, or where the system is not Linux.  Processes of another PID namespace,
    as of a container, are not listed: where it shares the folder, what they have counts as
    abandoned.
    """
    # Whoever makes a segment was there before it, and lies in what is listed from here on.
    found = [segment for path in sorted(folder.glob("mpich_sh*")) if NAME.fullmatch(path.name)
             and (segment := _own(path))] if Path("/proc/self/maps").exists() else []
    in_use: set[tuple[int, int]] = set()
    for process in Path("/proc").glob("[0-9]*") if found else ():
        try:
            in_use |= _open_files(process) | _mapped_files(process)
        except PermissionError:
            # The first process of a system, which may be hidden, has been started by no launcher.
            if process.name != "1" and _is_own(process):
                return []
        except OSError:    # it has just ended
            continue
    return [one for one in found if (one.device, one.number) not in in_use]


def remove_segments(segments: list[Segment]) -> list[Segment]:
    """Remove those of `segments` that are still abandoned; which they were."""
    folders = {one.path.parent for one in segments}
    still = {one for folder in folders for one in abandoned_segments(folder)}
    removed = [one for one in segments if one in still]
    for one in removed:
        one.path.unlink(missing_ok=True)
    return removed


def describe_amount(segments: list[Segment]) -> str:
    """How many, and how large they are together."""
    return (f"{len(segments)} segment{'s' * (len(segments) != 1)} of shared memory, "
            f"{sum(one.bytes for one in segments) / 1e6:.0f} MB")


def removal_advice(segments: list[Segment]) -> str:
    """A line for who may want them removed; empty when there are none."""
    return segments and (f"{describe_amount(segments)} in {FOLDER}, left by jobs that were "
                         f"killed, which "
                         f"no process has open: python -m bench doctor --clean removes them") or ""


def _own(path: Path) -> Segment | None:
    """The segment in a file of this user's."""
    try:
        status = path.lstat()
    except OSError:    # a job has just ended
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return None
    return Segment(path, status.st_dev, status.st_ino, status.st_size)


def _is_own(process: Path) -> bool:
    try:
        return process.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _open_files(process: Path) -> set[tuple[int, int]]:
    """Device and number of each file that a process has open.

    They are asked for before what is mapped: a file may be closed once it is mapped.
    """
    found = set()
    for name in os.listdir(process / "fd"):
        try:
            status = os.stat(process / "fd" / name)
        except OSError:    # closed meanwhile, or of a kind that has no status
            continue
        found.add((status.st_dev, status.st_ino))
    return found


def _mapped_files(process: Path) -> set[tuple[int, int]]:
    """Device and number of each file that a process has mapped."""
    found = set()
    for line in (process / "maps").read_text(errors="replace").splitlines():
        _, _, _, device, number, *_ = line.split(maxsplit=5)
        major, minor = (int(part, 16) for part in device.split(":"))
        found.add((os.makedev(major, minor), int(number)))
    return found
