"""Whole steps on every grid: how they are verified and timed, and what they take beyond their
parts."""

import math
from typing import Callable, Iterable, Sequence

import msgspec
import numpy as np

import mm3d
from bench.agreement import agree
from bench.checks import against_serial
from bench.errors import WrongResult
from bench.experiments.products import matmul
from bench.experiments.products.problem import Problem
from bench.instruments import sampling
from bench.instruments.clock import Clock, time_on_all_ranks
from bench.instruments.least_squares import nonnegative
from bench.prediction import machine_model, planner
from bench.prediction.seconds import meetings, step_seconds
from bench.prediction.work import NAMES, Work, trace
from bench.records.measurements import Check, Measurements, Variable
from mm3d import ModelSizes
from mm3d.schemes import lookup
from mm3d.tracing.events import Collective, Gemm, PHASES, Pass

Trial = Callable[[], list[float]]    # seconds of forward and of backward
# Short and long, so that what a meeting adds is told from what work does.
MODELS = ((96, 8, 8, 32, 2), (448, 8, 8, 96, 1))    # hidden, heads, batch, seq, layers
ROUNDS = 8


def everywhere(ranks: int, products: Iterable[tuple[int, ...]],
               layers: Iterable[tuple[int, ...]]) -> list[Work]:
    """List products C = AB and Transformers of these sizes, on every grid of every scheme."""
    alone = lookup("3d").grid_shape((1, 1, 1))
    grids = [("3d", alone)] if ranks == 1 else list(planner.candidates(ranks))
    works = [Work("matmul", scheme, grid, sizes, "ab") for sizes in products
             for scheme, grid in grids if lookup(scheme).matrix_product]
    return works + [Work("layer", scheme, grid, sizes) for sizes in layers
                    for scheme, grid in grids]


def measure(works: Sequence[Work], comm, dtype: str, seed: int, count: int,
            transport: str) -> Measurements:
    """Verify and measure forward and backward of `works` on all ranks of `comm`.

    Parameters
    ----------
    works : sequence of Work
        On grids of as many ranks.
    dtype, seed : str, int
        Of the numbers; `seed` is also of the order of measurements.
    count : int
        Rounds over all works.
    transport : str
        How collectives travel, for the record.

    Returns
    -------
    Measurements
        Seconds by work, phase and round, all ranks the same.

    Raises
    ------
    ValueError
        When a work cannot be: its sizes do not fit the grid or each other.
    exact.WrongResult
        When a result is wrong.
    """
    checks: list[Check] = []
    trials = [(product_trial if work.kind == "matmul" else layer_trial)(work, comm, dtype, seed,
                                                                        checks) for work in works]
    wrong = [done for done in checks if not done.passed]
    if wrong:
        raise WrongResult(f"{wrong[0].quantity} is off by {wrong[0].error:.2g}, tolerance "
                          f"{wrong[0].tolerance:.2g}")
    found = rounds(trials, count, seed)
    return Measurements(
        "check", {"dtype": dtype, "seed": seed, "transport": transport},
        sampling.measured_environment("numpy", comm),
        {"work": [work.label for work in works], "phase": PHASES, "repetition": range(count)},
        {"samples": Variable(found.transpose(1, 2, 0), "s", ("work", "phase", "repetition"))},
        checks)


def product_trial(work: Work, comm, dtype: str, seed: int, checks: list[Check]) -> Trial:
    """Verify C = AB, dA and dB, adding to `checks`; the call that times them."""
    problem = Problem(work.scheme, work.form, comm, work.grid, work.sizes, dtype, seed, "numpy")
    for phase in PHASES:
        checks += [Check(f"{work.label}: {done.quantity}", done.error, done.tolerance) for done in
                   matmul.verified(problem, problem.steps[phase](), seed)]
    return product(problem, comm, Clock(comm))


def layer_trial(work: Work, comm, dtype: str, seed: int, checks: list[Check]) -> Trial:
    """Verify a Transformer's step against the serial scheme, adding to `checks`; the call that
    times it."""
    network, found = transformer(work, comm, dtype, seed)
    checks += found
    return layers(network, comm, Clock(comm))


