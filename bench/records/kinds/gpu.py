"""Derive the seconds of the measurements of a device."""

from bench.records.kinds import BOUND, medians
from bench.records.measurements import Measurements, Variable


def derive(record: Measurements) -> dict[str, Variable]:
    """Return the medians of the samples."""
    samples = record.raw["samples"]
    return {"seconds": Variable(medians(samples.values), "s", (*samples.dims[:-1], *BOUND))}
