"""Break an emulated cluster while it runs: links that are cut or slow, nodes that die.

For programs that run in the namespaces of the cluster's head, as its command does, by hand too
(``bench/cluster/README.rst``).  Ranks change the rates of all links by ``slow all RATE``, see
`bench.cluster.rates`.
"""
from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.cluster import links, namespaces
from bench.cluster.nodes import read_cluster
from bench.cluster.spec import Cluster, parse_rate
from bench.errors import UsageError
from pyroute2 import IPRoute

HEAD = 1    # the process that built the cluster; its namespaces hold the switch


def _set_link_rate(node: int, link: float | None) -> None:
    """Change the bit/s of the link of a node in both directions, None for no limit.

    What waits in its queues is lost; TCP sends it again.
    """
    cluster, holder = _find_node(node)
    _limit_device(f"node-{node}", link)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            namespaces.enter(holder)
            _limit_device("eth0", link, cluster.latency)
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        raise OSError(f"the link of node {node} cannot be changed at its node")


def _set_all_rates(link: float | None) -> None:
    """Change the rate of all links, from a process on any node."""
    cluster = Cluster.from_environment()
    if cluster is None:
        raise UsageError("rates of links are changed inside an emulated cluster")
    namespaces.enter(HEAD)
    for node in range(cluster.nodes):
        _set_link_rate(node, link)


def _kill_node(node: int) -> None:
    """Cut the link of a node, and kill all its processes: others hear nothing of their end."""
    _, holder = _find_node(node)
    _set_state(node, "down")
    for process in [*(one for one in _processes_beside(holder) if one != holder), holder]:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:    # it has just ended
            continue


def main(words: Sequence[str]) -> None:
    """Run the command line: a fault, a node, and the rate of a slow link.

    Raises UsageError when it cannot be read, or this is no emulated cluster.
    """
    faults: dict[str, Callable[[int], None]] = {
        # A link that is cut carries nothing more; programs are told nothing of it.
        "cut": lambda node: _set_state(node, "down"),
        "restore": lambda node: _set_state(node, "up"), "kill": _kill_node,
        "slow": lambda node: _set_link_rate(node, parse_rate(words[2]))}
    name = words[0] if words else ""
    if len(words) == 3 and list(words[:2]) == ["slow", "all"]:
        _set_all_rates(parse_rate(words[2]))
        return
    if name not in faults or len(words) != 2 + (name == "slow") or not words[1].isdecimal():
        raise UsageError(f"{' '.join(words)!r}: cut NODE, restore NODE, kill NODE or slow NODE "
                         f"RATE would do")
    faults[name](int(words[1]))


def _find_node(node: int) -> tuple[Cluster, int]:
    """Return the cluster, and the process that holds the namespaces of one of its nodes."""
    try:
        cluster, processes = read_cluster()
    except FileNotFoundError as error:
        raise UsageError("faults are made inside an emulated cluster, off its nodes: bench "
                         "cluster -- COMMAND runs COMMAND there") from error
    if not 0 <= node < cluster.nodes:
        raise UsageError(f"there is no node {node}: 0 to {cluster.nodes - 1} would do")
    return cluster, processes[str(node)]


def _set_state(node: int, state: str) -> None:
    """Set the switch's port of a node "up" or "down"."""
    _find_node(node)
    with IPRoute() as net:
        net.link("set", index=links.index_of(net, f"node-{node}"), state=state)


def _limit_device(name: str, link: float | None, latency: float = 0.0) -> None:
    """Limit what a device of this network namespace sends, in place of any earlier limit."""
    with IPRoute() as net:
        index = links.index_of(net, name)
        # Handle 0: the discipline that a device has by itself, which cannot be removed.
        if any(one["handle"] and one["index"] == index for one in net.get_qdiscs(index=index)):
            net.tc("del", index=index, root=True)
        if link is None:
            net.link("set", index=index, gso_max_segs=links.ANY_FRAMES)
        links.limit_rate(net, name, link, latency)


def _processes_beside(holder: int) -> list[int]:
    """List the processes in the network namespace of a process."""
    wanted, found = os.readlink(f"/proc/{holder}/ns/net"), []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "ns" / "net") == wanted:
                found.append(int(path.name))
        except OSError:    # it has just ended
            continue
    return found


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        sys.exit(f"error: {error}")
