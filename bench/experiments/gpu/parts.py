"""Measure one device: its products, kernels, a layer, a step, and a rank's part of each row.

Each of these five parts is a record of its own: products beside bare calls of the library,
elementwise kernels beside a copy, one Transformer layer beside PyTorch's, a whole step of training
a GPT beside PyTorch's, and one layer of every row of both tables with the blocks of rank 0,
without communication.  All are compared with NumPy first, layers at a small size, and at the size
that is timed with PyTorch's.  Seconds are measured
by the device, between two marks in its stream; they include its waits for the host, which take
longer than a small product.
"""

import gc
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Callable, Sequence

import numpy as np
from mpi4py import MPI

import mm3d
from bench.cases.case import make_case
from bench.cases.paper import load_tables
from bench.cases.variants import itemsize
from bench.errors import UsageError
from bench.experiments.gpu import device_checks, gpu_cases
from bench.experiments.gpu.gpt_steps import GptStep, TorchGptStep
from bench.experiments.gpu.gpu_cases import LayerStep, TorchLayerStep
from bench.instruments.sampling import (measured_environment, pad_samples, take_samples,
                                        take_samples_in_turns)
from bench.instruments.timing import Limits
from bench.records.kinds import medians
from bench.records.measurements import Check, Measurements, Variable
from mm3d.arrays import backend as backends
from mm3d.arrays.backend import Backend
from mm3d.arrays.products import matmul
from mm3d.config import Model
from mm3d.model.architecture import PLAIN
from mm3d.transport.communicators import DryCommunicator

PartCall = Callable[[], object]
STEP_MODES = "float32", "bfloat16"    # of a whole step


@dataclass(frozen=True)
class TrainedGPT:
    """The GPT of the part ``step``.

    Attributes
    ----------
    gpt : dict of str to Any
        Fields of its `mm3d.config.Model`.
    predict : callable, optional
        Predicts, for a model and a dtype, seconds of a step by the kernels that take it, and the
        most bytes of arrays at a time; it is called before any step is taken.
    predicted_by : str
        The machine of these predictions.
    """

    gpt: dict[str, Any]
    predict: Callable[[Model, str], tuple[dict[str, float], int]] | None = None
    predicted_by: str = ""


