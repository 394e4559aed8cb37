"""Measure one Transformer layer, forward and backward, beside one process' PyTorch.

In every repetition the distributed layer, its linear layers' local matrix products alone, and
PyTorch with all cores are measured one after another, in random order, while the other side
sleeps; ratios are medians over the repetitions.  With overlap the layer is measured a second time
in each, with communication that goes on while ranks multiply.
"""

from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import mm3d
from bench.cases.variants import schemes_with_option
from bench.checks import against_serial
from bench.errors import UsageError, reject
from bench.experiments.products import operands
from bench.experiments.products.problem import Replay
from bench.experiments.torch.child import TorchProcesses
from bench.experiments.torch.equal_kernels import add_kernels, compare_kernels, observe_products
from bench.instruments import hidden_time
from bench.instruments.clock import Clock
from bench.instruments.peak_memory import Footprint
from bench.instruments.sampling import (Sample, compare_in_turns, measured_environment,
                                        time_side)
from bench.instruments.timing import Limits
from bench.records.measurements import Check, Measurements, Variable, grid_settings
from mm3d import ModelSizes
from mm3d.tracing import dry_run

KINDS = ("layer", "local products", "PyTorch", "layer with overlap")
LIMITS = Limits(7, 30, 60.0)    # by default


def check_overlap(scheme: str) -> None:
    """Raise UsageError for a scheme whose products cannot overlap."""
    able = schemes_with_option("overlap")
    if scheme not in able:
        raise UsageError(f"--overlap --scheme {scheme}: only products of {', '.join(able)} can "
                         f"overlap")


class MeasuredLayer:
    """A layer to measure, with its input and its output's gradient.

    Parameters
    ----------
    scheme : Scheme
        The parallelism, on its grid.
    sizes, seed, dtype
        As for `mm3d.Transformer`.
    """

    def __init__(self, scheme: mm3d.Scheme, sizes: ModelSizes, seed: int = 0,
                 dtype: str = "float32") -> None:
        self.footprint = Footprint(scheme.grid)
        self.scheme, self.sizes, self.seed, self.dtype = scheme, sizes, seed, dtype
        self.model = mm3d.Transformer(scheme, **sizes, seed=seed, dtype=dtype)
        self.x, self.dy = self.model.random("input"), self.model.random("output gradient")
        self.model.zero_gradients()

    def step(self) -> tuple[Any, Any]:
        """Run forward and backward; return the output and the input's gradient."""
        y, saved = self.model.forward(self.x)
        return y, self.model.backward(self.dy, saved)

    def check_step(self, results: tuple[Any, Any],
                   reference: TorchProcesses | None) -> list[Check]:
        """Compare a step's results and the parameters' gradients with PyTorch or serial."""
        expected = reference and (lambda: reference.ask("check"))
        return against_serial.compare(self.model, *results, self.dtype, expected)


@dataclass(frozen=True)
class Times:
    """Times of a layer, its local products, and PyTorch.

    Attributes
    ----------
    times : ndarray
        Seconds, (repetitions, kinds, ranks, begin and end); NaN for kinds that were not measured.
    hidden : float
        The share of communication that overlap hides; NaN without overlap.
    ended_by : str
        The limit that was reached.
    checks : list of Check
        Checks of the results of the last repetition.
    """

    times: np.ndarray
    hidden: float
    ended_by: str
    checks: list[Check]


def measure_layer(subject: MeasuredLayer, torch: str | None = None, overlap: int = 0,
                  limits: Limits = LIMITS) -> Measurements | None:
    """Measure one layer beside one process' PyTorch, or alone.

    The results are verified before the first repetition, and those of the last one again.

    Parameters
    ----------
    subject : MeasuredLayer
        The layer; every rank of its grid calls this.
    torch : str, optional
        An interpreter that has PyTorch: the layer is verified with it and measured beside it.
        Without one the layer is verified with the serial scheme and measured alone.
    overlap : int
        Measure the layer also with communication that overlaps with products, in this many panels
        of rows; 0 for no overlap.
    limits : Limits
        When to stop repeating.

    Returns
    -------
    Measurements or None
        A record of kind "layer", by repetition, kind and rank: seconds, ratios, operations,
        memory and its closed form; on rank 0, None on the others.

    Raises
    ------
    UsageError
        On all ranks, when the scheme's products cannot overlap, or the interpreter cannot
        compute the layer.
    WrongResult
        On all ranks, when a result or a gradient is wrong.
    """
    comm, scheme = subject.scheme.grid.comm, subject.scheme
    if overlap:
        check_overlap(scheme.name)
    results = subject.step()
    memory = comm.gather(subject.footprint.peaks())
    kernels = None
    with closing(start_torch(subject, torch)) if torch else nullcontext() as reference:
        checks = subject.check_step(results, reference)
        reject(failure_message(checks, torch))
        del results
        if reference:
            kernels = compare_kernels(observe_products(subject.step, scheme.grid), subject.dtype,
                                      scheme.grid.backend, reference, subject.seed)
        found = time_layer(subject, overlap, limits, reference)
        reject(failure_message(found.checks, torch), "after the last repetition, ")
    environs = measured_environment(scheme.grid.backend.name, comm)
    if memory is None:
        return None
    settings = {"scheme": scheme.name, "dtype": subject.dtype,
                **subject.sizes, "seed": subject.seed,
                "reference": reference.about if reference else "none", "ended_by": found.ended_by,
                **({"overlap": overlap} if overlap else {}), **grid_settings(scheme.grid.shape),
                "transport": operands.transport_names(scheme.grid), **asdict(limits)}
    record = layer_record(subject, found, np.array(memory).T, settings, environs, checks)
    return add_kernels(record, kernels, record.variables["flops"].values)


