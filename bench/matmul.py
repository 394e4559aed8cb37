"""The verb ``matmul``: a distributed product beside one process that uses all cores.

In every repetition the product, the same local matrix products without communication, and the
whole product on one process are measured one after another, in random order, so that what slows
the machine for a while slows them all; efficiencies are medians of the ratios of such pairs.
"""

import gc
import math
import os
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from bench import chrome, microtables, operands, residual, traced
from bench.cases import UsageError
from bench.formats import render
from bench.journal import writable
from bench.machine import granted
from bench.products import Problem, Replay, Whole
from bench.sampling import BOUNDS, failed, limits_of, measured_environment, publish
from bench.watch import unwatched
from mm3d import cost, environment, timing
from mm3d.record import Measurements, Variable
from mm3d.statistics import Interval, median_interval

KINDS = ("product", "local products", "one process")
RESULTS = {"forward": ("C",), "backward": ("dA", "dB")}
RATIOS = {"efficiency": (2, 0), "ceiling": (2, 1), "share of the ceiling": (1, 0)}
# BLAS threads spin for a while after the last product; the ranks must not be timed meanwhile.
SETTLE = 0.05
# Unless told otherwise a sample is as many calls as take one process so long.
SAMPLE = 0.1


def matmul(arguments, comm) -> int:
    """Measure every shape and form; 0 when all were right and written.

    Raises
    ------
    UsageError
        When an argument cannot be meant.
    StoreError
        When the results folder cannot be written.
    """
    limits = limits_of(arguments)
    out = writable(arguments.out, comm)
    chrome.asked_for(arguments, comm)
    status = 0
    for shape in arguments.shape:
        for form in arguments.form:
            gc.collect()
            try:
                problem = Problem(arguments.scheme, form, comm, arguments.grid, shape,
                                  arguments.dtype, arguments.seed, arguments.backend)
            except ValueError as error:
                raise UsageError(str(error)) from error
            status = max(status, one(problem, shape, arguments, limits, out))
            problem.grid.free()
            del problem
    return status


def one(problem: Problem, shape: tuple[int, int, int], arguments, limits: timing.Limits,
        out: Path) -> int:
    """Verify, measure, print and write one product; 0 unless it is wrong."""
    grid = problem.grid
    phases = ("forward", "backward") if arguments.backward else ("forward",)
    name = f"matmul-{problem.scheme}-{problem.form}-{'x'.join(map(str, shape))}-{problem.dtype}"
    replays, words, checks = {}, {}, []
    for phase in phases:
        grid.reset_traffic()
        replays[phase] = Replay(getattr(problem, phase), grid.backend, problem.dtype)
        words[phase] = sum(traffic.words for traffic in grid.traffic().values())
        checks += verified(problem, replays[phase].result, arguments.seed)
        replays[phase].result = None
    problems = residual.failure(checks)
    if problems:
        return failed(name, problems, grid.comm)
    with getattr(arguments, "watched", unwatched)(grid):
        times, calls, ended_by, last = measured(problem, phases, replays, arguments, limits)
    again = [check for phase in phases for check in verified(problem, last[phase],
                                                             arguments.seed + 1)]
    problems = residual.failure(again)
    if problems:
        return failed(name, f"after the last repetition, {problems}", grid.comm)
    status = 0
    if arguments.trace:
        clock = timing.Clock(grid.comm)
        cases = len(arguments.shape) * len(arguments.form)
        status = chrome.write(chrome.named(arguments.trace, name, cases),
                              traced.product(problem, phases, clock), grid, clock, name)
    everyone = grid.comm.gather([words[phase] for phase in phases])
    environs = measured_environment(grid.backend.name, grid.comm)
    if everyone is None:
        return max(status, publish(None, out, name, grid.comm))
    settings = {"form": problem.form, "scheme": problem.scheme, "dtype": problem.dtype,
                "M": shape[0], "N": shape[1], "K": shape[2], "seed": arguments.seed,
                "grid": " x ".join(map(str, grid.shape.values())),
                "grid_axes": " ".join(grid.shape), "transport": operands.transport(grid),
                "ended_by": ended_by, "calls": calls,
                "one_process_threads": granted(environment.cores()),
                "one_process_cores": len(os.sched_getaffinity(0)), **asdict(limits)}
    record = summary(phases, times, np.array(everyone).T, settings, environs, checks + again)
    return max(status, publish(record, out, name, grid.comm,
                               lambda: render(microtables.matmul([record]))))


def verified(problem: Problem, results: dict, seed: int) -> list[residual.Check]:
    """The checks of C, or of dA and dB."""
    found = []
    for name, block in results.items():
        result = problem.distributed(name.removeprefix("d"), block)
        found += residual.checks(name, *problem.factors(name), result, seed, problem.dtype)
    return found


