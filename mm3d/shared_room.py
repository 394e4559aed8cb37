"""Check whether ``/dev/shm`` has the room that MPICH takes when it starts.

MPICH lays out memory there for the ranks of a node, and crashes without a word where it does not
fit; a container has 64 MB by default.  How much it takes depends on how it was built, which is
known of the library on PyPI alone.

UCX, its network library, would take 4.3 MB a rank more, for messages that MPICH sends itself.  It
does without where there is no room, but where the room is enough for some ranks only, ranks crash.
"""
from __future__ import annotations

import contextlib
import math
import os
import re
import site
import sys
from collections.abc import Mapping
from pathlib import Path

SHARED_FOLDER = "/dev/shm"
TRANSPORTS = "UCX_TLS"    # the variable that names UCX's transports
NO_SHARE = "^shm"         # all but shared memory
CELLS = "MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS"    # of a rank, through which messages pass
USUAL, FEW = 64, 16       # numbers of cells
CELL_BYTES = 1 << 14
RANK_BYTES = 9_400        # beside the cells
FOR_ALL = 1 << 16         # bytes for all ranks together
AMPLE = 2                 # times of what is taken, since other jobs take some, too


def free_bytes(folder: str = SHARED_FOLDER) -> tuple[int, int]:
    """Return the bytes of a folder's file system, and how many are free.

    Both are 0 where this process cannot write there.
    """
    if not os.access(folder, os.W_OK | os.X_OK):
        return 0, 0
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def bytes_of_siblings(folder: str = SHARED_FOLDER) -> int:
    """Return the bytes of a folder that siblings of this process, such as other ranks, map."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = (process / "stat").read_bytes().rpartition(b")")[2].split()[1]
            if int(parent) == os.getppid() and process.name != str(os.getpid()):
                found |= {line.split(maxsplit=5)[5] for line in
                          os.fsdecode((process / "maps").read_bytes()).splitlines()
                          if f" {folder}/" in line}
        except OSError:    # it has just ended, or is another user's
            continue
    taken = 0
    for path in found:
        with contextlib.suppress(OSError):    # all who need it have it
            taken += os.stat(path).st_blocks * 512
    return taken


def lean_settings(ranks: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables by which MPICH takes no more of the room than it needs.

    UCX takes none, and there are fewer cells where the room is not ample for the ranks of this
    node.  Every rank decides alike: the whole file system counts, and not what other ranks have
    left.  Variables that the user has set in `environ`, in which MPI starts, stay.
    """
    if not is_from_pypi(environ):
        return {}
    ample = free_bytes()[0] >= AMPLE * _taken(ranks)
    settings = {TRANSPORTS: NO_SHARE} | ({} if ample else {CELLS: str(FEW)})
    return {name: value for name, value in settings.items() if name not in environ}


def lack(ranks: int, environ: Mapping[str, str] = os.environ, folder: str = SHARED_FOLDER,
         first: bool = False) -> str:
    """Return why MPICH cannot start `ranks` ranks on this node; "" if it can, or if unknown.

    Every rank decides alike, as in `lean_settings`, by the `folder` of shared memory; the `first`
    rank of a node also counts what other jobs have left.
    """
    cells = environ.get(CELLS, str(USUAL))
    if not re.fullmatch(r"[0-9]{1,9}", cells) or not is_from_pypi(environ):
        return ""
    need = _taken(ranks, int(cells))
    total, free = free_bytes(folder)
    if (free if first else total) >= need:
        return ""
    # Ranks of the same job that have begun before the first have taken some of their own room.
    if total >= need and free + bytes_of_siblings(folder) >= need:
        return ""
    has = "is not there, or cannot be written"
    if total:
        has = f"has {free / 1e6:.1f} of {_megabytes(total)} free"
    return (f"{ranks} rank{'s' * (ranks > 1)} of MPICH on one node need{'s' * (ranks == 1)} "
            f"{_megabytes(need)} of shared memory, and {folder} {has}: {_advice(ranks)}")


def hint(ranks: int) -> str:
    """Describe the free room, for ranks on this node that crashed; "" where it is ample.

    It may be the cause: other jobs have a share of it, and other MPI libraries take it, too.
    """
    free = free_bytes()[1]
    if free >= AMPLE * _taken(ranks):
        return ""
    return (f"{SHARED_FOLDER} has {_megabytes(free)} free, of which MPI may need more for {ranks} "
            f"rank{'s' * (ranks > 1)}: {_advice(ranks)}")


def is_from_pypi(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether mpi4py finds the MPICH of PyPI, which has both network libraries."""
    if "MPI4PY_LIBMPI" in environ or sys.platform != "linux":
        return False
    prefixes = [sys.exec_prefix, site.USER_BASE or "", sys.base_exec_prefix]
    for folder in [os.path.join(one, "lib") for one in prefixes]:
        if any(os.path.exists(os.path.join(folder, f"libmpi.so{end}")) for end in ("", ".12")):
            return all(os.path.exists(os.path.join(folder, "mpich", name))
                       for name in ("libucp.so.0", "libfabric.so.1"))
    return False


def _taken(ranks: int, cells: int = USUAL) -> int:
    return ranks * (RANK_BYTES + cells * CELL_BYTES) + FOR_ALL


def _advice(ranks: int) -> str:
    size = math.ceil(AMPLE * _taken(ranks) / 2 ** 30)
    return (f"end other jobs, make it larger (docker run --shm-size={size}g), or start fewer "
            "ranks")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
