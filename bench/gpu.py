"""The verb ``gpu``: what one rank's device achieves, alone and on a rank's work of the tables.

Four parts, each a record of its own: products beside the library's own, elementwise kernels beside
a copy, one Transformer layer beside PyTorch's, and one layer of every row of both tables as rank 0
has it, without communication.  All are compared with NumPy first, layers at a small size.
Seconds are the device's own, between two marks in its stream.
"""

import gc
from dataclasses import asdict
from typing import Any, Callable

import numpy as np
from mpi4py import MPI

import mm3d
from bench import exact, gpucases, gpuchecks, operands
from bench.cases import Sizes, UsageError, case, load
from bench.formats import render
from bench.journal import writable
from bench.microtables import other
from bench.sampling import (BOUNDS, alone, failed, limits_of, measured_environment, padded,
                            publish, repeated)
from mm3d import backend as backends
from mm3d.record import Measurements, Variable
from mm3d.statistics import median_interval
from mm3d.store import Check
from mm3d.transport import Absent

Step = Callable[[], object]


def gpu(arguments, comm) -> int:
    """Measure the chosen parts; 0 when all were written.

    Raises
    ------
    UsageError
        When there is more than one rank, or an argument cannot be meant.
    """
    bench = Bench(alone("gpu", arguments.backend or "cupy", comm), arguments, comm)
    out, status = writable(arguments.out, comm), 0
    for part in arguments.part:
        gc.collect()
        try:
            record = getattr(bench, part)()
        except exact.WrongResult as wrong:
            status = failed(f"gpu-{part}", f"{wrong}; no times were written", comm)
            continue
        status = max(status, publish(record, out, record.kind, comm,
                                     lambda: render(other(record))))
    return status


