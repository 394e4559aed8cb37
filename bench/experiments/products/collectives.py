"""Measure each collective along each direction of a grid, beside MPI's own call."""

import itertools
import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Callable, Sequence

import numpy as np
from mpi4py import MPI

import mm3d
from bench.checks import operation
from bench.cluster.spec import Cluster
from bench.errors import UsageError, as_usage_error
from bench.experiments.products import operands
from bench.instruments.clock import Clock, time_on_all_ranks
from bench.instruments.sampling import (makespans_in_turns, measure_in_random_order,
                                        measured_environment, pad_samples, samples_along)
from bench.instruments.timing import Limits
from bench.instruments.wire import WireRecorder
from bench.records.model_run import add_numbers, transport_names
from bench.records.measurements import Check, Measurements, grid_settings
from mm3d.grid.axis import COLLECTIVES, Axis
from mm3d.grid.shape import GridShape
from mm3d.grid.split import Split
from mm3d.schemes import find_scheme
from mm3d.transport.mpi import MpiTransport

TERMS = 4    # buffers of a reduce-scatter to fill with zeros: more than are in use at one time
ROUNDS = 5    # of each collective on the wire, by each of its ways
WAYS = ("grid", "mpi")
Repeat = Callable[[Sequence[operands.CollectiveCall]], tuple[Sequence[Sequence[float]], str]]


@dataclass(frozen=True)
class Sampled:
    """The measurement of one collective.

    Attributes
    ----------
    seconds, plain : sequence of float
        Samples of the makespan, in seconds, and as many of MPI's own call for it; empty where it
        was not measured.
    ended_by : str
        The limit that ended both series of samples.
    moved : int
        Bytes counted on the busiest rank.
    check : Check
        The comparison of the result with the exact one.
    """

    seconds: Sequence[float]
    ended_by: str
    moved: int
    check: Check
    plain: Sequence[float] = ()


def collective_grid(comm: MPI.Intracomm, sizes: Sequence[int] | None = None,
                    backend: str | None = None) -> mm3d.Grid:
    """Make the grid whose directions are measured: x, y, z, a cube unless `sizes` are given.

    Raises UsageError when the ranks do not fit the grid, or none has a partner in it.
    """
    with as_usage_error():
        sizes = sizes or find_scheme("3d").default_grid(comm.size)
        if len(sizes) > 3:
            raise ValueError(f"--grid {'x'.join(map(str, sizes))}: at most three directions")
        grid = mm3d.Grid(comm, backend, **GridShape("xyz"[:len(sizes)], sizes))
    communicating_directions(grid)
    return grid


def communicating_directions(grid: mm3d.Grid) -> list[str]:
    """List the directions of `grid` that have two ranks or more.

    Raises UsageError when there is none.
    """
    found = [name for name, size in grid.shape.items() if size > 1]
    if not found:
        raise UsageError("collectives needs two ranks or more, as in mpirun -n 8")
    return found


