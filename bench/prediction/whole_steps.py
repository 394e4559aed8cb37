"""Verify and time whole steps on all grids."""

import gc
import itertools
from typing import Callable, Iterable, Sequence

import numpy as np

import mm3d
from bench.agreement import agree
from bench.checks import against_serial
from bench.errors import UsageError, WrongResult
from bench.experiments.products import matmul, operands
from bench.experiments.products.problem import Problem, product_grid
from bench.instruments import sampling
from bench.instruments.clock import Clock, time_on_all_ranks
from bench.instruments.placement import reorder_ranks
from bench.prediction import machine_model
from bench.prediction.work import NAMES, Work
from bench.prediction.work_list import contenders_in_batches
from bench.records.measurements import Check, Measurements, Variable
from mm3d import ModelSizes
from mm3d.grid.grid import GridAxes
from mm3d.tracing.events import PHASES
from mm3d.transport.choice import HOST_TRANSPORTS

Trial = Callable[[], list[float]]    # measures the seconds of forward and of backward
WORKS_OF_A_LINE = 8    # verified, before a line of progress
ROUNDS = 8


def measure_works(works: Sequence[Work], expected: Sequence[float], comm, dtype: str, seed: int,
                  count: int, transport: str,
                  progress: Callable[[str], None] = lambda line: None) -> Measurements:
    """Verify and measure forward and backward of `works` on all ranks of `comm`.

    Works that do not fit in memory together are measured in batches, each in all rounds.

    Parameters
    ----------
    works : sequence of Work
        Products and Transformers on grids of all ranks.
    expected : sequence of float
        Their seconds as predicted, the same on all ranks.
    dtype : str
        The dtype of all arrays.
    seed : int
        The seed of the numbers and of the order of measurements.
    count : int
        Number of rounds over the works.
    transport : str
        The transport of collectives, for the record.
    progress : callable, optional
        Is given a line on what was done, on every rank.

    Returns
    -------
    Measurements
        Seconds by work, phase and round, the same on all ranks.

    Raises
    ------
    ValueError
        When the sizes of a work do not fit the grid or each other.
    WrongResult
        When a result is wrong.
    """
    checks: list[Check] = []
    verify = {"matmul": verify_product, "layer": verify_layer}
    batches, done = contenders_in_batches(works, expected, comm.size, dtype), 0
    if len(batches) > 1:
        progress(f"{len(works)} plans in {len(batches)} batches, as memory holds")
    found = []
    for batch in batches:
        grids, trials = [], []
        for work in batch:
            grid, trial = verify[work.kind](work, comm, dtype, seed, checks)
            grids.append(grid)
            trials.append(trial)
            done += 1
            if done % WORKS_OF_A_LINE == 0 or len(trials) == len(batch):
                progress(f"checked the results of {done} of {len(works)} plans")
        wrong = [one for one in checks if not one.passed]
        if wrong:
            raise WrongResult(f"{wrong[0].quantity} is off by {wrong[0].error:.2g}, tolerance "
                              f"{wrong[0].tolerance:.2g}")
        found.append(measure_rounds(trials, count, seed, progress))
        del trial, trials
        free_grids(grids)
    column = {id(work): k for k, work in enumerate(itertools.chain.from_iterable(batches))}
    samples = np.concatenate(found, axis=1)[:, [column[id(work)] for work in works]]
    return Measurements(
        "check", {"dtype": dtype, "seed": seed, "transport": transport},
        sampling.measured_environment("numpy", comm),
        {"work": [work.label for work in works], "phase": PHASES, "repetition": range(count)},
        {"samples": Variable(samples.transpose(1, 2, 0), "s", ("work", "phase", "repetition"))},
        checks)


def free_grids(grids: Iterable[GridAxes]) -> None:
    """Free grids and the memory of their lines; all arrays on them must be gone but in cycles."""
    for grid in grids:
        grid.free()
    gc.collect()


def _in_order(work: Work, comm):
    """Return a communicator of the same ranks in the order of `work`, which is never freed."""
    return reorder_ranks(comm, work.grid, work.order) if work.order else comm


def verify_product(work: Work, comm, dtype: str, seed: int,
                   checks: list[Check]) -> tuple[GridAxes, Trial]:
    """Verify C = AB, dA and dB, adding to `checks`; return the grid, and a trial of them."""
    grid = product_grid(work.scheme, _in_order(work, comm), work.grid, "numpy")
    problem = Problem(work.scheme, work.form, grid, work.sizes, dtype, seed)
    for phase in PHASES:
        checks += [Check(f"{work.label}: {done.quantity}", done.error, done.tolerance) for done in
                   matmul.check_results(problem, problem.steps[phase](), seed)]
    return grid, product_trial(problem, comm, Clock(comm))


