"""Verify and time whole steps of products and Transformers, in rounds over all of them."""

import gc
from dataclasses import replace
from functools import partial
from typing import Callable, Sequence

import numpy as np

import mm3d
from bench.checks import against_serial
from bench.errors import WrongResult
from bench.experiments.products import matmul
from bench.experiments.products.problem import Problem, product_grid
from bench.instruments import sampling
from bench.instruments.clock import Clock
from bench.instruments.placement import reorder_ranks
from bench.instruments.timing import time_phases
from bench.prediction.work import SIZE_NAMES, Work
from bench.records.model_run import make_record
from bench.records.measurements import Check, Measurements, Setting
from mm3d import ModelSizes
from mm3d.grid.grid import GridAxes
from mm3d.tracing.events import PHASES

Trial = Callable[[], list[float]]    # measures the seconds of forward and of backward
Report = Callable[[str], None]     # is given a line on what was done, on every rank
WORKS_OF_A_LINE = 8    # verified, before a line of progress


def measure_works(batches: Sequence[Sequence[Work]], comm, dtype: str, seed: int, rounds: int,
                  progress: Report = lambda line: None,
                  after: Callable[[int], None] = lambda turn: None
                  ) -> tuple[np.ndarray, list[Check]]:
    """Verify and measure forward and backward of works on all ranks of `comm`.

    Each round has a random order, so that a disturbance of the machine affects no single work.
    Works of a batch are in memory together.  `after` is called after each round of each batch,
    with how many there were.

    Returns seconds, (rounds, works, phases), the same on all ranks; and what was verified.

    Raises ValueError when the sizes of a work do not fit the grid or each other; WrongResult, on
    all ranks, when a result is wrong, before anything of its batch is timed.
    """
    prepare = {"matmul": prepare_product, "layer": prepare_layer}
    count, done = sum(map(len, batches)), 0
    found, checks = [], []
    for batch in batches:
        grids, trials = [], []
        for work in batch:
            grid, trial, of_work = prepare[work.kind](work, comm, dtype, seed)
            grids.append(grid)
            trials.append((trial,))
            for one in of_work:    # the same on all ranks
                checks.append(replace(one, quantity=f"{work.label}: {one.quantity}"))
                if not one.passed:
                    raise WrongResult(f"{checks[-1].quantity} is off by {one.error:.2g}, "
                                      f"tolerance {one.tolerance:.2g}")
            done += 1
            if done % WORKS_OF_A_LINE == 0 or done == count:
                progress(f"checked the results of {done} of {count} plans")
        of_batch = []
        for turn in range(rounds):
            of_batch.append(sampling.measure_in_random_order(trials, seed + turn,
                                                             lambda trial: trial()))
            progress(f"measured round {turn + 1} of {rounds}")
            after(turn + 1)
        found.append(np.array(of_batch))
        del trial, trials
        for grid in grids:    # and the memory of their lines, once no array is on them
            grid.free()
        gc.collect()
    return np.concatenate(found, axis=1), checks


def measure_check(batches: Sequence[Sequence[Work]], comm, settings: dict[str, Setting],
                  rounds: int, progress: Report = lambda line: None) -> Measurements:
    """Measure works by `measure_works`; return the record, the same on all ranks.

    `settings` are their dtype and seed, and the transport of their collectives.
    """
    samples, checks = measure_works(batches, comm, str(settings["dtype"]), int(settings["seed"]),
                                    rounds, progress)
    return make_record("check", dict(settings), sampling.measured_environment("numpy", comm),
                       {"s": {"samples": samples.transpose(1, 2, 0)}}, checks,
                       work=[work.label for batch in batches for work in batch])


def prepare_product(work: Work, comm, dtype: str, seed: int
                    ) -> tuple[GridAxes, Trial, list[Check]]:
    """Check C = AB, dA and dB; return the grid, the trial that measures C, and then dA and dB, and
    the checks."""
    grid = product_grid(work.scheme, _in_order(work, comm), work.grid, "numpy")
    problem = Problem(work.scheme, work.form, grid, work.sizes, dtype, seed)
    checks = [done for phase in PHASES
              for done in matmul.check_results(problem, getattr(problem, phase)(), seed)]
    clock = Clock(comm)
    samplers = [sampling.makespans(getattr(problem, phase), comm, lambda: None, clock)
                for phase in PHASES]
    return grid, lambda: [sample() for sample in samplers], checks


def prepare_layer(work: Work, comm, dtype: str, seed: int
                  ) -> tuple[GridAxes, Trial, list[Check]]:
    """Check a step of a Transformer against the serial scheme; return the grid, the trial that
    measures forward and backward, and the checks."""
    sizes = ModelSizes(**dict(zip(SIZE_NAMES["layer"], work.sizes)))
    scheme = mm3d.scheme(work.scheme, _in_order(work, comm), work.grid, "numpy")
    network = mm3d.Transformer(scheme, **sizes, seed=seed, dtype=dtype)
    x, dy = network.random("input"), network.random("output gradient")
    y, saved = network.forward(x)
    checks = against_serial.compare_with_serial(network, y, network.backward(dy, saved), dtype)
    return network.grid, partial(time_phases, network, x, dy, Clock(comm)), checks


def _in_order(work: Work, comm):
    """Return a communicator of the same ranks in the order of `work`, which is never freed."""
    return reorder_ranks(comm, work.grid, work.order) if work.order else comm
