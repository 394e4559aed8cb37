"""Measure a layer of experts by parts, beside PyTorch on one process.

Every repetition measures, with each routing of the tokens, the layer; its first product alone,
grouped by experts and as one product of the same rows; and PyTorch's ways, all in random order.
Ratios are medians of ratios within repetitions.
"""

import time
from contextlib import closing, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Callable, Sequence

import numpy as np

from bench.checks.passed import require_passed
from bench.experiments.experts.problem import ROUTINGS, ExpertsSubject, routing_settings
from bench.experiments.experts.verification import verify_experts
from bench.experiments.products.operands import count_products
from bench.experiments.torch.child import TorchProcesses
from bench.experiments.torch.equal_kernels import add_kernels, compare_kernels
from bench.experiments.torch.serve import TimedProduct
from bench.instruments.clock import Clock
from bench.instruments.sampling import Sample, compare_in_turns, measured_environment, time_side
from bench.instruments.timing import Limits
from bench.records.kinds.experts import EXPERT_KINDS
from bench.records.model_run import make_record, transport_names
from bench.records.measurements import Measurements, grid_settings
from mm3d.arrays.grouped_products import grouped_matmul
from mm3d.launcher import wait_patiently
from mm3d.model.experts.layer import ExpertsLayer

PARTS = ("router", "dispatch", "experts", "combine")
# The parts of a phase in their order, each with the mark that ends it; the last ends the phase.
ORDER = {"forward": (("router", "routed"), ("dispatch", "arrived"), ("experts", "leaving"),
                     ("combine", "")),
         "backward": (("combine", "arrived"), ("experts", "leaving"), ("dispatch", "routing"),
                      ("router", ""))}


def measure_experts(subject: ExpertsSubject, torch: str | None,
                    limits: Limits) -> Measurements | None:
    """Measure a layer of experts with every routing.

    Results, and the words moved, are verified before the first repetition.

    Parameters
    ----------
    subject : ExpertsSubject
        The layer; every rank of its mesh calls this.
    torch : str, optional
        An interpreter that has PyTorch, which is verified and measured too.

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
    kernels, ways, left_out = None, [], {}
    with closing(start_torch(subject, torch)) if torch else nullcontext() as reference:
        if reference:
            left_out = comm.bcast(reference.ask("ways"))
            ways = [way for way, problem in left_out.items() if not problem]
        checks, routed = [], []
        for routing in ROUTINGS:
            subject.set_routing(routing)
            theirs = {way: reference.ask("check", way, routing) for way in ways}
            wait_patiently(comm)
            more, found = verify_experts(subject, routing, theirs)
            checks += more
            routed.append(found)
        require_passed(checks, "differs from a plain computation in float64: ")
        sampler = ExpertsSampler(subject)
        if reference:
            kernels = compare_kernels(sampler.first_products(), case.dtype, subject.grid.backend,
                                      reference, case.seed)
        times, parts, ended_by = sampler.sample_all(limits, reference, ways)
    environs = measured_environment(subject.grid.backend.name, comm)
    if comm.rank:
        return None
    chosen = asdict(case.experts)
    del chosen["design"]    # plain here
    settings = {
        **{name: value for name, value in chosen.items() if value is not None},
        "hidden": case.hidden, "wide": case.wide, "batch": case.batch, "seq": case.seq,
        "dtype": case.dtype, "seed": case.seed,
        "scheme": subject.mesh.scheme.name,
        **grid_settings(subject.grid.shape), "replicas": subject.mesh.shape["d"],
        "expert_parallel": subject.expert_parallel,
        "transport": transport_names(subject.grid),
        "reference": reference.about if reference else "a plain computation in NumPy",
        "left_out": "; ".join(f"PyTorch {way}: {problem}" for way, problem in left_out.items()
                              if problem),
        "ended_by": ended_by, **asdict(limits)}
    record = make_record("experts", settings, environs, {
        "s": {"samples": times, "part_samples": parts},
        "1": {name: [one[name] for one in routed] for name in routed[0]}},
        checks, routing=ROUTINGS, kind=EXPERT_KINDS, part=PARTS)
    return add_kernels(record, kernels, 3 * case.flops)


def start_torch(subject: ExpertsSubject, python: str) -> TorchProcesses:
    """Start PyTorch's process beside rank 0; UsageError on all ranks when it does not start."""
    case, comm = subject.case, subject.mesh.comm
    arrays = None if comm.rank else {
        **case.activations(), **case.parameters(),
        **{f"router.weight {name}": case.router_weight(name) for name in ROUTINGS}}
    return TorchProcesses(
        python, "TorchExpertsLayer",
        {"dtype": case.dtype, "routing": routing_settings(case.experts, case.tokens)},
        arrays, comm, "do the layer of experts")


