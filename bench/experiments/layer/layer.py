"""Measure one Transformer layer, forward and backward, beside one process' PyTorch.

In every repetition the distributed layer, its linear layers' local matrix products alone, and
PyTorch with all cores are measured one after another, in random order, while the other side
sleeps; ratios are medians over the repetitions.  With overlap the layer is measured a second time
in each, with communication that goes on while ranks multiply.
"""

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.statistics import Interval, median_interval
import mm3d
from bench.agreement import make_on_rank_0
from bench.cases.variants import schemes_with_option
from bench.checks import against_serial
from bench.errors import UsageError, WrongResult
from bench.experiments.layer.torch_process import TorchProcess
from bench.experiments.products import operands
from bench.experiments.products.matmul import SETTLE, makespans
from bench.experiments.products.problem import Replay
from bench.instruments import hidden_time, timing
from bench.instruments.clock import Clock, time_on_all_ranks, wait_patiently
from bench.instruments.peak_memory import Footprint
from bench.instruments.sampling import measured_environment
from bench.instruments.timing import Limits
from bench.records.measurements import Check, Measurements, Variable, grid_settings
from mm3d import ModelSizes, model_spec
from mm3d.model import cost

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
        See `bench.checks.against_serial.build_model`.
    """

    def __init__(self, scheme: mm3d.Scheme, sizes: ModelSizes, seed: int = 0,
                 dtype: str = "float32") -> None:
        self.footprint = Footprint(scheme.grid)
        self.scheme, self.sizes, self.seed, self.dtype = scheme, sizes, seed, dtype
        self.model = against_serial.build_model(scheme, sizes, seed, dtype)
        self.x, self.dy = self.model.random("input"), self.model.random("output gradient")
        self.model.zero_gradients()

    def step(self) -> tuple[Any, Any]:
        """Run forward and backward; return the output and the input's gradient."""
        y, saved = self.model.forward(self.x)
        return y, self.model.backward(self.dy, saved)

    def check_step(self, results: tuple[Any, Any], reference: TorchProcess | None) -> list[Check]:
        """Compare a step's results and the parameters' gradients with PyTorch or serial."""
        expected = reference and (lambda: dict(reference.results))
        return against_serial.compare(self.model, *results, self.sizes, self.seed, self.dtype,
                                      expected)


@dataclass(frozen=True)
class Times:
    """Times of a layer, its local products, and PyTorch.

    Attributes
    ----------
    times : ndarray
        Seconds, (repetitions, kinds, ranks, begin and end); NaN for kinds that were not measured.
    kinds : list of int
        Numbers of the `KINDS` that were measured.
    hidden : float
        The share of communication that overlap hides; NaN without overlap.
    ended_by : str
        The limit that was reached.
    checks : list of Check
        Checks of the results of the last repetition.
    """

    times: np.ndarray
    kinds: list[int]
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
        Measure it also with communication that goes on while ranks multiply, in so many panels of
        rows; 0 for without.
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
    reference = start_torch(subject, torch)
    try:
        checks = subject.check_step(results, reference)
        reject(checks, torch)
        del results
        kinds = [0, 1, *[2] * bool(torch), *[3] * bool(overlap)]
        found = time_layer(subject, kinds, overlap, limits, reference)
        reject(found.checks, torch, "after the last repetition, ")
        about = reference.about if reference else "none"
    finally:
        if reference:
            reference.close()
    environs = measured_environment(scheme.grid.backend.name, comm)
    if memory is None:
        return None
    settings = {"scheme": scheme.name, "dtype": subject.dtype,
                **subject.sizes, "seed": subject.seed,
                "reference": about, "ended_by": found.ended_by,
                **({"overlap": overlap} if overlap else {}), **grid_settings(scheme.grid.shape),
                "transport": operands.transport_names(scheme.grid), **asdict(limits)}
    return layer_record(subject, found, np.array(memory).T, settings, environs, checks)


def reject(checks: list[Check], torch: str | None, when: str = "") -> None:
    """Raise WrongResult, on all ranks, when one of the `checks` did not pass."""
    problem = against_serial.failure_message(checks, "PyTorch" if torch else "the serial scheme")
    if problem:
        raise WrongResult(f"{when}{problem}")


