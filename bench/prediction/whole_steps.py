"""Verify and time whole steps on all grids, and fit the time that they take beyond their parts."""

import gc
import itertools
import math
import sys
from dataclasses import replace
from typing import Callable, Iterable, Sequence

import msgspec
import numpy as np

import mm3d
from bench.agreement import agree
from bench.checks import against_serial
from bench.cluster.spec import Cluster
from bench.errors import WrongResult
from bench.experiments.products import matmul
from bench.experiments.products.problem import Problem, product_grid
from bench.instruments import sampling
from bench.instruments.available_memory import total_memory
from bench.instruments.clock import Clock, time_on_all_ranks
from bench.instruments.least_squares import solve_nonnegative
from bench.instruments.placement import reorder_ranks
from bench.prediction import machine_model, memory_fit, planner
from bench.prediction.seconds import barriers, step_seconds
from bench.prediction.work import NAMES, Work, trace_work
from bench.records.measurements import Check, Measurements, Variable
from mm3d import ModelSizes
from mm3d.grid.grid import GridAxes
from mm3d.grid.shape import GridShape
from mm3d.schemes import find_scheme
from mm3d.tracing.events import Collective, Gemm, PHASES, Pass

Trial = Callable[[], list[float]]    # measures the seconds of forward and of backward
# A short step and a long one, to separate the costs of barriers from those of work.
MODELS = ((96, 8, 8, 32, 2), (448, 8, 8, 96, 1))    # hidden, heads, batch, seq, layers
SMALLER = (448, 320, 224, 160)    # features of the second model, for ever slower links
LINK_SECONDS = 1.2    # that a link may carry the matrices of a step: W twice and dW once
WORKS_OF_A_LINE = 8    # verified, before a line of progress
ROUNDS = 8
# Of memory.  Each of 64 ranks on one machine had 46 MB with all libraries loaded, 110 MB more for
# operations alone and pools, and 7 MB more for each model, mostly idle memory that its lines keep.
BYTES_OF_A_RANK, BYTES_OF_A_WORK = 160e6, 10e6
USED = 0.8    # of the machine's memory


def list_models(cluster: Cluster | None) -> tuple[tuple[int, ...], ...]:
    """List the sizes of the models whose steps are measured: smaller ones where links are slow.

    Parameters
    ----------
    cluster : Cluster or None
        The emulated cluster, if the ranks are on several of its nodes.
    """
    if cluster is None or cluster.link is None:
        return MODELS
    short, (_, *others) = MODELS
    matrices = 3 * 12 * 4    # bytes of float32 over the square of the features, W twice and dW
    hidden = next((hidden for hidden in SMALLER
                   if matrices * hidden ** 2 * 8 <= LINK_SECONDS * cluster.link), SMALLER[-1])
    return short, (hidden, *others)


def list_works(ranks: int, products: Iterable[tuple[int, ...]],
               layers: Iterable[tuple[int, ...]], inside: Sequence[str] = (),
               schemes: Sequence[str] = (), most: int = sys.maxsize) -> list[Work]:
    """List products C = AB and Transformers of these sizes, on all grids of all schemes.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    products : iterable of tuple of int
        M, N and K of each.
    layers : iterable of tuple of int
        Sizes of each Transformer.
    inside : sequence of str, optional
        Directions.  Each grid is listed once for each of them that leads to another order of its
        ranks, in which its coordinate varies fastest; by default in the order of the grid alone.
    schemes : sequence of str, optional
        Their names; by default all that divide the work.
    most : int, optional
        Of a scheme with more grids, so many are listed, spread over all of them.

    Raises
    ------
    ValueError
        When one of `schemes` has no grid of `ranks` ranks.
    """
    alone = find_scheme("3d").grid_shape((1, 1, 1))
    grids = [("3d", alone)]
    if ranks > 1:
        every = [one for name in schemes or [None] for one in planner.list_candidates(ranks, name)]
        of_schemes = itertools.groupby(every, key=lambda one: one[0])
        grids = [one for _, some in of_schemes for one in spread(list(some), most)]
    works = [Work("matmul", scheme, grid, sizes, "ab") for sizes in products
             for scheme, grid in grids if find_scheme(scheme).matrix_product]
    works += [Work("layer", scheme, grid, sizes) for sizes in layers for scheme, grid in grids]
    return [replace(work, order=order) for work in works
            for order in (list_orders(work.grid, inside) if inside else [""])]


def spread(listed: list, most: int) -> list:
    """Choose at most `most` of `listed`, the first and the last and others evenly between."""
    if len(listed) <= most:
        return listed
    return [listed[round(k)] for k in np.linspace(0, len(listed) - 1, most)]


