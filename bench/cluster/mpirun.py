"""Start ranks on the nodes of an emulated cluster: ``mpirun`` on PATH inside it.

It reads the number of ranks and where they are to run, and starts the real ``mpirun``, by whose
own options a node is reached through ``remote-shell`` instead of ssh.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from bench.cluster.launchers import LAUNCHERS, Launcher
from bench.cluster.spec import CLUSTER_ENV, Cluster

REAL, LIBRARY = "MM3D_CLUSTER_MPIRUN", "MM3D_CLUSTER_MPI"    # its path, and the launcher's name
COUNTS = ("n", "np")


def main() -> int:
    """Start the real mpirun in place of this process; return 2 when it would not do."""
    cluster = Cluster.from_environment()
    assert cluster is not None
    launcher = next(one for one in LAUNCHERS if one.name == os.environ[LIBRARY])
    try:
        ranks = count_ranks(sys.argv[1:], cluster, launcher)
        environ = environment(os.environ, launcher)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    words = [] if ranks is not None else ["-n", str(cluster.size)]
    real = os.environ[REAL]
    os.execve(real, [real, *launcher.placement(cluster), *words, *sys.argv[1:]], environ)


def environment(environ: dict[str, str] | os._Environ[str], launcher: Launcher) -> dict[str, str]:
    """Return the environment of the real mpirun.

    Each node adds the description of the cluster with its own number.

    Raises
    ------
    ValueError
        When the user has chosen another network.
    """
    for name, value in launcher.settings.items():
        refuse_setting(name, environ.get(name, value), launcher)
    kept = {name: value for name, value in environ.items()
            if name not in (CLUSTER_ENV, REAL, LIBRARY)}
    return launcher.defaults | kept | launcher.settings


def refuse_setting(name: str, value: str, launcher: Launcher) -> None:
    """Raise a ValueError unless a variable has the value that the cluster needs."""
    if value != launcher.settings.get(name, value):
        raise ValueError(f"{name}={value}: an emulated cluster needs "
                         f"{name}={launcher.settings[name]}, as other networks find a way around "
                         f"its links; unset it")


def count_ranks(words: Sequence[str], cluster: Cluster, launcher: Launcher) -> int | None:
    """Return the number of ranks that a command line of mpirun asks for; None for the default.

    Raises
    ------
    ValueError
        When the cluster has fewer, or the line says where ranks run or by which network they
        send.
    """
    total, rest, given = 0, list(words), False
    while rest and rest[0].startswith("-"):
        option = rest.pop(0).lstrip("-")
        if option in launcher.taken:
            raise ValueError(f"-{option}: the emulated cluster itself says where ranks run: leave "
                             f"it out")
        if option in COUNTS:
            if not rest or not rest[0].isdecimal():
                raise ValueError(f"-{option} {rest[0] if rest else ''}: a number of ranks would "
                                 f"do")
            total, given = total + int(rest.pop(0)), True
        else:
            count = launcher.values.get(option, 0)
            if option.endswith("mca") and len(rest) > 1:    # Open MPI's --mca NAME VALUE
                refuse_setting(("PRTE_MCA_" if option == "prtemca" else "OMPI_MCA_") + rest[0],
                               rest[1], launcher)
            del rest[:count]
    if total > cluster.size:
        raise ValueError(f"{total} ranks on {cluster.nodes} nodes of {cluster.ranks}: at most "
                         f"{cluster.size} would do, or a larger emulated cluster")
    return total if given else None
