"""The verbs ``gemm`` and ``collectives``."""

import math
import time
from dataclasses import asdict
from typing import Callable

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

import mm3d
from bench import contribution, exact, fits, machinefile, microtables, operands
from bench.cases import UsageError
from bench.formats import render
from bench.journal import writable
from bench.machine import granted
from bench.sampling import (BOUNDS, alone, enough, failed, in_random_order, limits_of, makespans,
                            measured_environment, padded, publish, repeated, several)
from mm3d import backend as backends
from mm3d import environment, store, timing
from mm3d.record import Measurements, Variable
from mm3d.statistics import median_interval

TERMS = 4    # more than are in use at one time


def gemm(arguments, comm) -> int:
    """Measure the rate of square matrix products on one rank; 0 when written.

    Raises
    ------
    UsageError
        When there is more than one rank, or an argument cannot be meant.
    """
    backend = alone("gemm", arguments.backend, comm)
    limits = limits_of(arguments)
    threads = arguments.threads or sorted({1, granted(environment.cores())})
    most = granted(max(threads))
    if most < max(threads):
        raise UsageError(f"--threads {max(threads)}: BLAS takes {most} here at most")
    model = contribution.begun(arguments, 1, comm)
    out = writable(arguments.out, comm)
    points = [(dtype, count, n) for dtype in arguments.dtypes for count in threads
              for n in arguments.sizes]
    checks: list[store.Check] = []

    def point(dtype: str, count: int, n: int) -> tuple[list[float], str]:
        a, b = (operands.fill(backend.empty((n, n), dtype), backend, arguments.seed, name)
                for name in "AB")
        with threadpool_limits(count, user_api="blas"):
            checks.extend(exact.product(a, b, backends.matmul(a, b), arguments.seed, backend,
                                        f"C of {n} x {n} {dtype}, BLAS threads: {count}", comm))
            return repeated(sampler(lambda: backends.matmul(a, b), backend.synchronize), limits,
                            comm)

    try:
        found = in_random_order(points, arguments.seed, point)
    except exact.WrongResult as wrong:
        return failed("gemm", f"{wrong}; no times were written", comm)
    shape = (len(arguments.dtypes), len(threads), len(arguments.sizes))
    samples = padded([seconds for seconds, _ in found], shape)
    bounds = np.array([median_interval(seconds) for seconds, _ in found]).reshape(*shape, 4)
    flops = 2 * np.array(arguments.sizes, np.float64) ** 3
    dims = ("dtype", "threads", "size")
    record = Measurements(
        "gemm", {"seed": arguments.seed, **asdict(limits)},
        measured_environment(backend.name, comm),
        {"dtype": arguments.dtypes, "threads": threads, "size": arguments.sizes,
         "repetition": range(samples.shape[-1]), "bound": BOUNDS},
        {"samples": Variable(samples, "s", (*dims, "repetition")),
         "seconds": Variable(bounds, "s", (*dims, "bound")),
         "rate": Variable(flops / bounds[..., 0], "s-1", dims),
         "ended_by_width": Variable(np.array([int(end == "width") for _, end in found])
                                    .reshape(shape), "1", dims)}, checks)
    status = publish(record, out, "gemm", comm, lambda: render(microtables.gemm(record)))
    if model is not None:
        status = max(status, machinefile.publish(contribution.products(model, record),
                                                 arguments.machine, comm))
    return status


def sampler(step: Callable[[], object], synchronize: Callable[[], None]) -> Callable[[], float]:
    """What takes a sample of `step`: the seconds of a call, of as many as the clock needs."""
    def span(calls: int) -> float:
        start = time.perf_counter()
        several(step, calls)()
        synchronize()
        return time.perf_counter() - start

    calls = enough(span)
    return lambda: span(calls) / calls


