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
from bench.experiments.torch.child import TorchProcesses, compare_kernels
from bench.instruments.clock import Clock
from bench.instruments.sampling import Sample, compare_in_turns, measured_environment, time_side
from bench.instruments.timing import Limits
from bench.records.model_run import add_numbers, make_record, transport_names
from bench.records.kinds.experts import EXPERT_KINDS
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
    """Measure a layer of experts with every routing; every rank of its mesh calls this.

    Results, and the words moved, are verified before the first repetition; also those of PyTorch,
    which is measured too where `torch` is an interpreter that has it.

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
    kernels, ways, left_out = {}, [], {}
    with closing(_start_torch(subject, torch)) if torch else nullcontext() as reference:
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
        products = {routing: _first_product(subject, routing) for routing in ROUTINGS}
        if reference:
            _, weights, segments = products[ROUTINGS[0]]    # with equal shares
            kernels = compare_kernels(count_products(
                (one.stop - one.start, *weights.shape[1:], False, False) for one in segments),
                case.dtype, subject.grid.backend, reference, case.seed, 3 * case.flops)
        times, parts, ended_by = _sample_all(subject, products, limits, reference, ways)
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
    return add_numbers(record, kernels)


def _start_torch(subject: ExpertsSubject, python: str) -> TorchProcesses:
    """Start PyTorch's process beside rank 0; UsageError on all ranks when it does not start."""
    case, comm = subject.case, subject.mesh.comm
    arrays = None if comm.rank else {
        **case.activations(), **case.parameters(),
        **{f"router.weight {name}": case.router_weight(name) for name in ROUTINGS}}
    return TorchProcesses(
        python, "models:TorchExpertsLayer",
        {"dtype": case.dtype, "routing": routing_settings(case.experts, case.tokens)},
        arrays, comm, "do the layer of experts")


class _PartClock:
    """Time the parts of a layer's steps.

    Router: logits, choice, the gather of all ranks' counts, and the plan of where rows go.
    Dispatch: rows to their experts.  Experts: products, biases and GELU.  Combine: rows back to
    their tokens, and the sums with the gates.  In backward each part computes their gradients.
    The layer's functions are wrapped for good; `synchronize` waits for the device.
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


def _first_product(subject: ExpertsSubject, routing: str) -> tuple[Any, Any, Any]:
    """Make rows, weights and the rows of each expert, as in the first product so routed."""
    subject.set_routing(routing)
    with subject.layer.routings.recording() as routings:
        subject.forward()
    segments, weights = routings[0].plan.rows.outer_segments, subject.layer.up.weight.value
    count = max((one.stop for one in segments), default=0)
    rows = subject.grid.backend.empty((count, weights.shape[1]), weights.dtype)
    rows[...] = 0.5
    return rows, weights, segments


def _sample_all(subject: ExpertsSubject, products: dict[str, tuple[Any, Any, Any]], limits: Limits,
                reference: TorchProcesses | None,
                ways: Sequence[str]) -> tuple[np.ndarray, np.ndarray, str]:
    """Take samples of the layer, its first product, and PyTorch until the limits are reached.

    Returns makespans (routings, kinds, repetitions), NaN where PyTorch is not measured; the
    layer's parts (routings, phases, parts, ranks, repetitions) on rank 0; and the limit.
    """
    comm, library = subject.mesh.comm, subject.grid.backend
    parts, clock = _PartClock(subject.layer, library.synchronize), Clock(comm)

    def timed(step: Callable[[], Any]) -> Sample:
        return time_side(step, comm, library.synchronize, clock)

    def step() -> list[list[float]]:
        forward, (_, saved) = parts.measure("forward", subject.forward)
        backward, _ = parts.measure("backward", lambda: subject.backward(saved))
        return [forward, backward]

    def layer(routing: str) -> Sample:
        subject.set_routing(routing)
        subject.zero_gradients()
        found = timed(step)
        return replace(found, result=comm.gather(found.result))

    def grouped(routing: str) -> Sample:
        return replace(timed(partial(grouped_matmul, *products[routing])), result=None)

    def single(routing: str) -> Sample:
        rows, weights, _ = products[routing]

        def multiply() -> None:
            out = library.empty((rows.shape[0], weights.shape[2]), rows.dtype)
            library.gemm(rows, weights[0, :, :], out)
        return timed(multiply)
    sides = {}
    for routing in ROUTINGS:
        sides |= {(routing, kind): partial(take, routing) for kind, take in (
            ("layer", layer), ("grouped products", grouped), ("one product", single))}
        sides |= {(routing, f"PyTorch {way}"): partial(reference.sample, "step", way, routing)
                  for way in ways}
    layers = [(routing, "layer") for routing in ROUTINGS]
    found, ended_by = compare_in_turns(sides, limits, subject.case.seed, comm,
                                       ratios=[(one, one) for one in layers])
    missing = [np.nan] * len(found[layers[0]])
    times = np.array([[[one.seconds for one in found.get((routing, kind), ())] or missing
                       for kind in EXPERT_KINDS] for routing in ROUTINGS])
    if comm.rank:
        return times, np.empty(0), ended_by
    # From (routings, repetitions, ranks, phases, parts).
    every = np.array([[one.result for one in found[side]] for side in layers])
    return times, every.transpose(0, 3, 4, 2, 1), ended_by
