"""Compute anew what the file of a microbenchmark derives from samples, sizes and grid."""

from typing import Callable, Iterator, NamedTuple

import numpy as np

from bench.experiments.products import operands
from bench.experiments.products.matmul import RATIOS, RESULTS
from bench.experiments.products.problem import Problem
from bench.instruments import least_squares
from bench.instruments.statistics import median_interval
from bench.records.measurements import Measurements, grid_shape
from mm3d import ModelSizes, SCHEMES, describe
from mm3d.model import cost
from mm3d.tracing.dry_arrays import DryBackend
from mm3d.transport.silent import DryCommunicator

TOLERANCE = 1e-9    # relative: the same numbers computed again
# Relative to the times: least squares on another machine's LAPACK.
FIT_TOLERANCE = 1e-6
UNKNOWN = ((np.nan, np.nan, np.nan, 0.0), (np.nan,) * 4)    # intervals of no samples


class Again(NamedTuple):
    """The numbers that a variable should have, what they follow from, and how far off is close:
    a part of them, or of `scale`."""

    values: np.ndarray
    source: str
    scale: np.ndarray | float = 0.0

    def agrees(self, found: np.ndarray) -> bool:
        """Check that these numbers are those that were found."""
        if np.shape(found) != np.shape(self.values):
            return False
        return np.allclose(found, self.values, rtol=TOLERANCE, atol=FIT_TOLERANCE * self.scale,
                           equal_nan=True)


def derived(run: Measurements) -> Iterator[str]:
    """Check that what follows from samples, sizes and grid is what the file says."""
    found = {name: variable.values for name, variable in run.variables.items()}
    try:
        again = _of_samples(found) | KINDS.get(run.kind, _nothing)(run, found)
        for name, wanted in again.items():
            if not wanted.agrees(found[name]):
                yield (f"measurements/{name} is not that of {wanted.source}, "
                       f"{_few(wanted.values)}, but {_few(found[name])}")
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        yield f"what the measurements say cannot be computed anew: {error!r}"


def _few(values: np.ndarray) -> str:
    """Format the first numbers of an array, and how many more there are."""
    flat = np.ravel(values)
    return " ".join(f"{value:.6g}" for value in flat[:3]) + " ..." * (flat.size > 3)


def _nothing(run: Measurements, found: dict[str, np.ndarray]) -> dict[str, Again]:
    """Derive nothing but the intervals."""
    return {}


def interval(samples: np.ndarray, none: tuple) -> tuple:
    """Compute the median and its interval without NaN samples; `none` if all are."""
    taken = samples[~np.isnan(samples)]
    return median_interval(taken) if len(taken) else none


def _of_samples(found: dict[str, np.ndarray]) -> dict[str, Again]:
    """Compute medians and intervals of points that have their samples beside them."""
    if not {"samples", "seconds"} <= found.keys():
        return {}
    samples = found["samples"]
    points = [interval(line, UNKNOWN[1]) for line in samples.reshape(-1, samples.shape[-1])]
    return {"seconds": Again(np.reshape(points, (*samples.shape[:-1], 4)), "its samples")}


def _gemm(run: Measurements, found: dict[str, np.ndarray]) -> dict[str, Again]:
    """Compute rates of products of square matrices."""
    dims = run.variables["rate"].dims
    shape = [-1 if dim == "size" else 1 for dim in dims]
    flops = 2.0 * np.reshape(np.array(run.scales["size"], float) ** 3, shape)
    return {"rate": Again(flops / found["seconds"][..., 0], "the operations over the median")}