def collectives(arguments, comm) -> int:
    """Measure every collective along every direction; 0 when written.

    All lines of a direction are busy at the same time, as they are in the algorithms.

    Raises
    ------
    UsageError
        When the ranks do not fit the grid, or an argument cannot be meant.
    """
    limits = limits_of(arguments)
    itemsize = np.dtype(arguments.dtype).itemsize
    if not itemsize <= arguments.least <= arguments.most:
        raise UsageError(f"--least {arguments.least} --most {arguments.most}: at least "
                         f"{itemsize} bytes, and no more than --most, would do")
    try:
        sizes = arguments.grid or mm3d.SCHEMES["3d"].default_grid(comm.size)
        if len(sizes) > 3:
            raise ValueError(f"--grid {'x'.join(map(str, sizes))}: at most three directions")
        grid = mm3d.Grid(comm, arguments.backend, **dict(zip("xyz", sizes)))
    except ValueError as error:
        raise UsageError(str(error)) from error
    axes = [name for name, size in grid.shape.items() if size > 1]
    if not axes:
        raise UsageError("collectives needs two ranks or more, as in mpirun -n 8")
    model = contribution.begun(arguments, environment.local_ranks(), comm)
    out = writable(arguments.out, comm)
    steps = int(math.log(arguments.most / arguments.least, 4) + 1e-9) + 1
    lengths = [arguments.least * 4 ** k // itemsize for k in range(steps)]
    points = [(axis, kind, n) for axis in axes for kind in store.COLLECTIVES for n in lengths]
    clock = timing.Clock(comm)
    try:
        found = in_random_order(points, arguments.seed, lambda axis, kind, n: one_collective(
            grid, axis, kind, (n,), arguments.dtype, limits, clock))
    except exact.WrongResult as wrong:
        return failed("collectives", f"{wrong}; no times were written", comm)
    environs = measured_environment(grid.backend.name, comm)
    record = None
    if comm.rank == 0:
        settings = {"dtype": arguments.dtype, "seed": arguments.seed, "grid_axes": "".join(axes),
                    "grid": " x ".join(map(str, grid.shape.values())),
                    "transport": operands.transport(grid),
                    "transports": operands.transports(grid, axes), **asdict(limits)}
        record = collectives_record(axes, [n * itemsize for n in lengths], found, settings,
                                    environs)
    grid.free()
    status = publish(record, out, "collectives", comm,
                     lambda: render(microtables.collectives(record)))
    if model is not None:
        machine = record and contribution.lines(model, record)
        status = max(status, machinefile.publish(machine, arguments.machine, comm))
    return status


def one_collective(grid: mm3d.Grid, name: str, kind: str, shape: tuple[int, ...], dtype: str,
                   limits: timing.Limits, clock: timing.Clock,
                   sampler: Callable = makespans
                   ) -> tuple[list[float], str, int, store.Check]:
    """Samples of one collective on an array of `shape`, whose last dimension is divided, what
    ended them, bytes a rank, and the check; `exact.WrongResult` when that fails.

    The terms of a reduce-scatter lie where products are told to put them, and what a product
    takes to write them is not timed.
    """
    axis, comm, backend = grid[name], grid.comm, grid.backend
    layout = mm3d.Layout("," * (len(shape) - 1) + name)
    split = layout.split(grid, shape, name)
    if kind == "all_gather":
        a = operands.empty(layout, grid, shape, dtype, name)
    elif kind == "reduce_scatter":
        a = split.term(shape, dtype)
    else:
        a = backend.empty(shape, dtype)
    step = {"all_gather": lambda: split.all_gather(a),
            "reduce_scatter": lambda: split.reduce_scatter(a),
            "all_reduce": lambda: axis.all_reduce(a),
            "broadcast": lambda: axis.broadcast(a, 0),
            "reduce": lambda: axis.reduce(a, 0)}[kind]
    check = exact.collective(split, kind, step, a, shape, comm)
    grid.reset_traffic()
    step()
    moved = comm.allreduce(axis.traffic[kind].bytes, MPI.MAX)
    if kind == "reduce_scatter":
        del a
        for _ in range(TERMS):    # sums of zeros remain zeros, however often they are made
            term = split.term(shape, dtype)
            term[...] = 0
            split.reduce_scatter(term)

        def step():
            return split.reduce_scatter(split.term(shape, dtype))

    sample = sampler(step, comm, backend.synchronize, clock)
    seconds, ended_by = repeated(sample, limits, comm)
    return seconds, ended_by, moved, check


def collectives_record(axes: list[str], sizes: list[int], found: list, settings: dict,
                       environs: dict) -> Measurements:
    """The record of what was measured, with the fits."""
    shape = (len(axes), len(store.COLLECTIVES), len(sizes))
    samples = padded([seconds for seconds, *_ in found], shape)
    bounds = np.array([median_interval(seconds) for seconds, *_ in found]).reshape(*shape, 4)
    moved = np.array([count for _, _, count, _ in found], np.float64).reshape(shape)
    lines = np.array([fits.line(np.array(sizes, np.float64), seconds)
                      for seconds in bounds[..., 0].reshape(-1, len(sizes))])
    lines = lines.reshape(*shape[:2], 3)
    dims = ("axis", "collective", "size")
    copying = ~fits.in_places(settings["transports"], store.COLLECTIVES)
    return Measurements(
        "collectives", settings, environs,
        {"axis": axes, "collective": store.COLLECTIVES, "size": sizes,
         "repetition": range(samples.shape[-1]), "bound": BOUNDS},
        {"samples": Variable(samples, "s", (*dims, "repetition")),
         "seconds": Variable(bounds, "s", (*dims, "bound")),
         "bytes_moved": Variable(moved, "byte", dims),
         "bandwidth": Variable(np.where(copying[..., None], moved / bounds[..., 0], np.nan),
                               "byte s-1", dims),
         "ended_by_width": Variable(np.array([int(end == "width") for _, end, *_ in found])
                                    .reshape(shape), "1", dims),
         "alpha": Variable(lines[..., 0], "s", dims[:2]),
         "beta": Variable(lines[..., 1], "s byte-1", dims[:2]),
         "fit_error": Variable(lines[..., 2], "1", dims[:2])}, [check for *_, check in found])
