"""Compare ``/dev/shm`` with what MPICH takes of it when it starts.

MPICH lays out memory there for the ranks of a node, and crashes without a word where it does not
fit; a container has 64 MB by default.  How much it takes depends on how it was built, which is
known of the library on PyPI alone.
"""
from __future__ import annotations

import math
import os
import site
import sys
from collections.abc import Mapping

FOLDER = "/dev/shm"
NETMOD = "MPIR_CVAR_CH4_NETMOD"                   # names the network library that MPICH starts
CELLS = "MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS"    # of 16 KiB each, through which messages pass
# The ways to start MPICH 5, and the bytes that it takes for each rank, from fastest to leanest.
WAYS: list[tuple[dict[str, str], int]] = [({}, 5_391_000), ({NETMOD: "ofi"}, 1_057_500),
                                          ({NETMOD: "ofi", CELLS: "16"}, 271_500)]
FOR_ALL = 1 << 16    # bytes for all ranks together
AMPLE = 2            # times of what is taken, since other jobs take some, too


def free_bytes(folder: str = FOLDER) -> tuple[int, int]:
    """Return the bytes of a folder's file system, and how many are free.

    Both are 0 where this process cannot write there.
    """
    if not os.access(folder, os.W_OK | os.X_OK):
        return 0, 0
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def lean_settings(ranks: int, environ: Mapping[str, str] = os.environ,
                  folder: str = FOLDER) -> dict[str, str]:
    """Return the variables by which MPICH takes less of the room; none where it is ample.

    Every rank decides alike: the whole file system counts, and not what other ranks have left.

    Parameters
    ----------
    ranks : int
        Ranks on this node.
    environ : mapping, default os.environ
        The environment in which MPI starts.  Nothing is set where the user has set one of these
        variables, nor for ranks on several nodes.
    folder : str
        The folder of shared memory.
    """
    one_node = environ.get("MPI_LOCALNRANKS") == environ.get("PMI_SIZE")
    if {NETMOD, CELLS} & environ.keys() or not one_node or not is_from_pypi(environ):
        return {}
    total = free_bytes(folder)[0]
    return next((settings for settings, each in WAYS if total >= AMPLE * _taken(ranks, each)),
                WAYS[-1][0])


def lack(ranks: int, environ: Mapping[str, str] = os.environ, folder: str = FOLDER,
         first: bool = False) -> str:
    """Return why MPICH cannot start `ranks` ranks on this node; "" if it can, or if unknown.

    Every rank decides alike, as in `lean_settings`, whose parameters it has.

    Further parameters
    ------------------
    first : bool
        Whether this rank is the first of its node, which also counts what other jobs have left:
        less than all network libraries need ends in a crash.
    """
    chosen = {name: environ[name].lower() for name in (NETMOD, CELLS)
              if environ.get(name, "ucx").lower() != "ucx"}    # the default
    each = next((each for settings, each in WAYS if settings == chosen), 0)
    total, free = free_bytes(folder)
    least = min(each, WAYS[1][1])    # UCX may do without its share
    enough = total >= _taken(ranks, each) and (not first or free >= _taken(ranks, least))
    if enough or not each or not is_from_pypi(environ):
        return ""
    has = "is not there, or cannot be written"
    if total:
        has = f"has {free / 1e6:.1f} of {_megabytes(total)} free"
    return (f"{ranks} rank{'s' * (ranks > 1)} of MPICH on one node need{'s' * (ranks == 1)} "
            f"{_megabytes(_taken(ranks, each))} of shared memory, and {folder} {has}: "
            f"{_advice(ranks)}")


def hint(ranks: int, folder: str = FOLDER) -> str:
    """Return what is free, for ranks on this node that crashed; "" where that is ample.

    It may be the cause: other jobs have a share of it, and other MPI libraries take it, too.
    """
    free = free_bytes(folder)[1]
    if free >= _taken(ranks, WAYS[0][1]):
        return ""
    return (f"{folder} has {_megabytes(free)} free, of which MPI may need more for {ranks} "
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


def _taken(ranks: int, each: int) -> int:
    return ranks * each + FOR_ALL


def _advice(ranks: int) -> str:
    size = math.ceil(AMPLE * _taken(ranks, WAYS[0][1]) / 2 ** 30)
    return (f"end other jobs, make it larger (docker run --shm-size={size}g), or start fewer "
            "ranks")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