def array_bytes(least: int, most: int, dtype: str) -> list[int]:
    """List the sizes of arrays to measure, in bytes: `least` to `most`, each 4 times the last.

    Raises UsageError when `least` is less than one element, or more than `most`.
    """
    itemsize = np.dtype(dtype).itemsize
    if not itemsize <= least <= most:
        raise UsageError(f"--least {least} --most {most}: at least {itemsize} bytes, and no more "
                         f"than --most, would do")
    steps = int(math.log(most / least, 4) + 1e-9) + 1
    return [least * 4 ** k // itemsize * itemsize for k in range(steps)]


def measure_collectives(grid: mm3d.Grid, sizes: Sequence[int], dtype: str, limits: Limits,
                        seed: int = 0,
                        progress: Callable[[str], None] = lambda line: None
                        ) -> Measurements | None:
    """Measure every collective along every direction of `grid` that has two ranks or more.

    All lines of a direction communicate at the same time, as they do in the algorithms.  Each
    result is first compared with the exact one.  The collective and MPI's own call take turns, so
    that a disturbance of the machine slows both.  `sizes` are bytes of the global array; see
    `array_bytes`.

    Returns
    -------
    Measurements or None
        A record of kind "collectives", by direction, collective and size; on rank 0, None on the
        others.  In an emulated cluster also the bytes between nodes for the largest array.

    Raises
    ------
    UsageError
        When there is no such direction.
    WrongResult
        When a collective returns a wrong result.
    """
    comm, itemsize = grid.comm, np.dtype(dtype).itemsize
    axes, clock = communicating_directions(grid), Clock(comm)

    def measure(axis: str, kind: str, size: int) -> Sampled:
        def repeat(steps: Sequence[operands.CollectiveCall]) -> tuple[list[list[float]], str]:
            return makespans_in_turns(steps, limits, seed, comm, grid.backend.synchronize, clock)
        # MPI may not take the arrays of a device.
        beside = ([operands.plain_call(grid[axis].comm, kind, size // itemsize, dtype)]
                  if grid.backend.host_buffers else [])
        return measure_collective(grid, axis, kind, (size // itemsize,), dtype, repeat, beside)

    points = [(axis, kind, size) for axis in axes for kind in COLLECTIVES for size in sizes]
    found = measure_in_random_order(points, seed, measure, progress)
    environs = measured_environment(grid.backend.name, comm)
    settings = {"dtype": dtype, "seed": seed, **grid_settings(grid.shape),
                "transport": transport_names(grid),
                "transports": " ".join(grid[name].transport.name for name in axes),
                **asdict(limits)}
    scales = {"axis": axes, "collective": COLLECTIVES, "size": list(sizes)}
    record = None if comm.rank else _collectives_record(scales, found, settings, environs)
    return _add_wire(record, grid, axes, sizes[-1], dtype)


def measure_collective(grid: mm3d.Grid, axis: str, kind: str, shape: tuple[int, ...], dtype: str,
                       repeat: Repeat, beside: Sequence[operands.CollectiveCall] = ()) -> Sampled:
    """Verify one collective along a direction, and take its samples.

    The terms of a reduce-scatter lie where products put them; the time that a product takes to
    write them is not measured.

    Parameters
    ----------
    kind : str
        One of `mm3d.grid.axis.COLLECTIVES`.
    shape : tuple of int
        The global array, whose last dimension is divided.
    repeat : callable
        Takes the samples of steps; returns those of each and the limit that ended them.
    beside : sequence of callable, optional
        MPI's own call for it, where that is to be measured too.

    Raises WrongResult on all ranks, when its result is wrong.
    """
    comm, line = grid.comm, grid[axis]
    split = mm3d.Layout("," * (len(shape) - 1) + axis).split(grid, shape, axis)
    a = operands.collective_operand(split, kind, shape, dtype)
    step = operands.collective_call(split, kind, a)
    check = operation.check_collective(split, kind, step, a, comm)
    grid.reset_traffic()
    step()
    moved = comm.allreduce(line.traffic[kind].bytes, MPI.MAX)
    if kind == "reduce_scatter":
        del a, step
        step = _summed_zeros(split, shape, dtype)
    (seconds, *plain), ended_by = repeat([step, *beside])
    return Sampled(seconds, ended_by, moved, check, *plain)


def _summed_zeros(split: Split, shape: tuple[int, ...], dtype: str) -> operands.CollectiveCall:
    """Return a step that reduce-scatters zeros, whose sums stay zero in all repetitions."""
    for _ in range(TERMS):
        term = split.term(shape, dtype)
        term[...] = 0
        split.reduce_scatter(term)
    return lambda: split.reduce_scatter(split.term(shape, dtype))


def _collectives_record(scales: dict[str, Sequence[Any]], found: list[Sampled], settings: dict,
                        environs: dict[str, Any]) -> Measurements:
    """Make the record of the samples `found` along `scales`."""
    shape = tuple(map(len, scales.values()))
    scales, variables = samples_along(scales, [(one.seconds, one.ended_by) for one in found])
    record = Measurements("collectives", settings, environs, scales, variables,
                          [one.check for one in found])
    alone = [one.plain for one in found]
    return add_numbers(record, {
        "byte": {"bytes_moved": np.array([one.moved for one in found], float).reshape(shape)},
        "s": {"mpi_samples": pad_samples(alone, shape)} if all(map(len, alone)) else {}})


def _add_wire(record: Measurements | None, grid: mm3d.Grid, axes: Sequence[str], size: int,
              dtype: str) -> Measurements | None:
    """Add the bytes between nodes of every collective of `size` bytes along `axes` to a record.

    Each round calls a collective once by the transport of the grid and once by MPI's own
    algorithm, all lines of a direction at the same time, and reads the counters of the kernel.
    Outside of an emulated cluster, and on one node, the record stays as it is.
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
    counts = recorder.stop()
    if counts is None:
        return np.zeros((3, 0))
    received, _, sent, _ = counts
    return np.array([received, sent, np.full(len(sent), times.max())])
