"""Read the limits that Linux control groups, such as a container's, set to this process."""
from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

SELF, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def group_folders(controller: str, own: Path = SELF, groups: Path = GROUPS) -> list[Path]:
    """List the folders of this process' control groups that may limit it, with those above them.

    A container often sees its own group as the topmost, under a name that is not there.  Limits
    are those of a `controller`, such as "cpu" or "memory"; `own` is the file that names this
    process' groups, and `groups` the folder of all.
    """
    found: dict[Path, None] = {}
    for line in os.fsdecode(own.read_bytes()).splitlines() if own.exists() else ():
        _, kinds, name = line.split(":", 2)
        if kinds and controller not in kinds.split(","):
            continue
        for top in ([controller, kinds] if kinds else [".", "unified"]):    # version 1, 2
            inside = PurePosixPath(name.lstrip("/"))
            found |= dict.fromkeys(groups / top / part for part in (inside, *inside.parents))
    return list(found)


def cpu_quota(own: Path = SELF, groups: Path = GROUPS) -> float | None:
    """Return how many cores' time this process may use, such as 0.5; None without a limit.

    It is the least quota of its control groups, of version 1 or 2, and of those above them; the
    parameters are those of `group_folders`.
    """
    found = [quota for folder in group_folders("cpu", own, groups)
             if (quota := _quota(folder)) is not None]
    return min(found, default=None)


def _quota(folder: Path) -> float | None:
    """Return the quota of one group; None where it has none."""
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        try:
            most, period = " ".join((folder / name).read_text(encoding="ascii")
                                    for name in names).split()
        except (OSError, ValueError):
            continue
        if most.isdecimal() and int(period) > 0:    # not "max", nor -1
            return int(most) / int(period)
    return None
