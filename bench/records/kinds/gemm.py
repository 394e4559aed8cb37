"""Derive the rates of products of square matrices on one rank."""

import numpy as np

from bench.records.kinds import BOUND, medians
from bench.records.measurements import Measurements, Variable


def derive(record: Measurements) -> dict[str, Variable]:
    """Return seconds and operations a second by dtype, threads and size."""
    seconds = medians(record.raw["samples"].values)
    flops = 2 * np.array(record.scales["size"], np.float64) ** 3
    dims = ("dtype", "threads", "size")
    return {"seconds": Variable(seconds, "s", (*dims, *BOUND)),
            "rate": Variable(flops / seconds[..., 0], "s-1", dims)}
