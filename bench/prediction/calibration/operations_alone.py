"""Measure operations repeated alone: products, elementwise passes, collectives.

All ranks work at the same time, as in a step, so the figures include contention of the ranks of a
node for cores and memory bandwidth.  Every result is verified before it is timed.
"""

import itertools
import math
import time
from typing import Callable, Iterable, Sequence

import numpy as np

import mm3d
from bench.agreement import agree
from bench.checks import operation
from bench.cluster.spec import Cluster
from bench.errors import WrongResult
from bench.experiments.products import operands
from bench.experiments.products.collectives import measure_collective
from bench.instruments import sampling
from bench.instruments.clock import Clock
from bench.prediction.calibration.record import Point
from bench.prediction.seconds import link_level
from mm3d.arrays.products import matmul
from mm3d.grid.axis import COLLECTIVES

SAMPLES = 3    # of each operation in a round
EDGES = (32, 64, 128, 256, 512, 1024)
OBLONG = ((1024, 64, 1024), (64, 1024, 1024), (1024, 1024, 64), (256, 1024, 2048),
          (64, 64, 512), (512, 128, 128), (128, 512, 64), (2048, 256, 256), (16, 256, 1024))
SHAPES = (*((edge,) * 3 for edge in EDGES), *OBLONG)
BYTES = tuple(64 * 8 ** k for k in range(7))    # 64 B to 16 MiB
LEAST_BYTES = 512    # of a collective
MEMORY = 1 / 32    # of the machine, that one array of each rank may take
KINDS = (*((kind, False) for kind in COLLECTIVES),    # of rows, and of columns
         ("all_gather", True), ("reduce_scatter", True))
LINK_SECONDS = 0.25    # that a collective may keep the links of an emulated cluster busy
# Ranks of a cluster begin up to some ms one after the other: a sample is longer.
LINK_SAMPLE = 0.1    # seconds
FILL = 0.5   # every element of the operands of elementwise work
ROW = 256    # elements of a row, in passes that sum rows or columns
RepeatedCall = Callable[[], object]
Take = Callable[[RepeatedCall], list[float]]    # the samples of a step, the same on every rank


def makespan_sampler(comm, least: float = sampling.SAMPLE) -> Take:
    """Return a function that takes samples of a step: the makespan of as many calls as take
    `least` seconds, over their number."""
    clock = Clock(comm)

    def take(step: RepeatedCall) -> list[float]:
        sample = sampling.makespans(step, comm, lambda: None, clock, least)
        return [sample() for _ in range(SAMPLES)]
    return take


def processor_sampler(comm, cores: int, now: Callable[[], float] = time.process_time) -> Take:
    """Return a function that takes samples of a step: the processor time of all ranks over cores
    and calls.

    Where ranks outnumber cores, a core serves another rank while one waits, and a short makespan
    depends on how the system schedules ranks.  `now` returns the processor time of this rank.
    """
    def take(step: RepeatedCall) -> list[float]:
        def span(calls: int) -> float:
            comm.Barrier()
            start = now()
            sampling.repeat_calls(step, calls)()
            return comm.allreduce(now() - start) / cores

        # So long on each rank: its first call finds neither code nor operands in cache.
        calls = sampling.calls_needed(span, sampling.SAMPLE * comm.size / cores)
        return [span(calls) / calls for _ in range(SAMPLES)]
    return take


def measure_products(comm, take: Take, dtype: str, shapes: Iterable[tuple],
                     multiply: Callable = matmul) -> dict[Point, list[float]]:
    """Measure products m x n by n x k.

    The larger operand is gathered from all ranks, as in the algorithms: in shared memory, caches
    that the ranks share hold it only once.
    """
    grid = mm3d.Grid(comm, "numpy", x=comm.size)

    def operand(name: str, shape: tuple[int, int], gathered: bool) -> np.ndarray:
        layout, letter = (mm3d.Layout("x,"), "x") if gathered else (mm3d.Layout(","), None)
        a = operands.fill(operands.allocate(layout, grid, shape, dtype, letter), grid.backend, 0,
                          name, comm.rank)
        return layout.split(grid, shape, "x").all_gather(a) if gathered else a

    def measure(m: int, n: int, k: int) -> list[float]:
        a, b = operand("A", (m, n), m > k), operand("B", (n, k), m <= k)
        operation.check_own_product(f"C of {m} x {n} x {k} {dtype}", (a, b, multiply(a, b)), 0,
                                    comm)
        return take(lambda: multiply(a, b))

    found = {("product", dtype, *shape): measure(*shape) for shape in shapes}
    grid.free()
    return found


