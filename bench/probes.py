"""What `bench.calibrate` measures: products, elementwise passes, collectives, and Python itself.

All ranks work at the same time, as they do in a step, and times are makespans: what the ranks of
a node take from each other (cores, memory bandwidth) is in the figures.
"""

import math
from argparse import Namespace
from typing import Callable, Iterator

import numpy as np

import mm3d
from bench import micro, model
from bench.sampling import repeated
from mm3d import backend as backends
from mm3d import dry, store, timing
from mm3d.statistics import median_interval

LIMITS = timing.Limits(5, 9, 0.3, 0.1)
SAMPLE = 2e-3    # a sample is as many calls as take so long
EDGES = (32, 64, 128, 256, 512, 1024)
OBLONG = ((1024, 64, 1024), (64, 1024, 1024), (1024, 1024, 64), (256, 1024, 2048),
          (64, 64, 512), (512, 128, 128), (128, 512, 64), (2048, 256, 256), (16, 256, 1024))
BYTES = tuple(64 * 8 ** k for k in range(7))    # 64 B to 16 MiB
STREAM = 2 ** 24    # bytes that a pass goes through, so that what it reads is not in cache
ROW = 256    # elements that a sum adds up
TINY = dict(layers=4, hidden=16, heads=2, batch=2, seq=4)
Shape = tuple[int, int, int]


def samples(step: Callable[[], object], comm) -> list[float]:
    """Makespans of `step` on all ranks at once, each of many in a row over their number."""
    clock, nothing = timing.Clock(comm), (lambda: None)

    def span(calls: int) -> float:
        def several() -> None:
            for _ in range(calls):
                step()
        return float(timing.spans(several, comm, nothing, clock)[0].max())

    span(1)
    trial = comm.bcast(min(span(1), span(1)))
    calls = min(micro.CALLS, max(1, math.ceil(SAMPLE / trial)))
    return repeated(lambda: span(calls) / calls, LIMITS, comm)[0]


def seconds(step: Callable[[], object], comm) -> float:
    """The median of `samples`, the same on every rank."""
    return comm.bcast(median_interval(samples(step, comm)).median)


def products(dtype: str, comm) -> dict[Shape, float]:
    """Seconds of m x n by n x k products of this many sizes."""
    backend, found = backends.get("numpy"), {}
    for m, n, k in [*((edge,) * 3 for edge in EDGES), *OBLONG]:
        a, b = backend.empty((m, n), dtype), backend.empty((n, k), dtype)
        a[...], b[...] = 1, 1
        found[m, n, k] = seconds(lambda: backends.matmul(a, b), comm)
    return found


def _operations(a: np.ndarray, out: np.ndarray) -> dict[str, Callable]:
    """Elementwise work as the model does it: on a view, into a new array or into `out`."""
    return {"copy": lambda u: np.copyto(out[:len(u)], u), "mul": lambda u: u * out[:len(u)],
            "tanh": np.tanh, "exp": np.exp,
            "sum": lambda u: np.sum(u.reshape(-1, min(ROW, len(u))), axis=-1, keepdims=True)}


def passes(comm) -> dict[str, model.Curve]:
    """Seconds of float32 passes by the bytes that they read and write.

    Each goes on through an array that no cache holds; what it makes is new.
    """
    size = STREAM // 4
    a, out = np.full(size, 0.5, np.float32), np.full(size, 0.5, np.float32)
    found: dict[str, list[tuple[float, float]]] = {}
    for length in (b // 4 for b in BYTES):
        starts = _forever(range(0, size - length + 1, length))
        for name, operation in _operations(a, out).items():
            def step():
                start = next(starts)
                return operation(a[start:start + length])
            moved = {"mul": 3, "sum": 1 + 1 / min(ROW, length)}.get(name, 2) * 4 * length
            found.setdefault(name, []).append((moved, seconds(step, comm)))
    found["other"] = found["mul"]
    return {name: model.Curve(*map(list, zip(*points))) for name, points in found.items()}


def _forever(numbers: range) -> Iterator[int]:
    while True:
        yield from numbers


def placements(ranks: int) -> list[tuple[int, int]]:
    """Size and stride of every line that a grid of so many ranks can have."""
    return [(size, stride) for size in range(2, ranks + 1) if ranks % size == 0
            for stride in range(1, ranks // size + 1) if ranks // size % stride == 0]


def collectives(comm) -> list[model.Line]:
    """Every collective along every line, by the bytes of the whole array."""
    found, clock = [], timing.Clock(comm)
    chosen = Namespace(dtype="float32", seed=0)
    sizes = [size for size in BYTES if size >= 512]
    for size, stride in placements(comm.size):
        grid = mm3d.Grid(comm, "numpy", x=comm.size // size // stride, y=size, z=stride)
        for kind in store.COLLECTIVES:
            times = []
            for length in (b // 4 for b in sizes):
                spans, _, _ = micro.one_collective(grid, "y", kind, length, chosen, LIMITS,
                                                   clock)
                times.append(comm.bcast(median_interval(spans).median))
            alpha, beta, _ = micro.fitted(np.array(sizes, float), np.array(times))
            found.append(model.Line(kind, size, stride, alpha, beta,
                                    model.Curve([float(b) for b in sizes], times)))
        grid.free()
    return found


def python(machine: model.Machine, comm) -> float:
    """Seconds of Python around each operation: what a step of a tiny model takes on each rank
    beyond its operations, over their number."""
    scheme = mm3d.scheme("serial", mm3d.grid.MPI.COMM_SELF, backend="numpy")
    tiny = mm3d.Transformer(scheme, **TINY)
    x, dy = tiny.random("input"), tiny.random("output gradient")

    def step() -> None:
        tiny.backward(dy, tiny.forward(x)[1])

    measured = seconds(step, comm)
    trace = dry.step("serial", 1, block=machine.granule, **TINY)
    known = sum(model.seconds(machine, spent) for spent in model.terms(machine, trace).values())
    count = sum(times for (phase, _, _), times in trace.events.items() if phase in dry.PHASES)
    return max(0.0, measured - known) / count
