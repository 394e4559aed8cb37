"""Describe how to tell the ``mpirun`` of each MPI library the nodes of an emulated cluster.

Read by processes that must not import NumPy or MPI.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.cluster.spec import FOLDER, NETWORK, SWITCH, Cluster

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
    settings : dict
        Variables by which nodes are reached through `SHELL`, and ranks by TCP over their links.
    defaults : dict
        Variables that the user may set otherwise.
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


def host_list(cluster: Cluster) -> str:
    """Return the addresses of all nodes, each with the number of its ranks."""
    return ",".join(f"{cluster.address(node)}:{cluster.ranks}" for node in range(cluster.nodes))


MPICH = Launcher(
    name="MPICH", mark="HYDRA",
    placement=lambda cluster: ["-launcher", "ssh", "-launcher-exec", SHELL, "-iface", SWITCH,
                               "-hosts", host_list(cluster)],
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
    placement=lambda cluster: ["--host", host_list(cluster), "--map-by", "slot:OVERSUBSCRIBE",
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
