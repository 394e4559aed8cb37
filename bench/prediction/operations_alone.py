"""What `bench.prediction.calibration` measures of operations alone: products, elementwise passes,
collectives.

All ranks work at the same time, as they do in a step, and times are makespans: what the ranks of
a node take from each other (cores, memory bandwidth) is in the figures.
"""

import itertools
import math
import time
from typing import Callable, Iterable

import numpy as np

import mm3d
from bench.agreement import agree
from bench.checks import operation
from bench.errors import WrongResult
from bench.experiments.products import operands
from bench.experiments.products.collectives import measure_collective
from bench.instruments import sampling, timing
from bench.instruments.clock import Clock
from bench.instruments.least_squares import fit_line
from bench.prediction import machine_model
from bench.prediction.fits import Shape
from mm3d import launcher
from mm3d.arrays.products import matmul
from mm3d.grid.axis import COLLECTIVES

SAMPLES, ROUNDS = 3, 3    # of each point in a round, and rounds over all points
LIMITS = timing.Limits(SAMPLES, SAMPLES)
EDGES = (32, 64, 128, 256, 512, 1024)
OBLONG = ((1024, 64, 1024), (64, 1024, 1024), (1024, 1024, 64), (256, 1024, 2048),
          (64, 64, 512), (512, 128, 128), (128, 512, 64), (2048, 256, 256), (16, 256, 1024))
BYTES = tuple(64 * 8 ** k for k in range(7))    # 64 B to 16 MiB
DIVIDING = ("all_gather", "reduce_scatter")
FILL = 0.5   # what elementwise work is of
ROW = 256    # elements of a row, in passes that add rows or columns up


def sampler(step: Callable[[], object], comm, synchronize: Callable[[], None] = lambda: None,
            clock: Clock | None = None) -> Callable[[], float]:
    """Return a function that takes a sample of `step` on all ranks at once, and returns the same
    number on every rank.

    It is the makespan of many steps in a row over their number.  Where ranks outnumber cores, a
    core always has something to do while a rank waits, and short makespans are of the system's
    turns; there it is the work, the processor time of all ranks, over cores and steps.
    """
    if not launcher.oversubscribed():
        return sampling.makespans(step, comm, synchronize, clock or Clock(comm))
    cores = launcher.cores()

    def span(calls: int) -> float:
        comm.Barrier()
        start = time.process_time()
        sampling.repeat_calls(step, calls)()
        return comm.allreduce(time.process_time() - start) / cores

    calls = sampling.calls_needed(span)
    return lambda: span(calls) / calls


def seconds(step: Callable[[], object], comm) -> float:
    """Measure seconds: the least of a few samples."""
    sample = sampler(step, comm)
    return min(sample() for _ in range(SAMPLES))


def least(rounds: Iterable[dict]) -> dict:
    """Measure the least seconds of each point in some rounds over all.

    What other programs take from the machine for a while then spoils no point: the figures are
    those of the machine left alone.
    """
    found: dict = {}
    for times in rounds:
        for point, taken in times.items():
            found[point] = min(found.get(point, math.inf), taken)
    return found


def products(dtype: str, comm) -> dict[Shape, float]:
    """Measure seconds of m x n by n x k products of this many sizes.

    The larger operand is one that all ranks have gathered, as in the algorithms: where they
    share memory, it is in the caches that they share only once.
    """
    grid = mm3d.Grid(comm, "numpy", x=comm.size)

    def operand(name: str, shape: tuple[int, int], gathered: bool) -> np.ndarray:
        layout, letter = (mm3d.Layout("x,"), "x") if gathered else (mm3d.Layout(","), None)
        a = operands.fill(operands.empty(layout, grid, shape, dtype, letter), grid.backend, 0,
                          name, comm.rank)
        return layout.split(grid, shape, "x").all_gather(a) if gathered else a

    def measure(shape: Shape) -> float:
        m, n, k = shape
        a, b = operand("A", (m, n), m > k), operand("B", (n, k), m <= k)
        operation.product(f"C of {m} x {n} x {k} {dtype}", (a, b, matmul(a, b)), 0, comm)
        return seconds(lambda: matmul(a, b), comm)

    found = {shape: measure(shape) for shape in [*((edge,) * 3 for edge in EDGES), *OBLONG]}
    grid.free()
    return found


