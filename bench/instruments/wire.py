"""Count the bytes and packets that each node has sent and received, as its kernel counts them.

Headers of Ethernet, IP and TCP are included, once for each packet that the device was given: up to
64 KiB where the device itself cuts it into frames.  Whatever else the node sends meanwhile is
counted too, such as the output of its ranks to the launcher.
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mm3d.transport.nodes import create_node_communicator

DEVICES = Path("/proc/self/net/dev")
DEVICE = "eth0"


@dataclass(frozen=True)
class WireCount:
    """What nodes have sent and received between two readings.

    Attributes
    ----------
    nodes : tuple of int
        The number of each rank's node; nodes are numbered by their first rank.
    received_bytes, received_packets, sent_bytes, sent_packets : ndarray of int
        Counts of each node.
    """

    nodes: tuple[int, ...]
    received_bytes: np.ndarray
    received_packets: np.ndarray
    sent_bytes: np.ndarray
    sent_packets: np.ndarray


def read_counters(device: str = DEVICE) -> np.ndarray | None:
    """Return the counts of a `WireCount` by a device since it was made; None if there is none."""
    try:
        lines = DEVICES.read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    for line in lines:
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == device:
            found = numbers.split()
            return np.array([int(found[place]) for place in (0, 1, 8, 9)], np.int64)
    return None


def physical_node_numbers(comm: Any) -> tuple[int, ...]:
    """Return the number of each rank's node, in the order of their first ranks; all ranks call it.

    ``MM3D_NODE_SIZE`` is ignored: the nodes into which it divides one share a device.
    """
    node = create_node_communicator(comm)
    firsts = comm.allgather(node.bcast(comm.rank))
    node.Free()
    known = list(dict.fromkeys(firsts))
    return tuple(known.index(first) for first in firsts)


class WireRecorder:
    """Count what each node sends and receives between two points of a program.

    The first rank of each node reads its counters.
    """

    def __init__(self, comm: Any) -> None:
        self.comm, self.nodes = comm, physical_node_numbers(comm)
        self.reads = self.nodes.index(self.nodes[comm.rank]) == comm.rank
        self._first = read_counters() if self.reads else None
        self.available = all(comm.allgather(not self.reads or self._first is not None))

    def start(self) -> None:
        """Read the counters, where all ranks are done with what came before."""
        self.comm.Barrier()
        if self.reads and self.available:
            self._first = read_counters()
        self.comm.Barrier()

    def stop(self) -> WireCount | None:
        """Read the counters again, where all ranks are done.

        The two barriers between the readings are counted too: some packets a node.

        Returns
        -------
        WireCount or None
            On rank 0, the counts since `start`; None on the others, and where a node has no such
            device.
        """
        self.comm.Barrier()
        mine = None
        if self.reads and self.available:
            mine = read_counters() - self._first
        found = self.comm.gather(mine)
        if self.comm.rank or not self.available:
            return None
        counts = np.array([one for one in found if one is not None])
        return WireCount(self.nodes, *counts.T)