def _collectives(run: Measurements, found: dict[str, np.ndarray]) -> dict[str, Again]:
    """Compute bytes of the busiest rank, bandwidths and fits, (axis, collective, size)."""
    medians, moved = found["seconds"][..., 0], np.empty_like(found["bytes_moved"])
    sizes = np.array(run.scales["size"], np.int64)
    item = np.dtype(run.configuration["dtype"]).itemsize
    lines = [size for size in grid_shape(run.configuration).sizes if size > 1]
    for a, ranks in enumerate(lines):
        least = item * (sizes // item // ranks)    # the smallest block of the whole array
        busiest = {"all_gather": sizes - least, "reduce_scatter": sizes - least,
                   "all_reduce": 2 * (sizes - least), "broadcast": sizes, "reduce": sizes}
        moved[a] = [busiest[kind] for kind in run.scales["collective"]]
    fit = np.array([least_squares.fit_line(sizes.astype(float), line)
                    for line in medians.reshape(-1, len(sizes))]).reshape(*medians.shape[:2], 3)
    source, longest = "the fit to the medians", medians.max(axis=-1)
    bandwidth = moved / medians
    if "transports" in run.configuration:    # files of before have one of meetings, too
        bandwidth[operands.in_places(run.configuration["transports"],
                                     run.scales["collective"])] = np.nan
    return {"bytes_moved": Again(moved, "the sizes"),
            "bandwidth": Again(bandwidth, "the bytes moved over the median"),
            "alpha": Again(fit[..., 0], source, longest),
            "beta": Again(fit[..., 1], source, longest / sizes[-1]),
            "fit_error": Again(fit[..., 2], source, 1.0)}


def _makespans(times: np.ndarray) -> np.ndarray:
    """Compute last end minus first begin of the ranks; NaN ranks had no part."""
    return np.fmax.reduce(times[..., 1], axis=-1) - np.fmin.reduce(times[..., 0], axis=-1)


def _matmul(run: Measurements, found: dict[str, np.ndarray]) -> dict[str, Again]:
    """Compute all of a product from times (phase, repetition, kind, rank, edge) and sizes."""
    chosen, phases = run.configuration, run.scales["phase"]
    spans = _makespans(found["times"])
    sizes, ranks = [chosen[name] for name in "MNK"], len(run.scales["rank"])
    products = np.array([len(RESULTS[phase]) for phase in phases])
    again = {name.replace(" ", "_"): Again(
        np.array([median_interval(one[:, above] / one[:, below]) for one in spans]), "the times")
        for name, (above, below) in RATIOS.items()}
    return again | {
        "seconds": Again(np.array([[median_interval(kind) for kind in one.T] for one in spans]),
                         "the makespans of the times"),
        "flops": Again(2 * products * np.prod(sizes, dtype=np.int64), "the sizes"),
        "least_words": Again(products * cost.lower_bound(*sizes, ranks), "the sizes"),
        "words": Again(moved(chosen, phases, ranks), "a dry run of each rank")}


def moved(chosen: dict, phases: list[str], ranks: int) -> np.ndarray:
    """Count the words that each rank of a product moves, (phase, rank), without moving any."""
    grid = grid_shape(chosen)
    words = np.zeros((len(phases), ranks), np.int64)
    for rank in range(ranks):
        problem = Problem(chosen["scheme"], chosen["form"], DryCommunicator(ranks, rank), grid,
                          tuple(chosen[name] for name in "MNK"), chosen["dtype"], 0,
                          DryBackend())
        for p, phase in enumerate(phases):
            problem.grid.reset_traffic()
            getattr(problem, phase)()
            words[p, rank] = sum(each.words for each in problem.grid.traffic().values())
    return words


def _layer(run: Measurements, found: dict[str, np.ndarray]) -> dict[str, Again]:
    """Compute all of a layer from its times (repetition, kind, rank, edge) and sizes."""
    chosen, spans = run.configuration, _makespans(found["times"])
    described = describe(ModelSizes.from_settings(chosen))
    none = UNKNOWN[0]
    again = {"seconds": Again(np.array([interval(kind, none) for kind in spans.T]),
                              "the makespans of the times"),
             "ratio": Again(np.array([interval(kind / spans[:, 0], none) for kind in spans.T]),
                            "the times"),
             "flops": Again(np.array(sum(cost.flops(described).values())), "the sizes")}
    if chosen["scheme"] in SCHEMES:
        words = cost.peak_words(chosen["scheme"], grid_shape(chosen), described)
        again["expected_memory"] = Again(
            np.array(words * np.dtype(chosen["dtype"]).itemsize), "the closed form")
    return again


KINDS: dict[str, Callable[[Measurements, dict[str, np.ndarray]], dict[str, Again]]] = {
    "gemm": _gemm, "gpu-gemm": _gemm, "collectives": _collectives, "matmul": _matmul,
    "layer": _layer}
