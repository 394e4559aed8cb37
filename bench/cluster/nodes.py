"""Hold the namespaces of nodes, and run commands in them."""
from __future__ import annotations

import json
import os
import re
import signal
import sys
from typing import NoReturn

from bench.cluster import namespaces
from bench.cluster.spec import CLUSTER_ENV, FOLDER, Cluster

DESCRIPTION = "cluster.json"    # in FOLDER


class Nodes:
    """Processes that hold the namespaces of each node, until process 1 ends."""

    def __init__(self, cluster: Cluster) -> None:
        self.processes: dict[int, int] = {}
        self._ready, self._go = os.pipe(), os.pipe()
        for node in range(cluster.nodes):
            process = os.fork()
            if process == 0:
                self._hold(cluster, node)
            self.processes[node] = process
        os.close(self._go[0])
        os.close(self._ready[1])
        self._await()

    def connect(self) -> None:
        """Let each node open its link, which must be there."""
        os.close(self._go[1])
        self._await()

    def _await(self) -> None:
        """Wait for all nodes; raise OSError with the first problem."""
        left = len(self.processes)
        while left:
            answers = os.read(self._ready[0], 4096).decode()
            if not answers.isspace():
                from bench.cluster.links import Refused
                raise Refused(answers.strip() or "a node of the emulated cluster has ended")
            left -= len(answers)

    def _hold(self, cluster: Cluster, node: int) -> NoReturn:
        """Make the namespaces of a node and hold them."""
        from bench.cluster.links import Refused, open_node
        os.close(self._go[1])
        answer = self._ready[1]
        try:
            namespaces.unshare(namespaces.NET | namespaces.MOUNT | namespaces.UTS)
            namespaces.mount("tmpfs", "/dev/shm", "tmpfs",
                             namespaces.MS_NOSUID | namespaces.MS_NODEV, "mode=1777")
            namespaces.set_hostname(cluster.host_name(node))
            os.write(answer, b"\n")
            os.read(self._go[0], 1)    # until the links are there
            open_node(cluster, node)
            os.write(answer, b"\n")
        except Refused as error:
            os.write(answer, str(error).encode())
        except BaseException as error:    # process 1 tells the user
            os.write(answer, f"node {node} of the emulated cluster cannot be made: "
                             f"{error!r}".encode())
        while True:
            signal.pause()


def read_cluster() -> tuple[Cluster, dict[str, int]]:
    """Read the cluster, and the processes that hold its nodes, by their numbers."""
    with open(f"{FOLDER}/{DESCRIPTION}", encoding="utf-8") as file:
        found = json.load(file)
    return Cluster(**found["cluster"]), found["processes"]


def _enter_node(name: str) -> None:
    """Move this process into a node, which is named by its number, host name or address."""
    cluster, processes = read_cluster()
    number = re.fullmatch(r"(?:node-)?(\d{1,9})", name)
    names = {cluster.address(node): node for node in range(cluster.nodes)}
    node = int(number[1]) if number else names.get(name, cluster.nodes)
    if node >= cluster.nodes:
        raise SystemExit(f"error: there is no node {name!r}: 0 to {cluster.nodes - 1} would do")
    namespaces.enter(processes[str(node)])
    os.environ[CLUSTER_ENV] = cluster.to_environment(node)


def run_on_node() -> NoReturn:
    """Run a command on a node: ``on-node NODE COMMAND...``."""
    if len(sys.argv) < 3:
        raise SystemExit("error: on-node NODE COMMAND... would do")
    _enter_node(sys.argv[1])
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        raise SystemExit(f"error: {sys.argv[2]} cannot be started: {error.strerror}") from error


def run_shell() -> NoReturn:
    """Run a command line on a node as ssh does: ``remote-shell [-OPTION...] HOST WORDS...``."""
    words = sys.argv[1:]
    while words and words[0].startswith("-"):
        del words[0]
    _enter_node(words[0])
    os.execv("/bin/sh", ["sh", "-c", " ".join(words[1:])])
