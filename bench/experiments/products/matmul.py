"""Measure a distributed product beside one process that uses all cores.

In every repetition the product, the same local matrix products without communication, and the
whole product on one process are measured one after another, in random order, so that a slower
machine slows them all; efficiencies are medians of the ratios of such pairs.
"""

import math
import time
from dataclasses import asdict
from functools import partial
from typing import Callable, ContextManager

import numpy as np
from threadpoolctl import threadpool_limits

from bench.checks import freivalds
from bench.checks.passed import require_passed
from bench.experiments.products.problem import Problem, LocalProducts, WholeProduct
from bench.instruments.clock import Clock
from bench.instruments.host import granted_threads
from bench.instruments.sampling import (SETTLE, Sample, compare_in_turns, measured_environment,
                                        repeat_calls, time_alone, time_side)
from bench.instruments.timing import Limits, unwatched
from bench.records.kinds.matmul import RATIOS
from bench.records.model_run import make_record, transport_names
from bench.records.measurements import Check, Measurements, Setting, grid_settings
from mm3d import launcher
from mm3d.arrays.backend import Array

KINDS = ("product", "local products", "one process")
# Seconds of the calls of one process in a sample, unless the number of calls is given.
SAMPLE = 0.1


def measure_product(problem: Problem, backward: bool, calls: int | None, limits: Limits,
                    seed: int = 0,
                    watched: Callable[..., ContextManager] = unwatched) -> Measurements | None:
    """Measure a distributed product beside one process that uses all cores, on every rank.

    The results are verified before the first repetition, and those of the last one again.

    Parameters
    ----------
    calls : int or None
        Calls of a sample; None for as many as take one process `SAMPLE` seconds.
    watched : callable
        Makes from the grid the context in which repetitions run; see `mm3d.tracing.watchdog`.

    Returns
    -------
    Measurements or None
        A record of kind "matmul", by phase, repetition, kind and rank; on rank 0, None on the
        others.

    Raises WrongResult on all ranks, when C, dA or dB is wrong.
    """
    grid = problem.grid
    phases = ("forward", "backward") if backward else ("forward",)
    replays, words, checks = {}, [], []
    for phase in phases:
        grid.reset_traffic()
        replays[phase] = LocalProducts(getattr(problem, phase), grid, problem.dtype)
        words.append(sum(traffic.words for traffic in grid.traffic().values()))
        checks += check_results(problem, replays[phase].result, seed)
        replays[phase].result = None
    with watched(grid):
        times, calls, ended_by, last = _time_product(problem, replays, calls, limits, seed)
    again = [check for results in last.values()
             for check in check_results(problem, results, seed + 1, "after the last repetition, ")]
    everyone = grid.comm.gather(words)
    environs = measured_environment(grid.backend.name, grid.comm)
    if everyone is None:
        return None
    settings = {**_product_settings(problem), "seed": seed, "ended_by": ended_by,
                "calls": calls, **asdict(limits)}
    return make_record("matmul", settings, environs, {
        "s": {"times": times}, "1": {"words": np.array(everyone).T}}, checks + again)


def _product_settings(problem: Problem) -> dict[str, Setting]:
    """Return the settings of a record that say which product was measured, and on what."""
    M, K = problem.shapes["C"]
    return {"form": problem.form, "scheme": problem.scheme, "dtype": problem.dtype,
            "M": M, "N": math.prod(problem.shapes["A"]) // M, "K": K,
            **grid_settings(problem.grid.shape),
            "transport": transport_names(problem.grid),
            "one_process_threads": granted_threads(launcher.cores()),
            "one_process_cores": launcher.process_cores()}


def check_results(problem: Problem, results: dict[str, Array], seed: int,
                  when: str = "") -> list[Check]:
    """Check C, or dA and dB, and that all copies of one are alike; WrongResult if they are not."""
    found = []
    for name, block in results.items():
        matrix = name.removeprefix("d")
        result = problem.distributed(matrix, block)
        found += freivalds.check_product(name, *problem.factors(name), result, seed, problem.dtype)
        if problem.copied_along(matrix):
            found.append(Check(f"copies of {name}", problem.copies_differ(matrix, block),
                               found[-1].tolerance))
    return require_passed(found, when)


def _time_product(problem: Problem, replays: dict[str, LocalProducts], calls: int | None,
                  limits: Limits, seed: int) -> tuple[np.ndarray, int, str, dict]:
    """Measure the product, its local products and the one process until limits are reached.

    Returns seconds a call, (phases, repetitions, kinds, ranks, begin and end); calls of a sample;
    the limit that was reached; and this rank's results of the last repetition, by phase.
    """
    comm, synchronize = problem.grid.comm, problem.grid.backend.synchronize
    whole = WholeProduct(problem, seed) if comm.rank == 0 else None
    clock, last = Clock(comm), {}

    def sample(phase: str, kind: str, calls: int) -> Sample:
        """Measure one of `KINDS`, in seconds a call."""
        if kind == "one process":
            return time_alone(lambda: _time_one_process(
                getattr(whole, phase), calls, synchronize) / calls, comm)
        step = replays[phase] if kind == "local products" else getattr(problem, phase)
        found = time_side(repeat_calls(step, calls), comm, synchronize, clock)
        if kind == "product":
            last[phase] = found.result
        return Sample(found.times / calls)
    # All three once, to warm up.
    trial = [sample(phase, kind, 1) for phase in replays for kind in KINDS][2].seconds
    calls = comm.bcast(calls or max(1, math.ceil(SAMPLE / max(trial, 1e-6))
                                    if comm.rank == 0 else 1))
    above, below = (KINDS[kind] for kind in RATIOS["efficiency"])
    found, ended_by = compare_in_turns(
        {(phase, kind): partial(sample, phase, kind, calls)
         for phase in replays for kind in KINDS}, limits, seed, comm, warmup=0,
        ratios=[((phase, above), (phase, below)) for phase in replays])
    times = np.array([[[one.times for one in found[phase, kind]] for kind in KINDS]
                      for phase in replays])
    return times.swapaxes(1, 2), calls, ended_by, last


def _time_one_process(step: Callable[[], object], calls: int,
                      synchronize: Callable[[], None]) -> float:
    """Measure the seconds of some calls on this rank, with all cores."""
    with threadpool_limits(launcher.cores(), user_api="blas"):
        # The first call wakes the threads; where it is long that does not matter.
        for _ in range(2):
            start = time.perf_counter()
            repeat_calls(step, calls)()
            synchronize()
            seconds = time.perf_counter() - start
            if seconds > 0.5:
                break
    time.sleep(SETTLE)
    return seconds