def works_in_batches(works: Sequence[Work], ranks: int, dtype: str) -> list[list[Work]]:
    """Divide works, in their order, into as few batches as fit in this machine's memory.

    All works of a batch are in memory together; a single one may need more than there is.

    Parameters
    ----------
    works : sequence of Work
        Products and Transformers on grids of all ranks.
    ranks : int
        Number of ranks, which share the machine's memory.
    dtype : str
        The dtype of all arrays.
    """
    room = USED * (total_memory() or math.inf) / ranks - BYTES_OF_A_RANK
    batches: list[list[Work]] = []
    left = 0.0
    for work in works:
        needed = BYTES_OF_A_WORK + estimate_bytes(work, dtype)
        if not batches or needed > left:
            batches.append([])
            left = room
        batches[-1].append(work)
        left -= needed
    return batches


def estimate_bytes(work: Work, dtype: str) -> float:
    """Estimate the bytes of a rank's arrays, with those of a step."""
    if work.kind == "layer":
        return memory_fit.estimate_peak(work.scheme, work.grid, dtype, "none",
                                        dict(zip(NAMES["layer"], work.sizes)))
    m, n, k = work.sizes
    gathered = max(work.grid.sizes) / work.ranks    # of each matrix and its gradient, at most
    return 2 * (m * n + n * k + m * k) * gathered * np.dtype(dtype).itemsize


def list_orders(grid: GridShape, inside: Iterable[str]) -> list[str]:
    """List the orders of a grid's ranks in which one of these directions varies fastest.

    The other directions keep their order, and directions of one rank do not count.  A grid with
    one direction of several ranks has the order "", its own.
    """
    several = [axis for axis in grid if grid[axis] > 1]
    if len(several) < 2:
        return [""]
    return ["".join(sorted(grid.directions, key=lambda axis: axis == direction))
            for direction in dict.fromkeys(inside) if direction in several] or [""]


def measure_works(works: Sequence[Work], comm, dtype: str, seed: int, count: int,
                  transport: str, progress: Callable[[str], None] = lambda line: None
                  ) -> Measurements:
    """Verify and measure forward and backward of `works` on all ranks of `comm`.

    Works that do not fit in memory together are measured in batches, each in all rounds.

    Parameters
    ----------
    works : sequence of Work
        Products and Transformers on grids of all ranks.
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
    batches, done = works_in_batches(works, comm.size, dtype), 0
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
    samples = np.concatenate(found, axis=1)
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


def make_transformers(works: Sequence[Work], comm,
                      progress: Callable[[str], None] = lambda line: None
                      ) -> list[mm3d.Transformer]:
    """Build the Transformers of `works`.

    Parameters
    ----------
    works : sequence of Work
        Transformers on grids of all ranks.
    progress : callable, optional
        Is given a line on what was done, on every rank.

    Raises
    ------
    WrongResult
        When a step of one differs from the serial scheme's.
    """
    found = []
    for work in works:
        network, checks = make_transformer(work, comm, "float32", 0)
        wrong = [done for done in checks if not done.passed]
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


def fit_step_losses(machine: machine_model.Machine, works: Sequence[Work],
                    took: np.ndarray) -> machine_model.Machine:
    """Fit three figures of `machine` to whole steps; its others are of operations alone.

    In a step operations follow others and not themselves: their data and code are in no cache,
    and ranks wait for each other.  The three figures are the fraction of their rates that all
    operations achieve, the seconds of Python around each, and the seconds that a barrier of g
    ranks takes longer, over (g-1)/g.  They are fitted by relative least squares to `took`, the
    seconds of a step of each of `works`.
    """
    traces = [trace_work(work, "float32", machine.elementwise_block) for work in works]
    sizes = sorted({event.size for one in traces for event in one.count(Collective)})
    others = {size: (size - 1) / size for size in sizes}    # the fraction of ranks to wait for
    rows = [[sum(step_seconds(machine, one).values()),
             (one.count(Gemm) + one.count(Pass)).total(),
             math.fsum(times * barriers(event) * others[event.size]
                       for event, times in one.count(Collective).items())]
            for one in traces]
    terms = np.array(rows) / took[:, None]
    more, launch, waiting = solve_nonnegative(terms, 1 - terms[:, 0]).tolist()
    return msgspec.structs.replace(
        machine, achieved=machine_model.Achieved(*[1 / (1 + more)] * 4, latency=1.0),
        launch_seconds=launch, waiting={size: waiting * others[size] for size in sizes})
