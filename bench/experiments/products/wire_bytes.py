"""Measure the bytes that collectives send between nodes, beside the fewest that must be sent."""

import itertools
from dataclasses import replace
from typing import Sequence

import numpy as np

import mm3d
from bench.checks import operation
from bench.cluster.spec import Cluster
from bench.experiments.products import operands
from bench.instruments.clock import Clock, time_on_all_ranks
from bench.instruments.wire import WireRecorder
from bench.records.model_run import add_numbers
from bench.records.measurements import Measurements
from mm3d.grid.axis import COLLECTIVES, Axis
from mm3d.grid.split import Split
from mm3d.transport.mpi import MpiTransport

ROUNDS = 5    # of each collective by each transport
WAYS = ("grid", "mpi")


def add_wire(record: Measurements | None, grid: mm3d.Grid, axes: Sequence[str], size: int,
             dtype: str) -> Measurements | None:
    """Measure the bytes between nodes of every collective along `axes`, and add them to a record.

    Each round calls a collective once by the transport of the grid and once by MPI's own
    algorithm, all lines of a direction at the same time, and reads the counters of the kernel.

    Parameters
    ----------
    record : Measurements or None
        Of "collectives" on rank 0, which is returned; as it is outside of an emulated cluster, and
        on one node.
    axes : sequence of str
        Directions of two ranks or more.
    size : int
        Bytes of the array that the ranks of a line gather or sum.

    Raises
    ------
    WrongResult
        When a collective returns a wrong result.
    """
    recorder = WireRecorder(grid.comm)
    nodes = max(recorder.nodes) + 1
    if Cluster.from_environment() is None or not recorder.available or nodes == 1:
        return record
    words = size // np.dtype(dtype).itemsize
    found, checks, clock = [], [], Clock(grid.comm)
    for axis, kind in itertools.product(axes, COLLECTIVES):
        calls = []
        line = grid[axis].comm
        of_mpi = Axis(axis, line, grid.backend, MpiTransport(line, grid.backend))
        for way, line in zip(WAYS, (grid[axis], of_mpi)):
            split = Split(line, 0, words)
            a = operands.collective_operand(split, kind, (words,), dtype)
            calls.append(operands.collective_call(split, kind, a))
            check = operation.check_collective(split, kind, calls[-1], a, grid.comm)
            checks.append(replace(check, quantity=f"{check.quantity}, wire, {way}"))
        found.append([[_one_call(call, grid, recorder, clock) for call in calls]
                      for _ in range(ROUNDS)])
    if record is None:
        return None
    taken = np.array(found).reshape(len(axes), len(COLLECTIVES), ROUNDS, len(WAYS), 3, nodes)
    record.configuration["wire_size"] = size
    record.checks.extend(checks)
    return add_numbers(record, {
        "byte": {"wire_received": taken[..., 0, :], "wire_sent": taken[..., 1, :]},
        "s": {"wire_seconds": taken[..., 2, 0]}})


def _one_call(call: operands.CollectiveCall, grid: mm3d.Grid, recorder: WireRecorder,
              clock: Clock) -> np.ndarray:
    """Return bytes received and sent by each node in one call, and its makespan, (3, nodes)."""
    recorder.start()
    times, _ = time_on_all_ranks(call, grid.comm, grid.backend.synchronize, clock)
    count = recorder.stop()
    if count is None:
        return np.zeros((3, 0))
    return np.array([count.received_bytes, count.sent_bytes,
                     np.full(len(count.sent_bytes), times.max())])
