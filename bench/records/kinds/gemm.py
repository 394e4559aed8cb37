"""Rates of products of square matrices on one rank."""

import numpy as np

from bench.document import Column, Notes, Part, make_table, spread
from bench.records.kinds import Derived, each, medians
from bench.records.measurements import Measurements, list_places
from bench.records.notes import counted, describe_machine

SCHEMAS = {
    "gemm": {
        "positive": "rate samples seconds",
        "variables": {
            "ended_by_width": "dtype threads size",
            "samples": "dtype threads size repetition"},
        "derived": {"rate": "dtype threads size", "seconds": "dtype threads size bound"}}}


def derive(record: Measurements) -> Derived:
    """Return seconds and operations a second by dtype, threads and size."""
    seconds = medians(record.raw["samples"].values)
    flops = 2 * np.array(record.scales["size"], np.float64) ** 3
    return {"seconds": (seconds, "s"), "rate": (flops / seconds[..., 0], "s-1")}


@each
def tables(record: Measurements) -> list[Part]:
    """Make the table of rates against the size."""
    columns = [Column("size", of=lambda at: int(at["size"]))]
    for series in list_places(record, "dtype", "threads"):
        columns += spread(lambda at, series=series: _rates(record, series.at | at.at), ".1f",
                          f"{series['dtype']}, {counted(series['threads'], 'thread')}",
                          ("rate", "low", "high"), ("(GFLOP/s)", "95 %", "95 %"))
    return [make_table("Rate of C = A B of square matrices on one rank", columns,
                       list_places(record, "size")),
            Notes("About these rates:", [f"{describe_machine(record)}."])]


def _rates(record: Measurements, at: dict[str, int]) -> np.ndarray:
    """Return the median rate and its bounds."""
    median, low, high, _ = record.values("seconds", **at)
    return record.values("rate", **at) * median / np.array([median, high, low]) / 1e9