def measured(problem: Problem, phases: tuple[str, ...], replays: dict[str, Replay], arguments,
             limits: timing.Limits) -> tuple[np.ndarray, int, str, dict]:
    """Seconds a call (phases, repetitions, kinds, ranks, begin and end), calls a sample, what
    ended the repetitions, and the last results."""
    comm, backend = problem.grid.comm, problem.grid.backend
    clock, order = timing.Clock(comm), np.random.default_rng(arguments.seed)
    whole = Whole(problem, arguments.seed) if comm.rank == 0 else None
    last: dict[str, dict] = {}

    def sample(phase: str, kind: int, calls: int) -> np.ndarray:
        if kind == 2:
            times = np.full((comm.size, 2), np.nan)
            times[0] = alone(whole and getattr(whole, phase), calls, comm, backend)
            return times / calls
        step = replays[phase] if kind else getattr(problem, phase)

        def several() -> object:
            result = None
            for _ in range(calls):
                # One result goes before the next is made.
                del result
                result = step()
            return result
        timing.wait_patiently(comm)
        times, result = timing.spans(several, comm, backend.synchronize, clock)
        if kind == 0:
            last[phase] = result
        return times / calls

    # All three once, to warm up.
    trial = [sample(phase, kind, 1) for phase in phases for kind in range(3)][2][0, 1]
    calls = comm.bcast(arguments.calls or max(1, math.ceil(SAMPLE / max(trial, 1e-6))
                                              if comm.rank == 0 else 1))
    kept: list[np.ndarray] = []

    def intervals() -> list[Interval]:
        seconds = makespans(np.array(kept))
        return [ratio(seconds, p, "efficiency") for p in range(len(phases))]

    repetitions = timing.Repetitions(limits, comm, intervals)
    for _ in repetitions:
        times = np.empty((len(phases), len(KINDS), comm.size, 2))
        for p, phase in enumerate(phases):
            for kind in order.permutation(len(KINDS)):
                times[p, kind] = sample(phase, kind, calls)
        kept.append(times)
    return np.array(kept).swapaxes(0, 1), calls, repetitions.ended_by, last


def alone(step, calls: int, comm, backend) -> tuple[float, float]:
    """Begin and end of some calls on rank 0, with all cores, while the other ranks sleep."""
    timing.wait_patiently(comm)
    end = np.nan
    if step:
        with threadpool_limits(environment.cores(), user_api="blas"):
            # The first call wakes the threads; where it is long that does not matter.
            for _ in range(2):
                start = time.perf_counter()
                for _ in range(calls):
                    step()
                backend.synchronize()
                end = time.perf_counter() - start
                if end > 0.5:
                    break
        time.sleep(SETTLE)
    timing.wait_patiently(comm)
    return 0.0, end


def makespans(times: np.ndarray) -> np.ndarray:
    """Seconds without the last two dimensions, ranks and begin and end."""
    return np.nanmax(times[..., 1], axis=-1)


def ratio(seconds: np.ndarray, phase: int, name: str) -> Interval:
    """The interval of one of `RATIOS`, of seconds (repetitions, phases, kinds)."""
    above, below = RATIOS[name]
    return median_interval(seconds[:, phase, above] / seconds[:, phase, below])


def summary(phases: tuple[str, ...], times: np.ndarray, words: np.ndarray, settings: dict,
            environs: dict, checks: list) -> Measurements:
    """The record of what was measured."""
    shape = [settings[name] for name in "MNK"]
    ranks, repetitions = times.shape[3], times.shape[1]
    seconds = makespans(times).swapaxes(0, 1)
    products = np.array([len(RESULTS[phase]) for phase in phases])
    spread = {name: [ratio(seconds, p, name) for p in range(len(phases))] for name in RATIOS}
    typical = [[median_interval(seconds[:, p, kind]) for kind in range(len(KINDS))]
               for p in range(len(phases))]
    variables = {
        "times": Variable(times, "s", ("phase", "repetition", "kind", "rank", "edge")),
        "seconds": Variable(np.array(typical), "s", ("phase", "kind", "bound")),
        "flops": Variable(products * 2 * np.prod(shape, dtype=np.int64), "1", ("phase",)),
        "words": Variable(words, "1", ("phase", "rank")),
        "least_words": Variable(products * cost.lower_bound(*shape, ranks), "1", ("phase",))}
    variables |= {name.replace(" ", "_"): Variable(np.array(found), "1", ("phase", "bound"))
                  for name, found in spread.items()}
    scales = {"phase": phases, "repetition": range(repetitions), "kind": KINDS,
              "rank": range(ranks), "edge": ("begin", "end"), "bound": BOUNDS}
    return Measurements("matmul", settings, environs, scales, variables, checks)
