"""The verb ``layer``: one Transformer layer, forward and backward, beside one process' PyTorch.

In every repetition the distributed layer, its linear layers' local matrix products alone, and
PyTorch with all cores are measured one after another, in random order, while the other side
sleeps; ratios are medians over such repetitions.  With ``--overlap`` the layer is measured a
second time in each, with communication going on while ranks multiply.
"""

import gc
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import mm3d
from bench import hiding, layertables, operands, verify
from bench.cases import Sizes, UsageError
from bench.formats import render
from bench.footprint import Footprint
from bench.journal import writable
from bench.matmul import SETTLE, makespans
from bench.products import Replay
from bench.rival import Rival
from bench.sampling import BOUNDS, failed, limits_of, measured_environment, publish
from bench.variants import having
from mm3d import cost, timing
from mm3d.record import Check, Measurements, Variable
from mm3d.statistics import Interval, median_interval

KINDS = ("layer", "local products", "PyTorch", "layer with overlap")


def layer(arguments, comm) -> int:
    """Measure one layer of each hidden size; 0 when all were right and written.

    Raises
    ------
    UsageError
        When an argument cannot be meant.
    StoreError
        When the results folder cannot be written.
    """
    limits = limits_of(arguments)
    check_head(arguments.hidden, arguments.head)
    if arguments.overlap:
        check_overlap(arguments.scheme)
    out = writable(arguments.out, comm)
    every = [Sizes(1, hidden, hidden // arguments.head, arguments.batch, arguments.seq)
             for hidden in arguments.hidden]
    status = 0
    for sizes in every:
        gc.collect()
        try:
            scheme = mm3d.scheme(arguments.scheme, comm, arguments.grid, arguments.backend)
            subject = Subject(scheme, sizes, arguments.seed, arguments.dtype)
        except ValueError as error:
            raise UsageError(str(error)) from error
        status = max(status, one(subject, arguments, limits, out))
        scheme.grid.free()
        del subject
    return status


def check_head(every: list[int], head: int) -> None:
    """Raise UsageError for hidden sizes that are no whole number of heads."""
    for hidden in every:
        if head < 1 or hidden % head:
            raise UsageError(f"--hidden {hidden} --head {head}: a head of at least 1 feature, "
                             f"and --hidden a multiple of it, would do")


def check_overlap(scheme: str) -> None:
    """Raise UsageError for a scheme whose products cannot overlap."""
    able = having("overlap")
    if scheme not in able:
        raise UsageError(f"--overlap --scheme {scheme}: only products of {', '.join(able)} can "
                         f"overlap")


class Subject:
    """The layer that is measured, with its input and its output's gradient.

    Parameters
    ----------
    scheme : Scheme
        Of the layer.
    sizes, seed, dtype
        See `bench.verify.build`.
    """

    def __init__(self, scheme: mm3d.Scheme, sizes: Sizes, seed: int, dtype: str) -> None:
        self.footprint = Footprint(scheme.grid)
        self.scheme, self.sizes, self.seed, self.dtype = scheme, sizes, seed, dtype
        self.model = verify.build(scheme, sizes, seed, dtype)
        self.x, self.dy = self.model.random("input"), self.model.random("output gradient")
        self.model.zero_gradients()

    def step(self) -> tuple[Any, Any]:
        """The output and the input's gradient."""
        y, saved = self.model.forward(self.x)
        return y, self.model.backward(self.dy, saved)

    def checks(self, results: tuple[Any, Any], rival: Rival | None) -> list[Check]:
        """The results and the parameters' gradients against PyTorch, or the serial scheme."""
        reference = rival and (lambda: dict(rival.results))
        return verify.compare(self.model, *results, self.sizes, self.seed, self.dtype, reference)


@dataclass
class Found:
    """What was measured: times (repetitions, kinds, ranks, begin and end), of which kinds, the
    share of communication that overlap hides, and the checks."""

    times: np.ndarray
    kinds: list[int]
    hidden: float
    ended_by: str
    checks: list[Check]


def one(subject: Subject, arguments, limits: timing.Limits, out: Path) -> int:
    """Verify, measure, print and write one layer; 0 unless it is wrong."""
    comm, sizes = subject.scheme.grid.comm, subject.sizes
    name = f"layer-{arguments.scheme}-h{sizes.hidden}-{arguments.dtype}"
    results = subject.step()
    memory = comm.gather(subject.footprint.peaks())
    rival = started(subject, arguments, comm)
    against = "PyTorch" if arguments.torch else "the serial scheme"
    try:
        checks = subject.checks(results, rival)
        problem = verify.failure(checks, against)
        if problem:
            return failed(name, problem, comm)
        found = measured(subject, arguments, limits, rival)
        problem = verify.failure(found.checks, against)
        if problem:
            return failed(name, f"after the last repetition, {problem}", comm)
        about = rival.about if rival else "none"
    finally:
        if rival:
            rival.close()
    environs = measured_environment(subject.scheme.grid.backend.name, comm)
    if memory is None:
        return publish(None, out, name, comm)
    settings = {"scheme": arguments.scheme, "dtype": arguments.dtype, **_named(sizes),
                "seed": arguments.seed, "reference": about, "ended_by": found.ended_by,
                "grid": " x ".join(map(str, subject.scheme.grid.shape.values())),
                "grid_axes": " ".join(subject.scheme.grid.shape),
                "transport": operands.transport(subject.scheme.grid), **asdict(limits)}
    record = summary(subject, found, np.array(memory).T, settings, environs, checks)
    return publish(record, out, name, comm, lambda: render(layertables.layers([record])))


def started(subject: Subject, arguments, comm) -> Rival | None:
    """The reference process, on rank 0; UsageError everywhere when it does not start."""
    rival, problem = None, None
    if arguments.torch and comm.rank == 0:
        try:
            rival = Rival(arguments.torch, subject.sizes, subject.seed, subject.dtype)
        except UsageError as error:
            problem = str(error)
    timing.wait_patiently(comm)
    problem = comm.bcast(problem)
    if problem:
        raise UsageError(problem)
    return rival


def measured(subject: Subject, arguments, limits: timing.Limits, rival: Rival | None) -> Found:
    """Repetitions until they are enough, and the checks of the last one."""
    comm, backend = subject.scheme.grid.comm, subject.scheme.grid.backend
    clock, order = timing.Clock(comm), np.random.default_rng(arguments.seed)
    replay = Replay(subject.step, backend, subject.dtype)
    replay.result, last = None, None
    kinds = [0, 1, *([2] if arguments.torch else []), *([3] if arguments.overlap else [])]

    def sample(kind: int) -> np.ndarray:
        nonlocal last
        timing.wait_patiently(comm)
        if kind == 2:
            times = np.full((comm.size, 2), np.nan)
            if rival:
                times[0] = 0, rival.step()
                time.sleep(SETTLE)
            timing.wait_patiently(comm)
            return times
        if kind == 1:
            return timing.spans(replay, comm, backend.synchronize, clock)[0]
        last = None
        subject.model.zero_gradients()
        hiding.set_overlap(subject.model, kind == 3)
        times, last = timing.spans(subject.step, comm, backend.synchronize, clock)
        return times

    kept: list[np.ndarray] = []

    def intervals() -> list[Interval]:
        seconds = makespans(np.array(kept)[:, kinds])
        return [median_interval(seconds[:, k] / seconds[:, 0]) for k in range(1, len(kinds))]

    repetitions = timing.Repetitions(limits, comm, intervals, warmup=1)
    for counts in repetitions:
        times = np.full((len(KINDS), comm.size, 2), np.nan)
        for kind in order.permutation(kinds):
            times[kind] = sample(kind)
        if counts:
            kept.append(times)
    checks = subject.checks(last, rival)
    last = None
    hidden = np.nan
    if arguments.overlap:
        hiding.set_overlap(subject.model, True)
        hidden = hiding.hidden_share(subject.scheme.grid, subject.step, 3)
    return Found(np.array(kept), kinds, hidden, repetitions.ended_by, checks)


def summary(subject: Subject, found: Found, memory: np.ndarray, settings: dict, environs: dict,
            checks: list[Check]) -> Measurements:
    """The record of what was measured."""
    sizes, times = _named(subject.sizes), found.times
    seconds = np.full((len(times), len(KINDS)), np.nan)
    seconds[:, found.kinds] = makespans(times[:, found.kinds])

    def interval(values: np.ndarray) -> tuple:
        return (np.nan, np.nan, np.nan, 0.0) if np.isnan(values).any() else median_interval(values)

    typical = [interval(column) for column in seconds.T]
    ratios = [interval(column / seconds[:, 0]) for column in seconds.T]
    expected = cost.peak_words(settings["scheme"], subject.scheme.grid.shape, **sizes)
    variables = {
        "times": Variable(times, "s", ("repetition", "kind", "rank", "edge")),
        "seconds": Variable(np.array(typical), "s", ("kind", "bound")),
        "ratio": Variable(np.array(ratios), "1", ("kind", "bound")),
        "hidden": Variable(np.array(found.hidden), "1", ()),
        "flops": Variable(np.array(sum(cost.flops(**sizes).values())), "1", ()),
        "memory": Variable(memory, "byte", ("account", "rank")),
        "expected_memory": Variable(
            np.array(expected * np.dtype(settings["dtype"]).itemsize), "byte", ())}
    scales = {"repetition": range(len(times)), "kind": KINDS, "rank": range(times.shape[2]),
              "edge": ("begin", "end"), "bound": BOUNDS, "account": Footprint.accounts}
    return Measurements("layer", settings, environs, scales, variables, checks + found.checks)


def _named(sizes: Sizes) -> dict[str, int]:
    return {name: getattr(sizes, name) for name in ("layers", "hidden", "heads", "batch", "seq")}
