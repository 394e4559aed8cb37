"""Read how many bytes of memory this node can still give."""

import ctypes
import os
from pathlib import Path

from bench.cluster.spec import Cluster
from mm3d.control_groups import GROUPS, SELF, group_folders

MEMINFO = Path("/proc/meminfo")
# Files of a control group: its limit, its use, and the part of its use that the kernel can drop.
LIMITS = (("memory.max", "memory.current", "inactive_file"),
          ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))


def available_memory(info: Path = MEMINFO, own: Path = SELF, groups: Path = GROUPS) -> int | None:
    """Return the bytes that new arrays can have here; None where the system does not tell.

    It is the least of the memory that Linux counts as available, and the rest below the limits of
    this process' control groups (version 1 or 2) and those above them.  The nodes of an emulated
    cluster share it equally.  `info` is the file in which Linux states the node's memory.
    """
    rooms = [_left(at, *files) for at in group_folders("memory", own, groups) for files in LIMITS]
    rooms.append(read_bytes(info, "MemAvailable"))
    least = min((room for room in rooms if room is not None), default=None)
    cluster = Cluster.from_environment()
    return least // cluster.nodes if least and cluster else least


def total_memory(info: Path = MEMINFO) -> int | None:
    """Return the bytes of memory that this node has by the file `info`; None if it is not told."""
    return read_bytes(info, "MemTotal")


def release_heap() -> None:
    """Have the C library return to the system the memory that it keeps for later small arrays."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)    # of the GNU C library
    if trim is not None:
        trim(0)


def read_bytes(file: Path, name: str) -> int | None:
    """Read the line `name` of a file of the system, which is in kB, in bytes; None if missing."""
    for line in os.fsdecode(file.read_bytes()).splitlines() if file.exists() else ():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return None


def _left(folder: Path, limit: str, use: str, droppable: str) -> int | None:
    """Return the bytes left below the limit of one control group; None if it has no limit."""
    try:
        most, used, stat = ((folder / name).read_text(encoding="ascii").strip()
                            for name in (limit, use, "memory.stat"))
        taken, counts = int(used), dict(line.split() for line in stat.splitlines())
    except (OSError, ValueError):
        return None
    if not most.isdecimal():    # "max"
        return None
    return max(0, int(most) - taken + int(counts.get(droppable, 0)))