def failure_message(checks: list[Check], torch: str | None) -> str | None:
    """Describe failed checks as `against_serial.failure_message`, naming the reference."""
    return against_serial.failure_message(checks, "PyTorch" if torch else "the serial scheme")


def start_torch(subject: MeasuredLayer, python: str) -> TorchProcesses:
    """Start PyTorch's process beside rank 0; UsageError on all ranks when it does not start."""
    case, comm = {"heads": subject.sizes.heads, "dtype": subject.dtype}, subject.scheme.grid.comm
    arrays = None if comm.rank else global_arrays(subject.sizes, subject.seed, subject.dtype)
    return TorchProcesses(python, "Layer", case, arrays, comm, "do the layer")


def global_arrays(sizes: ModelSizes, seed: int, dtype: str) -> dict[str, np.ndarray]:
    """Draw the input, the output's gradient and the parameters of the layer as global arrays."""
    model = mm3d.Transformer(
        mm3d.scheme("serial", MPI.COMM_SELF, backend="numpy"), **sizes, seed=seed, dtype=dtype)
    arrays = {p.name: p.value.reshape(p.public_shape) for p in model.parameters}
    return arrays | {name: model.random(name) for name in ("input", "output gradient")}


def time_layer(subject: MeasuredLayer, overlap: int, limits: Limits,
               reference: TorchProcesses | None) -> Times:
    """Measure `KINDS` until the limits are reached, and check the last results."""
    grid, last = subject.scheme.grid, []
    clock, replay = Clock(grid.comm), Replay(subject.step, grid, subject.dtype)
    replay.result = None

    def products() -> Sample:
        return time_side(replay, grid.comm, grid.backend.synchronize, clock)

    def layer(panels: int) -> Sample:
        last.clear()
        subject.model.zero_gradients()
        hidden_time.set_overlap(subject.model, panels)
        found = time_side(subject.step, grid.comm, grid.backend.synchronize, clock)
        last.append(found.result)
        return Sample(found.times)

    sides = {0: partial(layer, 0), 1: products, **({2: reference.sample} if reference else {}),
             **({3: partial(layer, overlap)} if overlap else {})}
    found, ended_by = compare_in_turns(sides, limits, subject.seed, grid.comm)
    checks = subject.check_step(last.pop(), reference)
    hidden = np.nan
    if overlap:
        hidden_time.set_overlap(subject.model, overlap)
        hidden = hidden_time.hidden_share(grid, subject.step, 3)
    times = np.full((len(found[0]), len(KINDS), grid.comm.size, 2), np.nan)
    for kind, samples in found.items():
        times[:, kind] = [one.times for one in samples]
    return Times(times, hidden, ended_by, checks)


def layer_record(subject: MeasuredLayer, found: Times, memory: np.ndarray, settings: dict,
                 environs: dict, checks: list[Check]) -> Measurements:
    """Make the record of the repetitions."""
    times = found.times
    expected = dry_run.trace_step(
        settings["scheme"], subject.scheme.grid.size, subject.scheme.grid.shape.sizes,
        block=subject.scheme.grid.backend.block, dtype=settings["dtype"],
        **subject.sizes).pool_peak
    variables = {
        "times": Variable(times, "s", ("repetition", "kind", "rank", "edge")),
        "hidden": Variable(np.array(found.hidden), "1", ()),
        "memory": Variable(memory, "byte", ("account", "rank")),
        "expected_memory": Variable(np.array(float(expected)), "byte", ())}
    scales = {"repetition": range(len(times)), "kind": KINDS, "rank": range(times.shape[2]),
              "edge": ("begin", "end"), "account": Footprint.accounts}
    return Measurements("layer", settings, environs, scales, variables, checks + found.checks)
