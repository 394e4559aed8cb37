"""Start ranks on the nodes of an emulated cluster: ``mpirun`` on PATH inside it.

It reads the number of ranks and where they are to run, and starts the real ``mpirun``, by whose
own options a node is reached through ``remote-shell`` instead of ssh.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from bench.cluster.spec import FOLDER, SWITCH, VARIABLE, Cluster

# By libfabric's TCP, over the link: UCX finds memory that nodes of one machine share.
SETTINGS = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0"}
REAL = "MM3D_CLUSTER_MPIRUN"
COUNTS = ("n", "np")
# Options by which the cluster itself is described, and the number of values of others.
TAKEN = ("hosts", "host", "f", "hostfile", "machinefile", "launcher", "launcher-exec", "iface",
         "ppn", "bootstrap", "bootstrap-exec")
VALUES = {"genv": 2, "env": 2} | dict.fromkeys(
    ("genvlist", "envlist", "wdir", "configfile", "outfile-pattern", "errfile-pattern", "outfile",
     "errfile", "prepend-pattern", "bind-to", "map-by", "membind", "timeout", "rmk", "usize",
     "topolib"), 1)


def main() -> int:
    """Start the real mpirun in place of this process; return 2 when it would not do."""
    cluster = Cluster.from_environment()
    assert cluster is not None
    try:
        ranks = count_ranks(sys.argv[1:], cluster)
        environ = environment(os.environ)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    words = [] if ranks is not None else ["-n", str(cluster.size)]
    real = environ.pop(REAL)
    os.execve(real, [real, *placement(cluster), *words, *sys.argv[1:]], environ)


def placement(cluster: Cluster) -> list[str]:
    """Return hydra's options: one node is filled with ranks after the other."""
    hosts = ",".join(f"{cluster.address(node)}:{cluster.ranks}" for node in range(cluster.nodes))
    return ["-launcher", "ssh", "-launcher-exec", f"{FOLDER}/remote-shell", "-iface", SWITCH,
            "-hosts", hosts]


def environment(environ: dict[str, str] | os._Environ[str]) -> dict[str, str]:
    """Return the environment of the real mpirun.

    Each node adds the description of the cluster with its own number.

    Raises
    ------
    ValueError
        When the user has chosen another network.
    """
    for name, value in SETTINGS.items():
        if environ.get(name, value) != value:
            raise ValueError(f"{name}={environ[name]}: an emulated cluster needs {name}={value}, "
                             f"as other networks find a way around its links; unset it")
    return {name: value for name, value in environ.items() if name != VARIABLE} | SETTINGS


def count_ranks(words: Sequence[str], cluster: Cluster) -> int | None:
    """Return the number of ranks that a command line of mpirun asks for; None for the default.

    Raises
    ------
    ValueError
        When the cluster has not so many, or the line says where ranks run.
    """
    total, rest, given = 0, list(words), False
    while rest and rest[0].startswith("-"):
        option = rest.pop(0).lstrip("-")
        if option in TAKEN:
            raise ValueError(f"-{option}: the emulated cluster itself says where ranks run: leave "
                             f"it out")
        if option in COUNTS:
            if not rest or not rest[0].isdigit():
                raise ValueError(f"-{option} {rest[0] if rest else ''}: a number of ranks would "
                                 f"do")
            total, given = total + int(rest.pop(0)), True
        else:
            del rest[:VALUES.get(option, 0)]
    if total > cluster.size:
        raise ValueError(f"{total} ranks on {cluster.nodes} nodes of {cluster.ranks}: at most "
                         f"{cluster.size} would do, or a larger emulated cluster")
    return total if given else None