class GpuBenchmark:
    """The parts that `measure_part` measures on one device.

    Parameters
    ----------
    backend : str or Backend, optional
        The array library that is measured.
    scale : {"paper", "tiny"}
        Full size, or a rehearsal; see `bench.experiments.gpu.gpu_cases.SCALES`.
    graph : bool
        Whether to measure the layer also as a CUDA graph.
    modes : sequence of str, optional
        The modes that are measured; by default all of the backend.
    trained : TrainedGPT, optional
        The GPT of the part ``step``; by default that of the scale, and nothing is predicted.

    Raises
    ------
    ValueError
        When there is no such array library here.
    UsageError
        When the library cannot record a step as a graph, or has no such mode.
    """

    def __init__(self, backend: str | Backend | None = "cupy", scale: str = "paper",
                 graph: bool = False, limits: Limits = Limits(10, 30, 5.0),
                 seed: int = 0, modes: Sequence[str] = (),
                 trained: TrainedGPT | None = None) -> None:
        self.backend, self.seed = backends.get(backend), seed
        self.limits, self.scale = limits, gpu_cases.SCALES[scale]
        self.trained = trained or TrainedGPT(self.scale.gpt)
        self.settings = {"scale": scale, "seed": seed, **asdict(limits)}
        self.modes = gpu_cases.list_modes(self.backend, modes)
        self.libraries = ["mm3d", "PyTorch"]
        if graph:
            problem = device_checks.graph_problem(self.backend)    # now rather than after an hour
            if problem:
                raise UsageError(f"--graph: {problem}")
            self.libraries.append("mm3d, graph")

    def sampler(self, step: PartCall, clock: Any = None) -> Callable[[], float]:
        """Return a function that takes a sample of the seconds of a call of `step`.

        Two calls that do not count come first.  `clock` places marks in the stream of the step's
        library, by default the backend's.
        """
        clock = clock or self.backend

        def sample(calls: int) -> float:
            start = clock.record_mark()
            for _ in range(calls):
                step()
            return clock.seconds_between(start, clock.record_mark()) / calls
        sample(1)
        calls = max(1, min(200, round(2e-3 / max(sample(1), 1e-9))))
        return lambda: sample(calls)

    def sample_seconds(self, step: PartCall) -> list[float]:
        """Take samples of the seconds of a call of `step`."""
        return take_samples(self.sampler(step), self.limits, MPI.COMM_SELF)[0]

    def sample_sides(self, step: PartCall, theirs: Any,
                     more: Sequence[PartCall] = ()) -> list[list[float]]:
        """Take samples of mm3d's step, of PyTorch's and of `more` in turns.

        PyTorch's are NaN where it is None.
        """
        sides = [self.sampler(step), *([self.sampler(theirs, theirs)] if theirs else []),
                 *map(self.sampler, more)]
        taken = take_samples_in_turns(sides, self.limits, self.seed, MPI.COMM_SELF)[0]
        return taken if theirs else [taken[0], [np.nan], *taken[1:]]

    def release_memory(self) -> None:
        """Give idle memory back to the device: pools of mm3d and PyTorch keep what is freed."""
        gc.collect()
        self.backend.release_idle_memory()
        torch = gpu_cases.find_torch(self.backend)
        if torch and torch[1] != "cpu":
            torch[0].cuda.empty_cache()

    def measure_gemm(self) -> Measurements:
        """Measure C = A B as the model computes it, and then by one bare call of the library."""
        found, flops, checks = [], [], []
        for mode in self.modes:
            with mode:
                for n in self.scale.gemm:
                    a, b = (gpu_cases.draw_array(self.backend, (n, n), mode.dtype, self.seed, name)
                            for name in "AB")
                    c = self.backend.empty((n, n), mode.dtype)
                    results = {"model": matmul(a, b), "alone": self.backend.gemm(a, b, c)}
                    checks += device_checks.check_products(mode, a, b, results, self.seed)
                    del results
                    found += [self.sample_seconds(lambda: matmul(a, b)),
                              self.sample_seconds(lambda: self.backend.gemm(a, b, c))]
                    flops += [2.0 * n ** 3] * 2
        scales = {"mode": [str(mode) for mode in self.modes], "size": self.scale.gemm,
                  "how": ["model", "alone"]}
        return self.make_record("gpu-gemm", scales, found, checks, ("rate", "s-1", flops))

    def measure_elementwise(self) -> Measurements:
        """Measure the bandwidth of each kernel and of a copy, counting every array once."""
        found, moved, names, checks = [], [], [], []
        rows, cols = self.scale.elementwise
        for mode in self.modes:
            with mode:
                arrays = [gpu_cases.draw_array(self.backend, (rows, cols), mode.dtype, self.seed,
                                               name) for name in "abc"]
                checks += device_checks.check_kernels(mode, *arrays)
                kernels = gpu_cases.elementwise_calls(self.backend, *arrays)
                names = list(kernels)
                for count, step in kernels.values():
                    found.append(self.sample_seconds(step))
                    moved.append(float(count * rows * cols * itemsize(mode.dtype)))
        scales = {"mode": [str(mode) for mode in self.modes], "kernel": names}
        return self.make_record("gpu-elementwise", scales, found, checks,
                                ("bandwidth", "byte s-1", moved))

    def measure_layer(self) -> Measurements:
        """Measure forward and backward of one layer, by mm3d and by PyTorch, in turns.

        PyTorch's are NaN where it is not installed; with `graph` mm3d's are measured also as one
        launch.  mm3d adds gradients to those of earlier calls, PyTorch begins from none.
        """
        found, flops, checks = [], [], []
        (batch, seq), torch = self.scale.tokens, gpu_cases.find_torch(self.backend)
        for mode in self.modes:
            with mode:
                checks += device_checks.check_layer(mode)
                for hidden in self.scale.hidden:
                    heads = load_tables().settings.heads.get(hidden, 4)
                    sizes = mm3d.ModelSizes(1, hidden, heads, batch, seq)
                    work = float(sum(mm3d.cost.flops(sizes).values()))
                    scheme = mm3d.scheme("serial", MPI.COMM_SELF, None, self.backend)
                    step = LayerStep(scheme, sizes, mode.dtype, self.seed)
                    checks += device_checks.check_finite(
                        self.backend, f"a layer of hidden {hidden} {mode}", step)
                    theirs = None
                    if torch:
                        theirs = TorchLayerStep(*torch, heads, step.operands(), mode)
                        checks += device_checks.check_beside_torch(
                            mode, f"hidden {hidden}", step.check(), theirs.check())
                    more = [scheme.grid.graph(step)] if "mm3d, graph" in self.libraries else []
                    found += self.sample_sides(step, theirs, more)
                    del step, theirs, more
                    self.release_memory()
                    flops += [work] * len(self.libraries)
        scales = {"mode": [str(mode) for mode in self.modes], "hidden": self.scale.hidden,
                  "library": self.libraries}
        return self.make_record("gpu-layer", scales, found, checks, ("rate", "s-1", flops))

    def measure_step(self) -> Measurements:
        """Measure a whole step of training a GPT, by mm3d and by PyTorch, in turns.

        PyTorch's seconds are NaN where it is not installed, or the layers are not those of 2019.
        The bytes are the most that mm3d's arrays have at a time.
        """
        found, checks, peaks, sizes = [], [], [], self.trained.gpt
        model = Model(**sizes)
        plain = model.architecture == PLAIN
        torch = gpu_cases.find_torch(self.backend) if plain else None
        modes = [mode for mode in self.modes if str(mode) in STEP_MODES]
        predict = self.trained.predict
        foretold = [predict(model, str(mode)) for mode in modes] if predict else []
        for mode in modes:
            with mode:
                checks += device_checks.check_layer(
                    mode, partial(device_checks.run_gpt_step, like=model), "a GPT")
                step, theirs = GptStep(mode, sizes, self.seed), None
                if torch:
                    theirs = TorchGptStep(*torch, step, mode)
                    checks += device_checks.check_beside_torch(
                        mode, "a GPT", step.check(), theirs.check(), sizes["layers"])
                    checks += device_checks.check_losses(mode, step, theirs)
                found += self.sample_sides(step, theirs)
                checks += device_checks.check_loss(mode, step)
                peaks.append(step.peak())
                del step, theirs
                self.release_memory()
        scales = {"mode": [str(mode) for mode in modes], "library": ["mm3d", "PyTorch"]}
        record = self.make_record("gpu-step", scales, found, checks, (
            "token_rate", "s-1", [float(model.batch * model.seq)] * len(found)))
        raw = record.raw | {"peak": Variable(np.array(peaks, float), "byte", ("mode",))}
        if foretold:
            scales["kernels"] = [*foretold[0][0]]
            seconds = np.array([[*seconds.values()] for seconds, _ in foretold])
            raw |= {"predicted": Variable(seconds, "s", ("mode", "kernels")),
                    "predicted_peak": Variable(np.array([float(peak) for _, peak in foretold]),
                                               "byte", ("mode",))}
        sized = {name: value for name, value in model.settings().items()
                 if name not in ("dtype", "seed")} | {"predicted_by": self.trained.predicted_by}
        return replace(record, scales=record.scales | scales, raw=raw,
                       configuration=record.configuration | sized)

    def measure_rows(self) -> Measurements:
        """Measure a layer of each row of both tables on rank 0's blocks, without communication."""
        found, names = [], []
        mode = self.modes[0]
        with mode:
            checks = device_checks.check_layer(mode)
        for row in load_tables().rows:
            sizes = make_case(row, self.scale.preset, layers=1).sizes
            scheme = mm3d.scheme(row.scheme, DryCommunicator(row.gpus), None, self.backend)
            # Blocks that would have been received have no defined contents.
            with mode, np.errstate(all="ignore"):
                found.append(self.sample_seconds(
                    LayerStep(scheme, sizes, mode.dtype, self.seed)))
            names.append(f"{row.table} {row.scheme} {row.gpus}")
            self.release_memory()
        return self.make_record("gpu-rows", {"row": names}, found, checks)

    def make_record(self, kind: str, scales: dict, found: list[list[float]],
                    checks: list[Check], rate: tuple[str, str, list[float]] | None = None
                    ) -> Measurements:
        """Make the record of samples along `scales`, and of a rate over their medians.

        The rate has its name, its units, and the work of each point in these times seconds.
        """
        shape, dims = tuple(len(labels) for labels in scales.values()), tuple(scales)
        samples = pad_samples(found, shape)
        variables = {"samples": Variable(samples, "s", (*dims, "repetition"))}
        if rate:
            name, units, work = rate
            variables[name] = Variable(
                np.reshape(work, shape) / medians(samples)[..., 0], units, dims)
        return Measurements(
            kind, self.settings, measured_environment(self.backend.name, MPI.COMM_SELF)
            | self.backend.describe_device() | {
                "peak_device_bytes": self.backend.memory()["peak"]},
            {**scales, "repetition": range(samples.shape[-1])}, variables, checks)


GPU_PARTS: dict[str, Callable[[GpuBenchmark], Measurements]] = {
    "gemm": GpuBenchmark.measure_gemm, "elementwise": GpuBenchmark.measure_elementwise,
    "layer": GpuBenchmark.measure_layer, "step": GpuBenchmark.measure_step,
    "rows": GpuBenchmark.measure_rows}


def measure_part(benchmark: GpuBenchmark, part: str) -> Measurements:
    """Verify and measure one of `GPU_PARTS`; return a record of kind "gpu-" plus its name.

    Raises
    ------
    WrongResult
        When a result is wrong.
    """
    benchmark.release_memory()
    return GPU_PARTS[part](benchmark)
