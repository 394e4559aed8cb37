"""Measure operations repeated alone: products, elementwise passes, collectives.

All ranks work at the same time, as in a step, and times are makespans, so the figures include
contention of the ranks of a node for cores and memory bandwidth.
"""

import itertools
import math
import sys
import time
from typing import Callable, Sequence

import numpy as np

import mm3d
from bench.agreement import agree
from bench.checks import operation
from bench.cluster.spec import Cluster
from bench.errors import WrongResult
from bench.experiments.products import operands
from bench.experiments.products.collectives import measure_collective
from bench.instruments import sampling, timing
from bench.instruments.available_memory import total_memory
from bench.instruments.clock import Clock
from bench.prediction.calibration.record import CollectivePoint, Shape
from bench.prediction.seconds import link_level
from mm3d import launcher
from mm3d.arrays.products import matmul
from mm3d.grid.axis import COLLECTIVES

SAMPLES, ROUNDS = 3, 3    # samples of each point in a round, and rounds over all points
LIMITS = timing.Limits(SAMPLES, SAMPLES)
EDGES = (32, 64, 128, 256, 512, 1024)
OBLONG = ((1024, 64, 1024), (64, 1024, 1024), (1024, 1024, 64), (256, 1024, 2048),
          (64, 64, 512), (512, 128, 128), (128, 512, 64), (2048, 256, 256), (16, 256, 1024))
BYTES = tuple(64 * 8 ** k for k in range(7))    # 64 B to 16 MiB
MEMORY = 1 / 32    # of the machine, that one array of each rank may take
DIVIDING = ("all_gather", "reduce_scatter")
# On an emulated cluster, whose links make collectives long:
LINK_SECONDS = 0.25    # that a collective may keep the links busy
LINK_ROUNDS, LINK_LIMITS = 2, timing.Limits(2, 2)    # rounds, and samples in each
# Its ranks begin up to some ms one after the other, the more the later: a sample is longer.
LONG_SAMPLE, LONG_SAMPLE_OF_A_RANK = 0.05, 0.0015    # seconds, the greater
FILL = 0.5   # every element of the operands of elementwise work
ROW = 256    # elements of a row, in passes that sum rows or columns


def make_sampler(step: Callable[[], object], comm, synchronize: Callable[[], None] = lambda: None,
                 clock: Clock | None = None) -> Callable[[], float]:
    """Return a function that samples the seconds of `step` on all ranks at once.

    A sample, the same on every rank, is the makespan of many steps over their number.  Where ranks
    outnumber cores, a core serves another rank while one waits, and a short makespan depends on
    how the system schedules ranks; there a sample is the processor time of all ranks over cores
    and steps.
    """
    if not launcher.oversubscribed():
        return sampling.makespans(step, comm, synchronize, clock or Clock(comm))
    cores = launcher.cores()

    def span(calls: int) -> float:
        comm.Barrier()
        start = time.process_time()
        sampling.repeat_calls(step, calls)()
        return comm.allreduce(time.process_time() - start) / cores

    # So long on each rank: its first call finds neither code nor operands in cache.
    calls = sampling.calls_needed(span, sampling.SAMPLE * comm.size / cores)
    return lambda: span(calls) / calls


def measure_seconds(step: Callable[[], object], comm) -> list[float]:
    """Measure the seconds of `step`: a few samples."""
    sample = make_sampler(step, comm)
    return [sample() for _ in range(SAMPLES)]


def measure_products(dtype: str, comm) -> dict[Shape, list[float]]:
    """Measure the seconds of products m x n by n x k: samples by (m, n, k).

    The larger operand is gathered from all ranks, as in the algorithms: in shared memory, caches
    that the ranks share hold it only once.
    """
    grid = mm3d.Grid(comm, "numpy", x=comm.size)

    def operand(name: str, shape: tuple[int, int], gathered: bool) -> np.ndarray:
        layout, letter = (mm3d.Layout("x,"), "x") if gathered else (mm3d.Layout(","), None)
        a = operands.fill(operands.allocate(layout, grid, shape, dtype, letter), grid.backend, 0,
                          name, comm.rank)
        return layout.split(grid, shape, "x").all_gather(a) if gathered else a

    def measure(shape: Shape) -> list[float]:
        m, n, k = shape
        a, b = operand("A", (m, n), m > k), operand("B", (n, k), m <= k)
        operation.check_own_product(f"C of {m} x {n} x {k} {dtype}", (a, b, matmul(a, b)), 0, comm)
        return measure_seconds(lambda: matmul(a, b), comm)

    found = {shape: measure(shape) for shape in [*((edge,) * 3 for edge in EDGES), *OBLONG]}
    grid.free()
    return found


