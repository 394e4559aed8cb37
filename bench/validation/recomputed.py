"""Recompute the variables of a microbenchmark that follow from samples, sizes and grid."""

from dataclasses import dataclass, replace
from typing import Callable, Iterator

import numpy as np

from bench.experiments.experts import measured as experts
from bench.experiments.pipeline import derived
from bench.experiments.pipeline.measured import expected_words
from bench.experiments.products import operands, side_by_side, wire_bytes
from bench.experiments.products.matmul import RATIOS, RESULTS
from bench.experiments.products.problem import Problem, product_grid
from bench.experiments.training import beside
from bench.experiments.training.comparison import loss_differences
from bench.experiments.training.plan import Plan
from bench.experiments.training.record import seconds_of_run, tokens_per_second
from bench.instruments import least_squares
from bench.instruments.clock import elapsed
from bench.instruments.statistics import median_interval
from bench.records.measurements import Measurements, grid_shape
from bench.records.run_file import UNLIKE
from mm3d import ModelSizes, model_spec
from mm3d.model import cost
from mm3d.model.experts.totals import utilisation_entropy
from mm3d.tracing.dry_arrays import DryBackend
from mm3d.training.schedules import parse_schedule
from mm3d.transport.silent import DryCommunicator

TOLERANCE = 1e-9    # relative, of recomputed numbers
# Relative to the times: least squares on another machine's LAPACK.
FIT_TOLERANCE = 1e-6
NO_SAMPLES = ((np.nan, np.nan, np.nan, 0.0), (np.nan,) * 4)    # intervals of no samples


@dataclass(frozen=True)
class Recomputed:
    """The recomputed values of a variable.

    Attributes
    ----------
    values : ndarray
        The values.
    source : str
        The data from which they follow.
    scale : ndarray or float
        Scale of an additional absolute tolerance, for fits.
    """

    values: np.ndarray
    source: str
    scale: np.ndarray | float = 0.0

    def agrees(self, found: np.ndarray) -> bool:
        """Return whether the recorded values equal these."""
        if np.shape(found) != np.shape(self.values):
            return False
        return np.allclose(found, self.values, rtol=TOLERANCE, atol=FIT_TOLERANCE * self.scale,
                           equal_nan=True)


def check_derived(run: Measurements) -> Iterator[str]:
    """Check that the derived variables of a file equal the recomputed ones."""
    found = {name: variable.values for name, variable in run.variables.items()}
    try:
        again = _of_samples(found) | RECOMPUTE.get(run.kind, _nothing)(run, found)
        for name, wanted in again.items():
            if not wanted.agrees(found[name]):
                yield (f"measurements/{name} is not that of {wanted.source}, "
                       f"{_few(wanted.values)}, but {_few(found[name])}")
    except (*UNLIKE, ArithmeticError, MemoryError) as error:
        yield f"what the measurements say cannot be computed anew: {error!r}"


def _few(values: np.ndarray) -> str:
    """Format the first numbers of an array."""
    flat = np.ravel(values)
    return " ".join(f"{value:.6g}" for value in flat[:3]) + " ..." * (flat.size > 3)


def _nothing(run: Measurements, found: dict[str, np.ndarray]) -> dict[str, Recomputed]:
    """Recompute nothing but the intervals."""
    return {}


def median_or_default(samples: np.ndarray, default: tuple) -> tuple:
    """Compute the median and its interval, without NaN samples; `default` if all are NaN."""
    taken = samples[~np.isnan(samples)]
    return median_interval(taken) if len(taken) else default


def _of_samples(found: dict[str, np.ndarray]) -> dict[str, Recomputed]:
    """Recompute medians and intervals of points whose samples are recorded."""
    again = {}
    for whose in ("", "mpi_"):
        if {f"{whose}samples", f"{whose}seconds"} <= found.keys():
            samples = found[f"{whose}samples"]
            points = [median_or_default(line, NO_SAMPLES[1])
                      for line in samples.reshape(-1, samples.shape[-1])]
            again[f"{whose}seconds"] = Recomputed(np.reshape(points, (*samples.shape[:-1], 4)),
                                                  "its samples")
    return again


