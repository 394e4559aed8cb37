"""Measure a layer of experts by parts, beside PyTorch on one process.

In every repetition the layer is measured with each routing of the tokens, and beside it its first
product alone, grouped by experts and as one product of the same rows, and PyTorch's ways, all in
random order.  Ratios are medians of ratios of the same repetition.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable

import numpy as np

from bench.agreement import make_on_rank_0
from bench.checks import against_serial
from bench.errors import UsageError, WrongResult
from bench.experiments.experts import torch_experts
from bench.experiments.experts.parts import PARTS, PartClock
from bench.experiments.experts.problem import ROUTINGS, Subject, routing_settings
from bench.experiments.experts.verification import Verified, verify_step
from bench.experiments.layer.torch_process import TorchScript
from bench.experiments.products import operands
from bench.experiments.products.matmul import SETTLE
from bench.instruments import timing
from bench.instruments.clock import Clock, time_on_all_ranks, wait_patiently
from bench.instruments.sampling import measured_environment
from bench.instruments.timing import Limits
from bench.records.measurements import Check, Measurements, Variable, grid_settings
from bench.statistics import Interval, median_interval
from mm3d.arrays.grouped_products import grouped_matmul
from mm3d.tracing.events import PHASES

KINDS = ("layer", "grouped products", "one product", "PyTorch loop", "PyTorch padded")


def measure_experts(subject: Subject, torch: str | None, limits: Limits) -> Measurements | None:
    """Measure a layer of experts with every routing.

    Results, and the words moved, are verified before the first repetition.

    Parameters
    ----------
    subject : Subject
        The layer; every rank of its mesh calls this.
    torch : str, optional
        An interpreter that has PyTorch, which is verified and measured too.
    limits : Limits
        When to stop repeating.

    Returns
    -------
    Measurements or None
        A record of kind "experts" on rank 0, None on the others.

    Raises
    ------
    WrongResult
        On all ranks, when a result is wrong.
    """
    comm, case = subject.mesh.comm, subject.case
    reference = _start_torch(subject, torch)
    try:
        verified = []
        for routing in ROUTINGS:
            subject.set_routing(routing)
            verified.append(verify_step(subject, routing, reference.results if reference else {}))
        checks = [check for one in verified for check in one.checks]
        problem = against_serial.failure_message(checks, "a plain computation in float64")
        if problem:
            raise WrongResult(problem)
        sampler = Sampler(subject, reference)
        times, parts, ended_by = sampler.sample_all(limits, bool(torch))
    finally:
        if reference:
            reference.close()
    environs = measured_environment(subject.grid.backend.name, comm)
    if comm.rank:
        return None
    chosen = asdict(case.experts)
    settings = {
        **{name: value for name, value in chosen.items() if value is not None},
        "hidden": case.hidden, "wide": case.wide, "batch": case.batch, "seq": case.seq,
        "dtype": case.dtype, "seed": case.seed, "way": case.way,
        "scheme": subject.mesh.scheme.name,
        **grid_settings(subject.grid.shape), "replicas": subject.mesh.shape["d"],
        "expert_parallel": subject.expert_parallel,
        "transport": operands.transport_names(subject.grid),
        "reference": reference.about if reference else "a plain computation in NumPy",
        "ended_by": ended_by, **asdict(limits)}
    return experts_record(settings, environs, verified, checks, times, parts)


def _start_torch(subject: Subject, torch: str | None) -> TorchScript | None:
    """Start PyTorch's process on rank 0; UsageError on all ranks when it does not start."""
    case = subject.case

    def start() -> TorchScript | None:
        if not torch:
            return None
        options = case.experts
        if options.jitter:
            raise UsageError(f"jitter={options.jitter:g}: PyTorch draws other factors; 0 would "
                             f"do with --torch")
        arrays: dict[str, Any] = {**case.activations(), **case.parameters()}
        arrays |= {f"router.weight {name}": case.router_weight(name) for name in ROUTINGS}
        arrays |= {"routings": ROUTINGS, **routing_settings(options, case.tokens)}
        return TorchScript(torch, Path(torch_experts.__file__),
                           {name: np.asarray(a) for name, a in arrays.items()},
                           "layer of experts")
    return make_on_rank_0(start, subject.mesh.comm, caught=UsageError, wait=wait_patiently)


@dataclass(frozen=True)
class Products:
    """Rows and weights of a rank's first products.

    Attributes
    ----------
    rows, weights : Array
        (rows, n) and (experts, n, k).
    segments : sequence of Segment
        The rows of each expert.
    """

    rows: Any
    weights: Any
    segments: Any

    def grouped(self) -> Any:
        """Multiply the rows of each expert by its weight."""
        return grouped_matmul(self.rows, self.weights, self.segments)

    def single(self, library: Any) -> Any:
        """Multiply all rows by one weight."""
        out = library.empty((self.rows.shape[0], self.weights.shape[2]), self.rows.dtype)
        return library.gemm(self.rows, self.weights[0, :, :], out)


