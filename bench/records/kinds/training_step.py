"""Derive how fast the sides of a training step are."""

from bench.records.kinds import BOUND, medians
from bench.records.measurements import Measurements, Variable
from bench.statistics import elapsed


def derive(record: Measurements) -> dict[str, Variable]:
    """Return seconds and tokens a second of each side, and how many times as fast mm3d is."""
    tokens = int(record.configuration["batch"]) * int(record.configuration["seq"])
    spans = elapsed(record.raw["times"].values).T    # (side, repetition)
    return {"seconds": Variable(medians(spans), "s", ("side", *BOUND)),
            "tokens_per_second": Variable(medians(tokens / spans), "s-1", ("side", *BOUND)),
            "ratio": Variable(medians(spans / spans[0]), "1", ("side", *BOUND))}
