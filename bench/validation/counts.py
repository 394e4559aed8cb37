"""Check what a microbenchmark has counted against its sizes, its routing, and dry runs."""

from typing import Callable, Iterator

import numpy as np

from bench.records.measurements import Measurements, grid_shape
from bench.records.run_file import UNLIKE

Counts = Iterator[tuple[str, np.ndarray]]    # variables by name, as they should be


def check_counts(run: Measurements) -> Iterator[str]:
    """Check that what was counted is what these sizes take."""
    try:
        for name, wanted in OF_KIND.get(run.kind, lambda run: ())(run):
            found = run.raw[name].values
            if not np.array_equal(found, wanted):
                yield f"measurements/{name} is {_few(found)}, and should be {_few(wanted)}"
    except (*UNLIKE, MemoryError) as error:
        yield f"what should have been counted cannot be told: {error!r}"


def _few(values: np.ndarray) -> str:
    """Format the first numbers of an array."""
    flat = np.ravel(values)
    return " ".join(f"{value:.6g}" for value in flat[:3]) + " ..." * (flat.size > 3)


def _collectives(run: Measurements) -> Counts:
    """Count the bytes of the busiest rank, (axis, collective, size)."""
    moved = np.empty_like(run.raw["bytes_moved"].values)
    sizes = np.array(run.scales["size"], np.int64)
    item = np.dtype(run.configuration["dtype"]).itemsize
    for a, ranks in enumerate(size for size in grid_shape(run.configuration).sizes if size > 1):
        least = item * (sizes // item // ranks)    # the smallest block of the whole array
        busiest = {"all_reduce": 2 * (sizes - least), "broadcast": sizes, "reduce": sizes}
        moved[a] = [busiest.get(kind, sizes - least) for kind in run.scales["collective"]]
    yield "bytes_moved", moved


def _pipeline(run: Measurements) -> Counts:
    """Take the sum of the words from the closed form."""
    yield "expected_words", run.raw["words"].values.sum()


def _experts(run: Measurements) -> Counts:
    """Take the words from the routing, and count its pairs of a token and a choice."""
    yield "words", run.raw["expected_words"].values
    tokens, chosen = run.raw["tokens"].values, run.configuration
    if (tokens.sum(axis=2) != chosen["batch"] * chosen["seq"]).any():
        raise ValueError("the choices in tokens are not those of all tokens")


def _matmul(run: Measurements) -> Counts:
    """Count the words that each rank of a product moves, (phase, rank), by dry runs."""
    from bench.experiments.products.counts import count_dry    # for records of products alone
    chosen = run.configuration
    yield "words", np.array([[one.words for one in count_dry(
        chosen["scheme"], chosen["form"], grid_shape(chosen), tuple(map(chosen.get, "MNK")),
        chosen["dtype"], phase)] for phase in run.scales["phase"]])


def _products(run: Measurements) -> Counts:
    """Count what each rank of every product does, and its memory, by dry runs."""
    from bench.experiments.products.counts import COUNTS, count_dry
    from bench.records.kinds.products import record_grids
    chosen = run.configuration
    dry = [count_dry(name, chosen["form"], sizes, tuple(map(chosen.get, "MNK")), chosen["dtype"],
                     "forward")
           for name, sizes in record_grids(run.scales["scheme"], chosen["grids"]).items()]
    for name in COUNTS:
        yield name, np.array([[getattr(one, name) for one in line] for line in dry])
    yield "memory_alone", np.array([max(one.memory for one in line) for line in dry])


RULES = (check_counts,)
OF_KIND: dict[str, Callable[[Measurements], Counts]] = {
    "collectives": _collectives, "pipeline": _pipeline, "experts": _experts, "matmul": _matmul,
    "products": _products}
