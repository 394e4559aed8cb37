"""Count the bytes that nodes of an emulated cluster receive in a step, and the fewest possible."""

from typing import Any, Callable

import numpy as np

from bench.instruments import timing
from bench.instruments.wire import WireRecorder
from bench.records.measurements import Group, Variable
from mm3d.tracing.events import Collective, Event, Observer, PHASES
from mm3d.tracing.observe import observed
from mm3d.transport.nodes import gather_nodes


class CrossingBytes(Observer):
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

    Returns
    -------
    Group or None
        The group ``wire`` of a run, on rank 0; None on the others, on one node, and where nodes
        have no such device.
    """
    recorder = WireRecorder(grid.comm)
    if not recorder.available or max(recorder.nodes) == 0:
        return None
    crossing, counts, least = CrossingBytes(grid, recorder.nodes[grid.comm.rank]), [], []

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
    return Group({"phase": PHASES, "node": nodes, "axis": list(grid.axes)}, {
        "received": Variable(np.array([one.received_bytes for one in counts]), "byte", dims),
        "sent": Variable(np.array([one.sent_bytes for one in counts]), "byte", dims),
        "least": Variable(everyone, "byte", ("phase", "axis"))})
