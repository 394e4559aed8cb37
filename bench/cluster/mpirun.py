"""Start ranks on the nodes of an emulated cluster: ``mpirun`` on PATH inside it.

It reads the number of ranks and where they are to run, and starts the real ``mpirun``, by whose
own options a node is reached through ``remote-shell`` instead of ssh.  Read by processes that must
not import NumPy or MPI.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.cluster.spec import CLUSTER_ENV, FOLDER, NETWORK, SWITCH, Cluster

REAL, LIBRARY = "MM3D_CLUSTER_MPIRUN", "MM3D_CLUSTER_MPI"    # its path, and the launcher's name
COUNTS = ("n", "np")
SHELL = f"{FOLDER}/remote-shell"
ADDRESSES = f"{NETWORK}.0/24"


@dataclass(frozen=True)
class Launcher:
    """The ``mpirun`` of one MPI library.

    Attributes
    ----------
    mark : str
        A text that only this ``mpirun --version`` prints.
    placement : callable
        Returns, for a cluster, the options that fill one node with ranks after the other.
    settings, defaults : dict
        Variables by which nodes are reached through `SHELL`, and ranks by TCP over their links;
        and variables that the user may set otherwise.
    taken : tuple of str
        Options by which the cluster itself is described.
    values : dict
        The number of values of the options that have any, other than counts of ranks.
    """

    name: str
    mark: str
    placement: Callable[[Cluster], list[str]]
    settings: dict[str, str]
    defaults: dict[str, str]
    taken: tuple[str, ...]
    values: dict[str, int]


def _host_list(cluster: Cluster) -> str:
    """Return the addresses of all nodes, each with the number of its ranks."""
    return ",".join(f"{cluster.address(node)}:{cluster.ranks}" for node in range(cluster.nodes))


MPICH = Launcher(
    name="MPICH", mark="HYDRA",
    placement=lambda cluster: ["-launcher", "ssh", "-launcher-exec", SHELL, "-iface", SWITCH,
                               "-hosts", _host_list(cluster)],
    # By libfabric's TCP: UCX finds memory that nodes of one machine share.
    settings={"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0"},
    # Otherwise each daemon writes the machine's topology into /tmp, where the file stays when the
    # daemon is killed.  Ranks that find no such file look at the machine themselves.
    defaults={"HWLOC_XMLFILE": f"{FOLDER}/no-topology"},
    taken=("hosts", "host", "f", "hostfile", "machinefile", "launcher", "launcher-exec", "iface",
           "ppn", "bootstrap", "bootstrap-exec"),
    values={"genv": 2, "env": 2} | dict.fromkeys(
        ("genvlist", "envlist", "wdir", "configfile", "outfile-pattern", "errfile-pattern",
         "outfile", "errfile", "prepend-pattern", "bind-to", "map-by", "membind", "timeout", "rmk",
         "usize", "topolib"), 1))

# Each version ignores the variables of the other.  Nodes look for the first word of the agent,
# too, but have no `SHELL`: so it is a shell, and the head alone starts daemons.  Daemons and ranks
# keep their files in the memory of their node, which vanishes with it.
OPEN_MPI = Launcher(
    name="Open MPI", mark="Open MPI",
    placement=lambda cluster: ["--host", _host_list(cluster), "--map-by", "slot:OVERSUBSCRIBE",
                               "--bind-to", "none"],
    settings={
        "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,vader,tcp",
        "OMPI_MCA_btl_tcp_if_include": ADDRESSES,
        # Open MPI 5
        "PRTE_MCA_plm": "ssh", "PRTE_MCA_plm_ssh_agent": f"sh {SHELL}",
        "PRTE_MCA_plm_ssh_no_tree_spawn": "1", "PRTE_MCA_prte_if_include": ADDRESSES,
        "PRTE_MCA_prte_tmpdir_base": "/dev/shm",
        # Open MPI 4
        "OMPI_MCA_plm": "rsh", "OMPI_MCA_plm_rsh_agent": f"sh {SHELL}",
        "OMPI_MCA_plm_rsh_no_tree_spawn": "1", "OMPI_MCA_oob_tcp_if_include": ADDRESSES,
        "OMPI_MCA_orte_tmpdir_base": "/dev/shm"},
    defaults={},
    taken=("host", "H", "hostfile", "machinefile", "default-hostfile", "map-by", "bind-to",
           "rank-by", "ppr", "npernode", "N", "pernode", "rankfile", "rf", "app", "bynode",
           "byslot", "launch-agent", "dvm"),
    values={"mca": 2, "gmca": 2, "omca": 2, "gomca": 2, "prtemca": 2, "pmixmca": 2}
    | dict.fromkeys(
        ("x", "wdir", "wd", "path", "prefix", "output", "output-filename", "output-directory",
         "timeout", "stdin", "report-uri", "tune", "am", "personality", "display",
         "runtime-options", "preload-files", "cpu-set", "cpu-list", "max-restarts",
         "spawn-timeout"), 1))

LAUNCHERS = (MPICH, OPEN_MPI)


def find_launcher(about: str) -> Launcher | None:
    """Return the launcher whose ``mpirun --version`` prints a text; None for any other."""
    return next((one for one in LAUNCHERS if one.mark in about), None)


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
    """Return the environment of the real mpirun; ValueError when it has another network.

    Each node adds the description of the cluster with its own number.
    """
    for name, value in launcher.settings.items():
        _refuse_setting(name, environ.get(name, value), launcher)
    kept = {name: value for name, value in environ.items()
            if name not in (CLUSTER_ENV, REAL, LIBRARY)}
    return launcher.defaults | kept | launcher.settings


def _refuse_setting(name: str, value: str, launcher: Launcher) -> None:
    """Raise a ValueError unless a variable has the value that the cluster needs."""
    if value != launcher.settings.get(name, value):
        raise ValueError(f"{name}={value}: an emulated cluster needs "
                         f"{name}={launcher.settings[name]}, as other networks find a way around "
                         f"its links; unset it")


def count_ranks(words: Sequence[str], cluster: Cluster, launcher: Launcher) -> int | None:
    """Return the number of ranks that a command line of mpirun asks for; None for the default.

    Raises ValueError when the cluster has fewer, or the line says where ranks run or by which
    network they send.
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
                _refuse_setting(("PRTE_MCA_" if option == "prtemca" else "OMPI_MCA_") + rest[0],
                                rest[1], launcher)
            del rest[:count]
    if total > cluster.size:
        raise ValueError(f"{total} ranks on {cluster.nodes} nodes of {cluster.ranks}: at most "
                         f"{cluster.size} would do, or a larger emulated cluster")
    return total if given else None
