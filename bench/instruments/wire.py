"""Count the bytes and packets that each node has sent and received, as its kernel counts them.

In a step the fewest bytes that the nodes of an emulated cluster can receive stand beside them.

Headers of Ethernet, IP and TCP are included, once for each packet that the device was given: up to
64 KiB where the device itself cuts it into frames.  Whatever else the node sends meanwhile is
counted too, such as the output of its ranks to the launcher.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import numpy as np

from bench.instruments import timing
from bench.records.measurements import Group, Variable
from mm3d.tracing.events import Collective, Event, Observer, PHASES
from mm3d.tracing.observe import observed
from mm3d.transport.nodes import create_node_communicator, gather_nodes

DEVICES = Path("/proc/self/net/dev")
DEVICE = "eth0"


def read_counters(device: str = DEVICE) -> np.ndarray | None:
    """Return bytes and packets received, and sent, since a device was made; None if there is none.
    """
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


def _physical_node_numbers(comm: Any) -> tuple[int, ...]:
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

    The first rank of each node reads its counters.  `nodes` has the number of each rank's node.
    """

    def __init__(self, comm: Any) -> None:
        self.comm, self.nodes = comm, _physical_node_numbers(comm)
        self.reads = self.nodes.index(self.nodes[comm.rank]) == comm.rank
        self._first = read_counters() if self.reads else None
        self.available = all(comm.allgather(not self.reads or self._first is not None))

    def start(self) -> None:
        """Read the counters, where all ranks are done with what came before."""
        self.comm.Barrier()
        if self.reads and self.available:
            self._first = read_counters()
        self.comm.Barrier()

    def stop(self) -> np.ndarray | None:
        """Read the counters again, where all ranks are done; return what `read_counters` counted.

        The counts, (4, nodes), are on rank 0; None on the others, and where a node has no such
        device.  The two barriers between the readings are counted too: some packets a node.
        """
        self.comm.Barrier()
        mine = None
        if self.reads and self.available:
            mine = read_counters() - self._first
        found = self.comm.gather(mine)
        if self.comm.rank or not self.available:
            return None
        return np.array([one for one in found if one is not None]).T


class _CrossingBytes(Observer):
    """Sum the bytes of collectives that nodes have to receive from others, by direction.

    A block crosses the link of a node once, as with bucket algorithms between nodes (see
    `mm3d.transport.nodes.words_into_nodes`); the first rank of a line counts for all of it.
    """

    kinds = (Collective,)

    def __init__(self, grid: Any, node: int) -> None:
        lines = {name: len(set(gather_nodes(axis.comm, node)))
                 for name, axis in grid.axes.items() if axis.size > 1}
        self._others = {name: (nodes - 1) * (grid[name].rank == 0)
                        for name, nodes in lines.items()}
        self.found = dict.fromkeys(grid.axes, 0)

    def enter(self, event: Event, barrier: Callable[[], None] | None = None) -> None:
        """Add the bytes of a collective."""
        assert isinstance(event, Collective) and event.kind != "all_to_all"    # has no whole
        times = 2 if event.kind == "all_reduce" else 1
        self.found[event.direction] += times * self._others[event.direction] * event.bytes

    def take(self) -> np.ndarray:
        """Return the sums by direction, which begin anew."""
        found = np.array(list(self.found.values()), np.int64)
        self.found = dict.fromkeys(self.found, 0)
        return found


def count_wire(step: timing.Step, grid: Any) -> Group | None:
    """Do a step on all ranks, and count the bytes that each node received and sent, by its kernel.

    The group ``wire`` of a run is returned on rank 0; None on the others, on one node, and where
    nodes have no such device.
    """
    recorder = WireRecorder(grid.comm)
    if not recorder.available or max(recorder.nodes) == 0:
        return None
    crossing, counts, least = _CrossingBytes(grid, recorder.nodes[grid.comm.rank]), [], []

    def run_phase(phase: Callable[[], Any]) -> Any:
        recorder.start()
        result = phase()
        step.synchronize()
        counts.append(recorder.stop())
        least.append(crossing.take())
        return result
    step.prepare()
    with observed(grid, crossing):
        saved = run_phase(step.forward)
        run_phase(lambda: step.backward(saved))
    everyone = grid.comm.reduce(np.array(least))
    if grid.comm.rank:
        return None
    nodes, dims = range(max(recorder.nodes) + 1), ("phase", "node")
    received, _, sent, _ = np.array(counts).swapaxes(0, 1)
    return Group({"phase": PHASES, "node": nodes, "axis": list(grid.axes)}, {
        "received": Variable(received, "byte", dims), "sent": Variable(sent, "byte", dims),
        "least": Variable(everyone, "byte", ("phase", "axis"))})