def start_torch(subject: MeasuredLayer, torch: str | None) -> TorchProcess | None:
    """Start PyTorch's process on rank 0; UsageError on all ranks when it does not start."""
    def start() -> TorchProcess | None:
        return TorchProcess(torch, subject.sizes, subject.seed, subject.dtype) if torch else None

    return make_on_rank_0(start, subject.scheme.grid.comm, caught=UsageError, wait=wait_patiently)


class Sampler:
    """Take samples of a layer, its local products, and PyTorch.

    Parameters
    ----------
    subject : MeasuredLayer
        The layer.
    overlap : int
        Panels of the layer with overlap.
    reference : TorchProcess or None
        PyTorch's process, on rank 0.

    Attributes
    ----------
    last : tuple or None
        This rank's output and input gradient of the last step of the layer.
    """

    def __init__(self, subject: MeasuredLayer, overlap: int,
                 reference: TorchProcess | None) -> None:
        self.subject, self.overlap = subject, overlap
        self.reference, self.last = reference, None
        self.grid = subject.scheme.grid
        self.clock = Clock(self.grid.comm)
        self.replay = Replay(subject.step, self.grid, subject.dtype)
        self.replay.result = None

    def sample(self, kind: int) -> np.ndarray:
        """Measure one of `KINDS`: seconds, (ranks, begin and end), NaN without a part."""
        comm, synchronize = self.grid.comm, self.grid.backend.synchronize
        wait_patiently(comm)
        if kind == 2:
            times = np.full((comm.size, 2), np.nan)
            if self.reference:
                times[0] = 0, self.reference.step()
                time.sleep(SETTLE)
            wait_patiently(comm)
            return times
        if kind == 1:
            return time_on_all_ranks(self.replay, comm, synchronize, self.clock)[0]
        self.last = None
        self.subject.model.zero_gradients()
        hidden_time.set_overlap(self.subject.model, self.overlap * (kind == 3))
        times, self.last = time_on_all_ranks(self.subject.step, comm, synchronize, self.clock)
        return times


def time_layer(subject: MeasuredLayer, kinds: list[int], overlap: int, limits: Limits,
               reference: TorchProcess | None) -> Times:
    """Measure all `kinds` until the limits are reached, and check the last results."""
    grid, order = subject.scheme.grid, np.random.default_rng(subject.seed)
    sampler = Sampler(subject, overlap, reference)
    kept: list[np.ndarray] = []

    def intervals() -> list[Interval]:
        seconds = makespans(np.array(kept)[:, kinds])
        return [median_interval(seconds[:, k] / seconds[:, 0]) for k in range(1, len(kinds))]

    repetitions = timing.Repetitions(limits, grid.comm, intervals, warmup=1)
    for counts in repetitions:
        times = np.full((len(KINDS), grid.comm.size, 2), np.nan)
        for kind in order.permutation(kinds):
            times[kind] = sampler.sample(kind)
        if counts:
            kept.append(times)
    checks = subject.check_step(sampler.last, reference)
    sampler.last = None
    hidden = np.nan
    if 3 in kinds:
        hidden_time.set_overlap(subject.model, overlap)
        hidden = hidden_time.hidden_share(grid, subject.step, 3)
    return Times(np.array(kept), kinds, hidden, repetitions.ended_by, checks)


def layer_record(subject: MeasuredLayer, found: Times, memory: np.ndarray, settings: dict,
                 environs: dict, checks: list[Check]) -> Measurements:
    """Make the record of the repetitions."""
    described, times = model_spec(subject.sizes), found.times
    expected = cost.peak_words(settings["scheme"], subject.scheme.grid.shape, described)
    variables = {
        "times": Variable(times, "s", ("repetition", "kind", "rank", "edge")),
        "hidden": Variable(np.array(found.hidden), "1", ()),
        "memory": Variable(memory, "byte", ("account", "rank")),
        "expected_memory": Variable(
            np.array(expected * np.dtype(settings["dtype"]).itemsize), "byte", ())}
    scales = {"repetition": range(len(times)), "kind": KINDS, "rank": range(times.shape[2]),
              "edge": ("begin", "end"), "account": Footprint.accounts}
    return Measurements("layer", settings, environs, scales, variables, checks + found.checks)