def product(problem: Problem, comm, clock: Clock) -> Trial:
    """Compute C, and then dA and dB."""
    samplers = [sampling.makespans(problem.steps[phase], comm, lambda: None, clock)
                for phase in PHASES]
    return lambda: [sample() for sample in samplers]


def layers(network: mm3d.Transformer, comm, clock: Clock) -> Trial:
    """Run a forward and a backward pass."""
    x, dy = network.random("input"), network.random("output gradient")

    def step() -> list[float]:
        network.zero_gradients()
        there, (_, saved) = time_on_all_ranks(lambda: network.forward(x), comm, lambda: None,
                                              clock)
        again, _ = time_on_all_ranks(lambda: network.backward(dy, saved), comm, lambda: None,
                                     clock)
        return [float(there.max()), float(again.max())]
    return step


def rounds(trials: Sequence[Trial], count: int, seed: int) -> np.ndarray:
    """Measure seconds by round, trial and phase.

    In rounds, each in an order of its own, so that what slows the machine for a while slows no
    work for good.
    """
    return np.array([sampling.in_random_order([(trial,) for trial in trials], seed + turn,
                                              lambda trial: trial()) for turn in range(count)])


def transformer(work: Work, comm, dtype: str, seed: int) -> tuple[mm3d.Transformer, list[Check]]:
    """Make a Transformer, and the checks of a step of it against the serial scheme."""
    sizes = ModelSizes(**dict(zip(NAMES["layer"], work.sizes)))
    network = against_serial.build(mm3d.scheme(work.scheme, comm, work.grid, "numpy"), sizes, seed,
                                   dtype)
    y, saved = network.forward(network.random("input"))
    dx = network.backward(network.random("output gradient"), saved)
    return network, [Check(f"{work.label}: {done.quantity}", done.error, done.tolerance)
                     for done in against_serial.compare(network, y, dx, sizes, seed, dtype)]


def transformers(works: Sequence[Work], comm) -> list[mm3d.Transformer]:
    """The Transformers of `works`; `exact.WrongResult` when a step of one is wrong."""
    found = []
    for work in works:
        network, checks = transformer(work, comm, "float32", 0)
        wrong = [done for done in checks if not done.passed]
        agree(f"{wrong[0].quantity} is off by {wrong[0].error:.2g}" if wrong else "", comm,
              WrongResult)
        found.append(network)
    return found


def steps(networks: Sequence[mm3d.Transformer], comm, seed: int) -> np.ndarray:
    """Measure seconds of forward and backward together by round and Transformer."""
    clock = Clock(comm)
    return rounds([layers(network, comm, clock) for network in networks], ROUNDS,
                  seed * ROUNDS).sum(axis=-1)


def together(machine: machine_model.Machine, works: Sequence[Work],
             took: np.ndarray) -> machine_model.Machine:
    """`machine`, of which only operations alone are known, with what these lose in a step, where
    they follow each other and not themselves: data and code are in no cache, and ranks wait for
    each other.

    All of them get a part of what they get alone, the same part; Python takes some time around
    each, and a meeting of g ranks (g-1)/g of some time: the three figures that make up best, in
    relative squares, for the seconds that `works` took.
    """
    traces = [trace(work, "float32", machine.granule) for work in works]
    sizes = sorted({event.size for one in traces for event in one.count(Collective)})
    others = {size: (size - 1) / size for size in sizes}    # of the ranks that meet
    rows = [[sum(step_seconds(machine, one).values()),
             (one.count(Gemm) + one.count(Pass)).total(),
             math.fsum(times * meetings(event) * others[event.size]
                       for event, times in one.count(Collective).items())]
            for one in traces]
    terms = np.array(rows) / took[:, None]
    more, launch, waiting = nonnegative(terms, 1 - terms[:, 0]).tolist()
    return msgspec.structs.replace(
        machine, achieved=machine_model.Achieved(*[1 / (1 + more)] * 4, latency=1.0),
        launch_seconds=launch, waiting={size: waiting * others[size] for size in sizes})