def _gemm(run: Measurements, found: dict[str, np.ndarray]) -> dict[str, Recomputed]:
    """Recompute rates of products of square matrices."""
    dims = run.variables["rate"].dims
    shape = [-1 if dim == "size" else 1 for dim in dims]
    flops = 2.0 * np.reshape(np.array(run.scales["size"], float) ** 3, shape)
    return {"rate": Recomputed(flops / found["seconds"][..., 0], "the operations over the median")}


def _checkpoint(run: Measurements, found: dict[str, np.ndarray]) -> dict[str, Recomputed]:
    """Recompute the rates of checkpoints and of the disk."""
    return {"rate": Recomputed(found["bytes"] / found["seconds"][..., 0],
                               "the bytes over the median")}


def _collectives(run: Measurements, found: dict[str, np.ndarray]) -> dict[str, Recomputed]:
    """Recompute bytes of the busiest rank, bandwidths and fits, (axis, collective, size)."""
    medians, moved = found["seconds"][..., 0], np.empty_like(found["bytes_moved"])
    sizes = np.array(run.scales["size"], np.int64)
    item = np.dtype(run.configuration["dtype"]).itemsize
    lines = [size for size in grid_shape(run.configuration).sizes if size > 1]
    for a, ranks in enumerate(lines):
        least = item * (sizes // item // ranks)    # the smallest block of the whole array
        busiest = {"all_gather": sizes - least, "reduce_scatter": sizes - least,
                   "all_reduce": 2 * (sizes - least), "broadcast": sizes, "reduce": sizes,
                   "all_to_all": sizes - least}
        moved[a] = [busiest[kind] for kind in run.scales["collective"]]
    fit = np.array([least_squares.fit_line(sizes.astype(float), line)
                    for line in medians.reshape(-1, len(sizes))]).reshape(*medians.shape[:2], 3)
    source, longest = "the fit to the medians", medians.max(axis=-1)
    bandwidth = moved / medians
    if "transports" in run.configuration:    # older files have a bandwidth of barriers as well
        bandwidth[operands.left_in_place(run.configuration["transports"],
                                         run.scales["collective"])] = np.nan
    return _wire(run, item) | {
            "bytes_moved": Recomputed(moved, "the sizes"),
            "bandwidth": Recomputed(bandwidth, "the bytes moved over the median"),
            "alpha": Recomputed(fit[..., 0], source, longest),
            "beta": Recomputed(fit[..., 1], source, longest / sizes[-1]),
            "fit_error": Recomputed(fit[..., 2], source, 1.0)}


def _wire(run: Measurements, item: int) -> dict[str, Recomputed]:
    """Recompute the bytes that nodes have to receive, (axis, collective, node), if recorded."""
    if "wire_least" not in run.variables:
        return {}
    shape, words = grid_shape(run.configuration), run.configuration["wire_size"] // item
    nodes = [int(node) for node in run.environment["node_of_rank"].split()]
    least = [[wire_bytes.least_words(shape, axis, kind, words, nodes)
              for kind in run.scales["collective"]] for axis in run.scales["axis"]]
    return {"wire_least": Recomputed(item * np.array(least, float), "the size and the nodes")}


def _matmul(run: Measurements, found: dict[str, np.ndarray]) -> dict[str, Recomputed]:
    """Recompute a product from times (phase, repetition, kind, rank, edge) and sizes."""
    chosen, phases = run.configuration, run.scales["phase"]
    spans = elapsed(found["times"])
    sizes, ranks = [chosen[name] for name in "MNK"], len(run.scales["rank"])
    products = np.array([len(RESULTS[phase]) for phase in phases])
    again = {name.replace(" ", "_"): Recomputed(
        np.array([median_interval(one[:, above] / one[:, below]) for one in spans]), "the times")
        for name, (above, below) in RATIOS.items()}
    return again | {
        "seconds": Recomputed(
            np.array([[median_interval(kind) for kind in one.T] for one in spans]),
            "the makespans of the times"),
        "flops": Recomputed(2 * products * np.prod(sizes, dtype=np.int64), "the sizes"),
        "least_words": Recomputed(products * cost.lower_bound(*sizes, ranks), "the sizes"),
        "words": Recomputed(count_words(chosen, phases, ranks), "a dry run of each rank")}


def count_words(chosen: dict, phases: list[str], ranks: int) -> np.ndarray:
    """Count the words that each rank of a product moves, (phase, rank), by dry runs."""
    sizes, shape = grid_shape(chosen), tuple(chosen[name] for name in "MNK")
    words = np.zeros((len(phases), ranks), np.int64)
    for rank in range(ranks):
        grid = product_grid(chosen["scheme"], DryCommunicator(ranks, rank), sizes, DryBackend())
        problem = Problem(chosen["scheme"], chosen["form"], grid, shape, chosen["dtype"])
        for p, phase in enumerate(phases):
            problem.grid.reset_traffic()
            getattr(problem, phase)()
            words[p, rank] = sum(each.words for each in problem.grid.traffic().values())
    return words


def _products(run: Measurements, found: dict[str, np.ndarray]) -> dict[str, Recomputed]:
    """Recompute counts of every product by dry runs of each rank, closed forms and bounds."""
    chosen, names = run.configuration, run.scales["scheme"]
    shape, ranks = tuple(chosen[name] for name in "MNK"), len(run.scales["rank"])
    grids = side_by_side.record_grids(names, chosen["grids"])
    dry = [[side_by_side.count_dry(name, chosen["form"], sizes, shape, chosen["dtype"], rank)
            for rank in range(ranks)] for name, sizes in grids.items()]
    again = {name: Recomputed(np.array([[getattr(one, name) for one in line] for line in dry]),
                              "a dry run of each rank") for name in side_by_side.COUNTS
             if name in found or name not in side_by_side.BALANCE}
    derived_again = side_by_side.derived_variables(chosen["form"], shape, chosen["dtype"], grids,
                                                   ranks)
    return again | {name: Recomputed(variable.values, "the sizes")
                    for name, variable in derived_again.items()}


def _layer(run: Measurements, found: dict[str, np.ndarray]) -> dict[str, Recomputed]:
    """Recompute a layer from its times (repetition, kind, rank, edge) and sizes."""
    chosen, spans = run.configuration, elapsed(found["times"])
    described = model_spec(ModelSizes.from_settings(chosen))
    seconds, ratios = (np.array([median_or_default(kind, NO_SAMPLES[0]) for kind in one.T])
                       for one in (spans, spans / spans[:, :1]))
    return {"seconds": Recomputed(seconds, "the makespans of the times"),
            "ratio": Recomputed(ratios, "the times"),
            "flops": Recomputed(np.array(sum(cost.flops(described).values())), "the sizes")}


def _pipeline(run: Measurements, found: dict[str, np.ndarray]) -> dict[str, Recomputed]:
    """Recompute a pipeline's bubbles from the times of its actions, and words from its sizes."""
    schedule, times = parse_schedule(run.configuration["schedule_text"]), found["times"]
    steps, hop = derived.durations(times, schedule), np.median(found["hop_samples"])
    timeline = derived.clock_timeline(schedule, steps, float(hop))
    words = np.array(expected_words(schedule, run.configuration))
    source = "the times of the actions"
    again = {
        "seconds": Recomputed(np.array(median_interval(derived.step_seconds(times))), source),
        "bubble": Recomputed(
            np.array(median_interval(derived.bubble_rates(times, schedule))), source),
        "durations": Recomputed(steps, source), "hop": Recomputed(hop, "its samples"),
        "clock_seconds": Recomputed(np.array(float(timeline.makespan)), "the clock"),
        "clock_bubble": Recomputed(np.array(float(timeline.bubble_rate)), "the clock"),
        "expected_words": Recomputed(words, "the closed form"),
        "words": Recomputed(found["words"] * words / max(1, found["words"].sum()),
                            "a share of the closed form's sum")}
    if "reference_times" in found:
        both = np.array([times, found["reference_times"]])
        again |= {name: Recomputed(values, source)
                  for name, (values, _) in derived.beside(both).items()}
        if "slept" in found:
            again["overhead"] = Recomputed(derived.overhead_intervals(
                both, found["slept"], schedule), "the times of actions and waits")
    return again


def _training(run: Measurements, found: dict[str, np.ndarray]) -> dict[str, Recomputed]:
    """Recompute a training's learning rates from its settings, and its speed from its times."""
    plan, steps = Plan.from_settings(run.configuration), run.scales["step"]
    speed = tokens_per_second(plan.batch * plan.seq, seconds_of_run(
        steps, found["step_seconds"], int(run.configuration["began"])))
    # In files that do not say so, it fell to one step more, and from the one after the rise.
    later = plan if "rate_falls_to" in run.configuration else replace(
        plan, steps=plan.steps + 1, warmup=plan.warmup + 1)
    rates = [(plan if step < plan.warmup else later).rate(step) for step in steps]
    return {"learning_rate": Recomputed(np.array(rates), "the settings"),
            "tokens_per_second": Recomputed(np.array(speed), "the times of the steps"),
            **{name: Recomputed(np.where(found[name] > 0, found[name], 1.0), "positive numbers")
               for name in ("loss", "step_seconds", "validation_loss")}}


def _training_step(run: Measurements, found: dict[str, np.ndarray]) -> dict[str, Recomputed]:
    """Recompute seconds, speeds and ratios of all sides from the times of their steps."""
    tokens = int(run.configuration["batch"]) * int(run.configuration["seq"])
    return {name: Recomputed(values, "the times")
            for name, values in beside.derived(found["times"], tokens).items()}


def _experts(run: Measurements, found: dict[str, np.ndarray]) -> dict[str, Recomputed]:
    """Recompute ratios and parts from the samples, and the rest from the routing."""
    samples, item = found["samples"], np.dtype(run.configuration["dtype"]).itemsize
    parts = experts.medians(found["part_samples"].max(axis=3))
    tokens, dropped = found["tokens"], found["dropped"]
    entropies = [utilisation_entropy(one) for one in tokens]
    pairs = run.configuration["batch"] * run.configuration["seq"] * np.ones(tokens.shape[:2])
    if not np.array_equal(tokens.sum(axis=2), pairs):
        raise ValueError("the choices in tokens are not those of all tokens")
    return {"ratio": Recomputed(experts.medians(samples / samples[:, :1]), "the samples"),
            "share_of_one_product": Recomputed(experts.medians(samples[:, 2] / samples[:, 1]),
                                               "the samples"),
            "part_seconds": Recomputed(parts, "the slowest rank's samples"),
            "dropped_share": Recomputed(experts.dropped_shares(tokens, dropped), "the pairs"),
            "entropy": Recomputed(np.array(entropies), "the pairs"),
            "words": Recomputed(found["expected_words"], "the routing"),
            "bandwidth": Recomputed(experts.effective_bandwidth(found["words"], parts, item),
                                    "the words over the seconds")}


def _meshes(run: Measurements, found: dict[str, np.ndarray]) -> dict[str, Recomputed]:
    """Recompute how far the losses of meshes are from those of one rank."""
    return {"loss_difference": Recomputed(loss_differences(run).max(axis=1), "the losses")}


RECOMPUTE: dict[str, Callable[[Measurements, dict[str, np.ndarray]], dict[str, Recomputed]]] = {
    "gemm": _gemm, "gpu-gemm": _gemm, "collectives": _collectives, "matmul": _matmul,
    "layer": _layer, "pipeline": _pipeline, "products": _products, "checkpoint": _checkpoint,
    "experts": _experts, "training": _training, "training-meshes": _meshes,
    "training-step": _training_step}
