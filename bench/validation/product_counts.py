"""Check what was counted in distributed products against dry runs of them."""

from typing import Iterator

import numpy as np

from bench.experiments.products.counts import COUNTS, CountedProduct, count_dry
from bench.records.kinds.products import record_grids
from bench.records.measurements import Measurements, grid_shape
from bench.validation.counts import Counts, compare_counts
from mm3d.grid.shape import GridShape


def check_product_counts(run: Measurements) -> Iterator[str]:
    """Check that what was counted is what these sizes take."""
    return compare_counts(run, _matmul if run.kind == "matmul" else _products)


def _matmul(run: Measurements) -> Counts:
    """Count the words that each rank of a product moves, (phase, rank)."""
    chosen = run.configuration
    yield "words", np.array([[one.words for one in _dry(
        run, chosen["scheme"], grid_shape(chosen), phase)] for phase in run.scales["phase"]])


def _products(run: Measurements) -> Counts:
    """Count what each rank of every product does, and its memory."""
    grids = record_grids(run.scales["scheme"], run.configuration["grids"])
    dry = [_dry(run, name, sizes) for name, sizes in grids.items()]
    for name in COUNTS:
        yield name, np.array([[getattr(one, name) for one in line] for line in dry])
    yield "memory_alone", np.array([max(one.memory for one in line) for line in dry])


def _dry(run: Measurements, scheme: str, sizes: GridShape,
         phase: str = "forward") -> list[CountedProduct]:
    """Count what each rank does in a product of this shape."""
    chosen = run.configuration
    return count_dry(scheme, chosen["form"], sizes, tuple(
        chosen[name] for name in "MNK"), chosen["dtype"], phase)


RULES = (check_product_counts,)