class PartClock:
    """Time the parts of a layer's steps.

    Router: logits, choice, the gather of all ranks' counts, and the plan of where rows go.
    Dispatch: rows to their experts.  Experts: products, biases and GELU.  Combine: rows back to
    their tokens, and the sums with the gates.  In backward each part computes their gradients.

    Parameters
    ----------
    layer : ExpertsLayer
        The layer; its functions are wrapped for good.
    synchronize : callable
        Waits for the device.
    """

    def __init__(self, layer: ExpertsLayer, synchronize: Callable[[], None]) -> None:
        self.synchronize, self._marks = synchronize, {}
        self._wrap(layer.routings, "add", after="routed")
        self._wrap(layer.dispatch, "send", after="arrived")
        self._wrap(layer.dispatch, "combine", before="leaving")
        self._wrap(layer.dispatch, "combine_backward", after="arrived")
        self._wrap(layer.dispatch, "send_backward", before="leaving", after="routing")

    def _wrap(self, owner: Any, name: str, before: str = "", after: str = "") -> None:
        """Let a function leave a mark when it begins or ends."""
        function = getattr(owner, name)

        def marked(*values: Any) -> Any:
            if before:
                self._mark(before)
            result = function(*values)
            if after:
                self._mark(after)
            return result
        setattr(owner, name, marked)

    def _mark(self, name: str) -> None:
        """Note the time of a mark."""
        self.synchronize()
        self._marks[name] = time.perf_counter()

    def measure(self, phase: str, step: Callable[[], Any]) -> tuple[list[float], Any]:
        """Run a phase; return the seconds of `PARTS`, and its result."""
        self._marks = {}
        last = time.perf_counter()
        result = step()
        self.synchronize()
        self._marks[""] = time.perf_counter()
        seconds = {}
        for part, mark in ORDER[phase]:
            seconds[part] = self._marks[mark] - last
            last = self._marks[mark]
        return [seconds[part] for part in PARTS], result


class ExpertsSampler:
    """Take samples of a layer, its products, and PyTorch."""

    def __init__(self, subject: ExpertsSubject) -> None:
        self.subject, self.comm, self.library = subject, subject.mesh.comm, subject.grid.backend
        self.parts = PartClock(subject.layer, self.library.synchronize)
        self.clock = Clock(self.comm)
        self.products = {routing: self._products(routing) for routing in ROUTINGS}

    def _products(self, routing: str) -> tuple[Any, Any, Any]:
        """Make rows, weights and the rows of each expert, as in the first product so routed."""
        subject = self.subject
        subject.set_routing(routing)
        with subject.layer.routings.recording() as routings:
            subject.forward()
        segments = routings[0].plan.rows.outer_segments
        weights = subject.layer.up.weight.value
        count = max((one.stop for one in segments), default=0)
        rows = self.library.empty((count, weights.shape[1]), weights.dtype)
        rows[...] = 0.5
        return rows, weights, segments

    def first_products(self) -> list[TimedProduct]:
        """Return the products of this rank's experts in the first product, with equal shares."""
        _, weights, segments = self.products[ROUTINGS[0]]
        return count_products((one.stop - one.start, *weights.shape[1:], False, False)
                              for one in segments)

    def sample_layer(self, routing: str) -> Sample:
        """Take a sample of the layer, with the seconds (phases, parts) of each rank."""
        self.subject.set_routing(routing)
        self.subject.zero_gradients()
        found = self._time(self._step)
        return replace(found, result=self.comm.gather(found.result))

    def _step(self) -> list[list[float]]:
        """Run forward and backward; return the seconds (phases, parts)."""
        forward, (_, saved) = self.parts.measure("forward", self.subject.forward)
        backward, _ = self.parts.measure("backward", lambda: self.subject.backward(saved))
        return [forward, backward]

    def _time(self, step: Callable[[], Any]) -> Sample:
        return time_side(step, self.comm, self.library.synchronize, self.clock)

    def _time_products(self, multiply: Callable[[], Any]) -> Sample:
        return replace(self._time(multiply), result=None)

    def _single_product(self, rows: Any, weights: Any) -> Any:
        """Multiply all rows by one weight."""
        out = self.library.empty((rows.shape[0], weights.shape[2]), rows.dtype)
        return self.library.gemm(rows, weights[0, :, :], out)

    def sample_all(self, limits: Limits, reference: TorchProcesses | None,
                   ways: Sequence[str]) -> tuple[np.ndarray, np.ndarray, str]:
        """Take samples until the limits are reached.

        Returns makespans (routings, kinds, repetitions), NaN where PyTorch is not measured; the
        layer's parts (routings, phases, parts, ranks, repetitions) on rank 0; and the limit.
        """
        sides = {}
        for routing, (rows, weights, segments) in self.products.items():
            sides |= {
                (routing, "layer"): partial(self.sample_layer, routing),
                (routing, "grouped products"): partial(
                    self._time_products, partial(grouped_matmul, rows, weights, segments)),
                (routing, "one product"): partial(
                    self._time_products, partial(self._single_product, rows, weights)),
                **{(routing, f"PyTorch {way}"): partial(reference.sample, "step", way, routing)
                   for way in ways}}
        layers = [(routing, "layer") for routing in ROUTINGS]
        found, ended_by = compare_in_turns(sides, limits, self.subject.case.seed, self.comm,
                                           ratios=[(layer, layer) for layer in layers])
        rounds = len(found[layers[0]])
        times = np.array([[[one.seconds for one in found.get((routing, kind), ())]
                           or [np.nan] * rounds for kind in EXPERT_KINDS] for routing in ROUTINGS])
        parts = np.empty(0)
        if self.comm.rank == 0:
            # From (routings, repetitions, ranks, phases, parts).
            every = np.array([[one.result for one in found[layer]] for layer in layers])
            parts = every.transpose(0, 3, 4, 2, 1)
        return times, parts, ended_by