class Sampler:
    """Take samples of a layer, its products, and PyTorch.

    Parameters
    ----------
    subject : Subject
        The layer.
    reference : TorchScript or None
        PyTorch's process, on rank 0.
    """

    def __init__(self, subject: Subject, reference: TorchScript | None) -> None:
        self.subject, self.reference, self.comm = subject, reference, subject.mesh.comm
        self.library = subject.grid.backend
        self.parts = PartClock(subject.layer, self.library.synchronize)
        self.clock = Clock(self.comm)
        self.products = [self._products(routing) for routing in ROUTINGS]

    def _products(self, routing: str) -> Products:
        """Make operands like those of the first product with this routing."""
        subject = self.subject
        subject.set_routing(routing)
        with subject.layer.routings.recording() as routings:
            subject.forward()
        segments = routings[0].plan.rows.outer_segments
        weights = subject.layer.up.weight.value
        count = max((one.stop for one in segments), default=0)
        rows = self.library.empty((count, weights.shape[1]), weights.dtype)
        rows[...] = 0.5
        return Products(rows, weights, segments)

    def sample(self, routing: int, kind: int) -> tuple[float, np.ndarray | None]:
        """Measure one of `KINDS` with one of `ROUTINGS`.

        Returns
        -------
        seconds, parts : float, ndarray or None
            The makespan; and of the layer the seconds (phases, parts, ranks) on rank 0.
        """
        wait_patiently(self.comm)
        if KINDS[kind].startswith("PyTorch"):
            seconds = 0.0
            if self.reference:
                seconds = self.reference.step(f"{KINDS[kind].split()[1]} {ROUTINGS[routing]}")
                time.sleep(SETTLE)
            wait_patiently(self.comm)
            return seconds, None
        if kind:
            of_routing = self.products[routing]
            step = of_routing.grouped if kind == 1 else lambda: of_routing.single(self.library)
            return self._makespan(step)[0], None
        self.subject.set_routing(ROUTINGS[routing])
        self.subject.zero_gradients()
        seconds, found = self._makespan(self._step)
        everyone = self.comm.gather(found)
        return seconds, None if everyone is None else np.moveaxis(np.array(everyone), 0, -1)

    def _step(self) -> list[list[float]]:
        """Run forward and backward; return the seconds (phases, parts)."""
        forward, (_, saved) = self.parts.measure("forward", self.subject.forward)
        backward, _ = self.parts.measure("backward", lambda: self.subject.backward(saved))
        return [forward, backward]

    def _makespan(self, step: Callable[[], Any]) -> tuple[float, Any]:
        """Return the seconds until the last rank has done it, and this rank's result."""
        times, result = time_on_all_ranks(step, self.comm, self.library.synchronize, self.clock)
        return float(times[:, 1].max()), result

    def sample_all(self, limits: Limits,
                   torch: bool) -> tuple[np.ndarray, np.ndarray, str]:
        """Take samples until the limits are reached.

        Returns
        -------
        times, parts, ended_by : ndarray, ndarray, str
            Makespans (routings, kinds, repetitions), NaN for PyTorch where it is not measured;
            the layer's parts (routings, phases, parts, ranks, repetitions) on rank 0; and the
            limit.
        """
        kinds = [n for n, kind in enumerate(KINDS) if torch or not kind.startswith("PyTorch")]
        points = [(r, k) for r in range(len(ROUTINGS)) for k in kinds]
        order = np.random.default_rng(self.subject.case.seed)
        kept: list[np.ndarray] = []
        parts: list[list] = []

        def intervals() -> list[Interval]:
            return [median_interval(layer) for layer in np.array(kept)[:, :, 0].T]

        repetitions = timing.Repetitions(limits, self.comm, intervals, warmup=1)
        for counts in repetitions:
            times = np.full((len(ROUTINGS), len(KINDS)), np.nan)
            found: list = [None] * len(ROUTINGS)
            for n in order.permutation(len(points)):
                routing, kind = points[n]
                times[routing, kind], of_layer = self.sample(routing, kind)
                found[routing] = of_layer if kind == 0 else found[routing]
            if counts:
                kept.append(times)
                parts.append(found)
        every = np.moveaxis(np.array(parts), 0, -1) if self.comm.rank == 0 else np.empty(0)
        return np.moveaxis(np.array(kept), 0, -1), every, repetitions.ended_by


def experts_record(settings: dict, environs: dict, verified: list[Verified],
                   checks: list[Check], times: np.ndarray, parts: np.ndarray) -> Measurements:
    """Make the record of all samples and of the routing."""
    tokens, dropped, words, expected, inside, gathered = (
        np.array([getattr(one, name) for one in verified])
        for name in ("tokens", "dropped", "words", "expected_words", "inside_words", "gathered"))
    variables = {
        "samples": Variable(times, "s", ("routing", "kind", "repetition")),
        "part_samples": Variable(parts, "s", ("routing", "phase", "part", "rank", "repetition")),
        "tokens": Variable(tokens, "1", ("routing", "choice", "expert")),
        "dropped": Variable(dropped, "1", ("routing", "expert")),
        "balance_loss": Variable(np.array([one.balance_loss for one in verified]), "1",
                                 ("routing",)),
        "words": Variable(words, "1", ("routing", "rank")),
        "expected_words": Variable(expected, "1", ("routing", "rank")),
        "inside_words": Variable(inside, "1", ("routing", "rank")),
        "gathered": Variable(gathered.astype(np.int8), "1", ("routing",))}
    scales = {"routing": ROUTINGS, "kind": KINDS, "repetition": range(times.shape[-1]),
              "phase": PHASES, "part": PARTS, "rank": range(words.shape[1]),
              "choice": range(tokens.shape[1]), "expert": range(tokens.shape[2])}
    return Measurements("experts", settings, environs, scales, variables, checks)