class Bench:
    """The parts.

    Parameters
    ----------
    backend : Backend
        What is measured.
    arguments : Namespace
        ``scale`` ("paper" or "tiny"), ``seed`` and when to stop repeating.
    comm : mpi4py.MPI.Intracomm
        One rank.
    """

    def __init__(self, backend: backends.Backend, arguments, comm) -> None:
        self.backend, self.comm, self.seed = backend, comm, arguments.seed
        self.limits, self.scale = limits_of(arguments), gpucases.SCALES[arguments.scale]
        self.settings = {"scale": arguments.scale, "seed": self.seed, **asdict(self.limits)}
        self.modes = gpucases.modes(backend)
        self.libraries = ["mm3d", "PyTorch"]
        if arguments.graph:
            problem = gpuchecks.graph_problem(backend)    # now rather than after an hour
            if problem:
                raise UsageError(f"--graph: {problem}")
            self.libraries.append("mm3d, graph")

    def seconds(self, step: Step) -> list[float]:
        """Seconds of a call of `step`, several times, after two that do not count."""
        def sample(calls: int) -> float:
            start = self.backend.mark()
            for _ in range(calls):
                step()
            return self.backend.seconds(start, self.backend.mark()) / calls
        sample(1)
        calls = max(1, min(200, round(2e-3 / max(sample(1), 1e-9))))
        return repeated(lambda: sample(calls), self.limits, self.comm)[0]

    def array(self, shape: tuple[int, ...], dtype: Any, name: str) -> Any:
        """Normally distributed numbers, of which all are different."""
        a = self.backend.empty(shape, dtype)
        values = operands.fill(self.backend.empty(shape, "float32"), self.backend, self.seed, name)
        a[...] = self.backend.xp.astype(values, a.dtype, copy=False)
        return a

    def gemm(self) -> Measurements:
        """C = A B as the model computes it, and by one bare call of the library."""
        found, flops, checks = [], [], []
        for mode in self.modes:
            with mode:
                for n in self.scale.gemm:
                    a, b = (self.array((n, n), mode.dtype, name) for name in "AB")
                    c = self.backend.empty((n, n), mode.dtype)
                    results = {"model": backends.matmul(a, b), "alone": self.backend.gemm(a, b, c)}
                    checks += gpuchecks.products(mode, a, b, results, self.seed, self.comm)
                    del results
                    found += [self.seconds(lambda: backends.matmul(a, b)),
                              self.seconds(lambda: self.backend.gemm(a, b, c))]
                    flops += [2.0 * n ** 3] * 2
        return self.record("gpu-gemm", {"mode": [str(mode) for mode in self.modes],
                                        "size": self.scale.gemm, "how": ["model", "alone"]},
                           found, checks, "rate", "s-1", flops)

    def elementwise(self) -> Measurements:
        """Each kernel's bandwidth, counting every array once, beside that of a copy."""
        found, moved, names, checks = [], [], [], []
        rows, cols = self.scale.elementwise
        for mode in self.modes:
            with mode:
                arrays = [self.array((rows, cols), mode.dtype, name) for name in "abc"]
                checks += gpuchecks.kernels(mode, *arrays)
                kernels = gpucases.elementwise(self.backend, *arrays)
                names = list(kernels)
                for count, step in kernels.values():
                    found.append(self.seconds(step))
                    moved.append(float(count * rows * cols * mode.itemsize))
        return self.record("gpu-elementwise", {"mode": [str(mode) for mode in self.modes],
                                               "kernel": names}, found, checks,
                           "bandwidth", "byte s-1", moved)

    def layer(self) -> Measurements:
        """Forward and backward of one layer, by mm3d and by PyTorch, NaN where there is none;
        with ``--graph`` also by mm3d as one launch."""
        found, flops, checks = [], [], []
        batch, seq = self.scale.tokens
        for mode in self.modes:
            with mode:
                checks += gpuchecks.layer(mode)
                for hidden in self.scale.hidden:
                    sizes = Sizes(1, hidden, load().settings.heads.get(hidden, 4), batch, seq)
                    work = float(sum(mm3d.cost.flops(1, hidden, sizes.heads, batch, seq)
                                     .values()))
                    scheme = mm3d.scheme("serial", MPI.COMM_SELF, None, self.backend)
                    step = self.own_layer(scheme, sizes, mode.dtype)
                    checks += gpuchecks.finite(
                        self.backend, f"a layer of hidden {hidden} {mode}", step)
                    own = [self.seconds(step)]
                    if "mm3d, graph" in self.libraries:
                        own.append(self.seconds(scheme.grid.graph(step)))
                    del step
                    gc.collect()
                    theirs = gpucases.torch_layer(self.backend, sizes, mode)
                    other = self.seconds_of_torch(theirs) if theirs else [np.nan]
                    found += [own[0], other, *own[1:]]
                    flops += [work] * len(self.libraries)
        return self.record("gpu-layer", {"mode": [str(mode) for mode in self.modes],
                                         "hidden": self.scale.hidden,
                                         "library": self.libraries}, found, checks, "rate",
                           "s-1", flops)

    def seconds_of_torch(self, step: Callable[[], float]) -> list[float]:
        """Seconds of PyTorch's steps, which time themselves."""
        step()
        step()
        return repeated(step, self.limits, self.comm)[0]

    def rows(self) -> Measurements:
        """One layer of each row of both tables, as rank 0 has it, nothing travelling."""
        found, names = [], []
        mode = self.modes[0]
        with mode:
            checks = gpuchecks.layer(mode)
        for row in load().rows:
            sizes = case(row, self.scale.preset, layers=1).sizes
            scheme = mm3d.scheme(row.scheme, Absent(row.gpus), None, self.backend)
            # What would have travelled has no defined contents.
            with mode, np.errstate(all="ignore"):
                found.append(self.seconds(self.own_layer(scheme, sizes, mode.dtype)))
            names.append(f"{row.table} {row.scheme} {row.gpus}")
            gc.collect()
        return self.record("gpu-rows", {"row": names}, found, checks)

    def own_layer(self, scheme: mm3d.Scheme, sizes: Sizes, dtype: str) -> Step:
        """Forward and backward of one layer on this rank's blocks."""
        model = mm3d.Transformer(scheme, sizes.layers, sizes.hidden, sizes.heads, sizes.batch,
                                 sizes.seq, self.seed, dtype)
        x, dy = model.random("input"), model.random("output gradient")

        def step() -> tuple[Any, Any]:
            y, saved = model.forward(x)
            return y, model.backward(dy, saved)
        return step

    def record(self, kind: str, scales: dict, found: list[list[float]], checks: list[Check],
               name: str = "", units: str = "", work: list[float] | None = None) -> Measurements:
        """The record of samples along `scales`, and of `work` over their medians."""
        shape, dims = tuple(len(labels) for labels in scales.values()), tuple(scales)
        samples = padded(found, shape)
        bounds = np.array([median_interval(one) if np.isfinite(one).all() else [np.nan] * 4
                           for one in found]).reshape(*shape, 4)
        variables = {"samples": Variable(samples, "s", (*dims, "repetition")),
                     "seconds": Variable(bounds, "s", (*dims, "bound"))}
        if work:
            variables[name] = Variable(np.reshape(work, shape) / bounds[..., 0], units, dims)
        return Measurements(
            kind, self.settings, measured_environment(self.backend.name, self.comm)
            | gpucases.describe(self.backend),
            {**scales, "repetition": range(samples.shape[-1]), "bound": BOUNDS}, variables,
            checks)