def verify_layer(work: Work, comm, dtype: str, seed: int,
                 checks: list[Check]) -> tuple[GridAxes, Trial]:
    """Verify a step against the serial scheme, adding to `checks`; return its grid and trial."""
    network, found = make_transformer(work, comm, dtype, seed)
    checks += found
    return network.grid, layer_trial(network, comm, Clock(comm))


def product_trial(problem: Problem, comm, clock: Clock) -> Trial:
    """Return the trial that measures C, and then dA and dB."""
    samplers = [sampling.makespans(problem.steps[phase], comm, lambda: None, clock)
                for phase in PHASES]
    return lambda: [sample() for sample in samplers]


def layer_trial(network: mm3d.Transformer, comm, clock: Clock) -> Trial:
    """Return the trial that measures a forward and a backward pass."""
    x, dy = network.random("input"), network.random("output gradient")

    def step() -> list[float]:
        network.zero_gradients()
        there, (_, saved) = time_on_all_ranks(lambda: network.forward(x), comm, lambda: None,
                                              clock)
        again, _ = time_on_all_ranks(lambda: network.backward(dy, saved), comm, lambda: None,
                                     clock)
        return [float(there.max()), float(again.max())]
    return step


def measure_rounds(trials: Sequence[Trial], count: int, seed: int,
                   progress: Callable[[str], None] = lambda line: None) -> np.ndarray:
    """Measure seconds by (round, trial, phase).

    Each round has a random order, so that a disturbance of the machine affects no single trial.
    """
    points, found = [(trial,) for trial in trials], []
    for turn in range(count):
        found.append(sampling.measure_in_random_order(points, seed + turn, lambda trial: trial()))
        progress(f"measured round {turn + 1} of {count}")
    return np.array(found)


def make_transformer(work: Work, comm, dtype: str,
                     seed: int) -> tuple[mm3d.Transformer, list[Check]]:
    """Build a Transformer, and check a step of it against the serial scheme."""
    sizes = ModelSizes(**dict(zip(NAMES["layer"], work.sizes)))
    scheme = mm3d.scheme(work.scheme, _in_order(work, comm), work.grid, "numpy")
    network = against_serial.build_model(scheme, sizes, seed, dtype)
    y, saved = network.forward(network.random("input"))
    dx = network.backward(network.random("output gradient"), saved)
    return network, [Check(f"{work.label}: {done.quantity}", done.error, done.tolerance)
                     for done in against_serial.compare(network, y, dx, sizes, seed, dtype)]


def make_transformers(works: Sequence[Work], comm, checks: list[Check],
                      progress: Callable[[str], None] = lambda line: None
                      ) -> list[mm3d.Transformer]:
    """Build the Transformers of `works`, and check a step of each, adding to `checks`.

    Parameters
    ----------
    works : sequence of Work
        Transformers on grids of all ranks.
    checks : list of Check
        The outputs and gradients that were compared with the serial scheme's.
    progress : callable, optional
        Is given a line on what was done, on every rank.

    Raises
    ------
    WrongResult
        When a step of one differs from the serial scheme's.
    """
    found = []
    for work in works:
        network, of_step = make_transformer(work, comm, "float32", 0)
        checks += of_step
        wrong = [done for done in of_step if not done.passed]
        agree(f"{wrong[0].quantity} is off by {wrong[0].error:.2g}" if wrong else "", comm,
              WrongResult)
        found.append(network)
        if len(found) % WORKS_OF_A_LINE == 0 or len(found) == len(works):
            progress(f"a step of {len(found)} of {len(works)} models is that of the serial scheme")
    return found


def measure_steps(networks: Sequence[mm3d.Transformer], comm, seed: int,
                  rounds: int = ROUNDS) -> np.ndarray:
    """Measure the seconds of whole steps by (round, Transformer)."""
    clock = Clock(comm)
    return measure_rounds([layer_trial(network, comm, clock) for network in networks], rounds,
                          seed * rounds).sum(axis=-1)


def check_machine(machine: machine_model.Machine, name: str, comm) -> str:
    """Return how the collectives of `comm` travel, for which the machine `name` is a model.

    Raises
    ------
    UsageError
        When the machine was measured with other ranks, in another emulated cluster or with
        another transport.
    """
    count = machine.measured_ranks
    if machine.passes and count != comm.size:
        raise UsageError(f"--machine {name} was measured with {count} rank{'s' * (count > 1)}, "
                         f"not {comm.size}: start that many, or calibrate with {comm.size}")
    machine_model.check_cluster(machine, name)
    transport = operands.default_transport(comm)
    if not machine.matches_transport(transport):
        remedy = ("start more ranks, or " if comm.size == 1 else
                  f"set MM3D_TRANSPORT={machine.transport}, or "
                  * (machine.transport in HOST_TRANSPORTS))
        raise UsageError(f"--machine {name} was measured with transport {machine.transport}, not "
                         f"{transport}: {remedy}calibrate again")
    return transport