def _operations(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> dict[str, tuple]:
    """Elementwise work as the model does it, the elements that it reads and writes, where its
    result is, and what that must be if all of `a` and `b` is `FILL`."""
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


def passes(comm) -> dict[tuple[str, int], float]:
    """Measure seconds of float32 passes by operation and bytes that it reads and writes.

    Small ones find their numbers in cache, as they do in the blocks of
    `mm3d.arrays.numpy_kernels`, and large ones do not.
    """
    found = {}
    for length in (size // 4 for size in BYTES):
        a, b = (np.full(length, FILL, np.float32) for _ in range(2))
        for name, (step, moved, result, expected) in _operations(a, b, np.zeros_like(a)).items():
            step()
            right = np.allclose(result, expected, rtol=1e-5)
            agree("" if right else f"{name} of {length} elements is not {expected:g}", comm,
                  WrongResult)
            found[name, 4 * moved] = seconds(step, comm)
    return found


def curves(times: dict[tuple[str, int], float]) -> dict[str, machine_model.Curve]:
    """Make curves of the seconds of `passes`; "other" is for operations that it does not name."""
    found: dict[str, machine_model.Curve] = {}
    for (name, size), taken in times.items():
        curve = found.setdefault(name, machine_model.Curve([], []))
        curve.bytes.append(float(size))
        curve.seconds.append(taken)
    return found | {"other": found["multiply"]}


def placements(ranks: int) -> list[tuple[int, int]]:
    """List size and stride of every line that a grid of this many ranks can have."""
    return [(size, stride) for size in range(2, ranks + 1) if ranks % size == 0
            for stride in range(1, ranks // size + 1) if ranks // size % stride == 0]


def divided(length: int, pieces: bool) -> tuple[int, ...]:
    """An array of so many elements, whose last dimension is dealt: nearly square if its parts
    are to lie in many pieces."""
    rows = 2 ** int(math.log2(length) / 2)
    return (rows, length // rows) if pieces else (length,)


def collectives(comm) -> dict[tuple[str, int, int, bool, int], float]:
    """Seconds of every collective along every line, as `bench.prediction.machine_model.Line.key`
    has them, by the bytes of the whole array; of columns too where the array is divided."""
    clock, found = Clock(comm), {}
    ways = [*itertools.product(COLLECTIVES, [False]), *itertools.product(DIVIDING, [True])]
    for size, stride in placements(comm.size):
        grid = mm3d.Grid(comm, "numpy", x=comm.size // size // stride, y=size, z=stride)
        for (kind, pieces), length in itertools.product(ways, (n for n in BYTES if n >= 512)):
            measured = measure_collective(
                grid, "y", kind, divided(length // 4, pieces), "float32",
                lambda step: sampling.take_samples(sampler(step, comm, clock=clock), LIMITS, comm))
            found[kind, size, stride, pieces, length] = comm.bcast(min(measured.seconds))
        grid.free()
    return found


def lines(times: dict[tuple[str, int, int, bool, int], float]) -> list[machine_model.Line]:
    """Make lines of the seconds of `collectives`."""
    found: dict[tuple, dict[int, float]] = {}
    for (*key, length), taken in times.items():
        found.setdefault(tuple(key), {})[length] = taken
    made = []
    for (kind, size, stride, pieces), curve in found.items():
        alpha, beta, _ = fit_line(np.array(list(curve), float), np.array(list(curve.values())))
        made.append(machine_model.Line(kind, size, stride, alpha, beta,
                                       machine_model.Curve(list(map(float, curve)),
                                                           list(curve.values())), pieces))
    return made