def _operations(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> dict[str, tuple]:
    """List elementwise operations of the model on `a` and `b`, all of whose elements are `FILL`.

    Returns
    -------
    dict of str to tuple
        By name: the call, the elements read and written, the result, and its expected value.
    """
    n, width = a.size, min(ROW, a.size)
    u, v = a.reshape(-1, width), b.reshape(-1, width)
    row, column = np.empty(width, a.dtype), np.empty(n // width, a.dtype)
    square, rows = FILL ** 2, n // width
    return {"copy": (lambda: np.copyto(out, a), 2 * n, out, FILL),
            "multiply": (lambda: np.multiply(a, b, out=out), 3 * n, out, square),
            "divide": (lambda: np.divide(a, b, out=out), 3 * n, out, 1),
            "tanh": (lambda: np.tanh(a, out=out), 2 * n, out, math.tanh(FILL)),
            "exp": (lambda: np.exp(a, out=out), 2 * n, out, math.exp(FILL)),
            "sum": (lambda: np.sum(u, axis=0, out=row), n + width, row, rows * FILL),
            "einsum": (lambda: np.einsum("ij,ij->j", u, v, out=row), 2 * n + width, row,
                       rows * square),
            "vecdot": (lambda: np.vecdot(u, v, out=column), 2 * n + n // width, column,
                       width * square)}


def measure_passes(comm) -> dict[tuple[str, int], list[float]]:
    """Measure the seconds of float32 passes: samples by operation and bytes read and written.

    Small passes find their operands in cache, as in the blocks of `mm3d.arrays.numpy_kernels`;
    large ones do not.
    """
    found = {}
    for length in (size // 4 for size in bytes_that_fit(comm.size)):
        a, b = (np.full(length, FILL, np.float32) for _ in range(2))
        for name, (step, moved, result, expected) in _operations(a, b, np.zeros_like(a)).items():
            step()
            right = np.allclose(result, expected, rtol=1e-5)
            agree("" if right else f"{name} of {length} elements is not {expected:g}", comm,
                  WrongResult)
            found[name, 4 * moved] = measure_seconds(step, comm)
    return found


def list_placements(ranks: int) -> list[tuple[int, int]]:
    """List size and stride of all lines that grids of `ranks` ranks have."""
    return [(size, stride) for size in range(2, ranks + 1) if ranks % size == 0
            for stride in range(1, ranks // size + 1) if ranks // size % stride == 0]


def divided_shape(length: int, pieces: bool) -> tuple[int, ...]:
    """Return the shape of an array of `length` elements whose last dimension is divided.

    It has one dimension or, if the parts should lie in many `pieces`, is nearly square.
    """
    rows = 2 ** int(math.log2(length) / 2)
    return (rows, length // rows) if pieces else (length,)


def bytes_that_fit(ranks: int) -> list[int]:
    """List the `BYTES` of arrays that fit several times into the memory of all ranks here."""
    memory = total_memory() or math.inf
    return [n for n in BYTES if n * ranks <= MEMORY * memory]


def bytes_within(seconds: float, kind: str, size: int, stride: int, cluster: Cluster | None,
                 fitting: Sequence[int] = BYTES) -> list[int]:
    """List the bytes of `fitting` arrays whose collective keeps the links of a cluster busy for
    this time at most: all of them where there are no links, and always the least.

    The last is the largest power of two that does, from which larger arrays are extrapolated.
    """
    known = [n for n in fitting if n >= 512]
    level, load = link_level(size, stride, cluster.ranks if cluster else sys.maxsize)
    if cluster is None or cluster.link is None or level == "node":
        return known
    times = load * (2 if kind == "all_reduce" else 1) * 8 / cluster.link
    short = [n for n in known if n * times <= seconds]
    if not short:
        return known[:1]
    doubled = int(math.log2(min(seconds / times, known[-1]) / short[-1]))
    return short + [short[-1] * 2 ** doubled] * (doubled > 0)


def measure_collectives(comm, cluster: Cluster | None = None,
                        earlier: dict[CollectivePoint, list[float]] | None = None
                        ) -> dict[CollectivePoint, list[float]]:
    """Measure the seconds of every collective along all lines.

    On several nodes these are makespans, since ranks wait for links, of calls that take
    `LONG_SAMPLE` or longer.  Arrays are left out that keep the links busy for longer than
    `LINK_SECONDS`, and columns over such links, which take longer than to make them contiguous.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        All ranks; each of them calls this.
    cluster : Cluster, optional
        The emulated cluster, if the ranks are on several of its nodes.
    earlier : dict of tuple to list of float, optional
        Samples of an earlier round in the cluster, by which as many calls are made at once.

    Returns
    -------
    dict of tuple to list of float
        Samples by kind, size, stride, pieces (see `bench.prediction.machine_model.Line.key`) and
        bytes of the whole array.  Collectives that divide the array are measured for columns as
        well.
    """
    clock, found = Clock(comm), {}
    least = max(LONG_SAMPLE, LONG_SAMPLE_OF_A_RANK * comm.size)
    fitting = bytes_that_fit(comm.size)

    def take(step: Callable[[], object], point: CollectivePoint) -> tuple[list[list[float]], str]:
        if cluster is None:
            sample, limits = make_sampler(step, comm, clock=clock), LIMITS
        else:
            calls = math.ceil(least / min(earlier[point])) if earlier else None
            sample = sampling.makespans(step, comm, lambda: None, clock, least, calls)
            limits = LINK_LIMITS
        seconds, ended_by = sampling.take_samples(sample, limits, comm)
        return [seconds], ended_by

    ways = [*itertools.product(COLLECTIVES, [False]), *itertools.product(DIVIDING, [True])]
    for size, stride in list_placements(comm.size):
        grid = mm3d.Grid(comm, "numpy", x=comm.size // size // stride, y=size, z=stride)
        linked = (cluster is not None and cluster.link is not None
                  and link_level(size, stride, cluster.ranks)[0] == "network")
        for kind, pieces in ways:
            if pieces and linked:
                continue
            for length in bytes_within(LINK_SECONDS, kind, size, stride, cluster, fitting):
                measured = measure_collective(
                    grid, "y", kind, divided_shape(length // 4, pieces), "float32",
                    lambda steps: take(*steps, (kind, size, stride, pieces, length)))
                found[kind, size, stride, pieces, length] = comm.bcast(measured.seconds)
        grid.free()
    return found
