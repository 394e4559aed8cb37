"""Derive the rates of writing and reading checkpoints."""

from bench.records.kinds import BOUND, medians
from bench.records.measurements import Measurements, Variable


def derive(record: Measurements) -> dict[str, Variable]:
    """Return seconds and bytes a second by operation."""
    seconds = medians(record.raw["samples"].values)
    rate = float(record.raw["bytes"].values) / seconds[:, 0]
    return {"seconds": Variable(seconds, "s", ("operation", *BOUND)),
            "rate": Variable(rate, "byte s-1", ("operation",))}