def list_passes(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> dict[str, tuple]:
    """List elementwise operations of the model on `a` and `b`, all of whose elements are `FILL`.

    Returns by name the call, the elements read and written, the result, and its expected value.
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


def measure_passes(comm, take: Take, sizes: Iterable[int],
                   listed: Callable[..., dict[str, tuple]] = list_passes
                   ) -> dict[Point, list[float]]:
    """Measure float32 passes over arrays of `sizes` bytes.

    Small passes find their operands in cache, as in the blocks of `mm3d.arrays.numpy_kernels`;
    large ones do not.
    """
    found = {}
    for length in (size // 4 for size in sizes):
        a, b = (np.full(length, FILL, np.float32) for _ in range(2))
        for name, (step, moved, result, expected) in listed(a, b, np.zeros_like(a)).items():
            step()
            right = np.allclose(result, expected, rtol=1e-5)
            agree("" if right else f"{name} of {length} elements is not {expected:g}", comm,
                  WrongResult)
            found["pass", name, 4 * moved] = take(step)
    return found


def list_placements(ranks: int) -> list[tuple[int, int]]:
    """List size and stride of all lines that grids of `ranks` ranks have."""
    return [(size, stride) for size in range(2, ranks + 1) if ranks % size == 0
            for stride in range(1, ranks // size + 1) if ranks // size % stride == 0]


def bytes_that_fit(ranks: int, memory: float) -> list[int]:
    """List the `BYTES` of arrays that fit several times into a memory that all ranks share."""
    return [size for size in BYTES if size * ranks <= MEMORY * memory]


def list_collectives(ranks: int, sizes: Sequence[int],
                     cluster: Cluster | None = None) -> list[Point]:
    """List every collective along all lines of `ranks` ranks, of arrays of `sizes` bytes.

    Over the links of a cluster, arrays are as large as keep them busy for `LINK_SECONDS` at most:
    the last is the largest power of two that does, from which larger arrays are extrapolated.
    Columns are left out there: a link takes longer than to make them contiguous.
    """
    sizes = [size for size in sizes if size >= LEAST_BYTES]
    found = []
    for size, stride in list_placements(ranks):
        for kind, pieces in KINDS:
            busy = _link_seconds(kind, size, stride, cluster)
            if busy and pieces:
                continue
            most = sizes[-1]
            if busy * most > LINK_SECONDS:
                most = max(sizes[0], 2 ** int(math.log2(max(1, LINK_SECONDS / busy))))
            found += [("collective", kind, size, stride, pieces, length)
                      for length in [*(one for one in sizes if one < most), most]]
    return found


def _link_seconds(kind: str, size: int, stride: int, cluster: Cluster | None) -> float:
    """Return the seconds that a byte of the array keeps the links of a cluster busy; 0 in a node.
    """
    if cluster is None or cluster.link is None:
        return 0.0
    level, load = link_level(size, stride, cluster.ranks)
    return 0.0 if level == "node" else load * (1 + (kind == "all_reduce")) * 8 / cluster.link


def line_grid(comm, size: int, stride: int) -> mm3d.Grid:
    """Make a grid whose lines along y have `size` ranks, `stride` apart."""
    return mm3d.Grid(comm, "numpy", x=comm.size // size // stride, y=size, z=stride)


def time_collectives(comm, take: Take, points: Sequence[Point]) -> dict[Point, list[float]]:
    """Measure collectives of float32 along all lines of a size and stride at once.

    Pieces are those of an array whose last dimension is divided, and which is nearly square.
    """
    found = {}
    for (size, stride), some in itertools.groupby(points, key=lambda point: point[2:4]):
        grid = line_grid(comm, size, stride)
        for point in some:
            _, kind, _, _, pieces, length = point
            rows = 2 ** int(math.log2(length // 4) / 2)
            shape = (rows, length // 4 // rows) if pieces else (length // 4,)
            found[point] = measure_collective(grid, "y", kind, shape, "float32",
                                              lambda steps: ([take(steps[0])], "")).seconds
        grid.free()
    return found
