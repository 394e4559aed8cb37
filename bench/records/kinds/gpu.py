"""Derive the seconds of the measurements of a device."""

from bench.records.kinds import Derived, medians
from bench.records.measurements import Measurements

SCHEMAS = {
    "gpu-elementwise": {
        "positive": "bandwidth samples seconds",
        "variables": {"bandwidth": "mode kernel", "samples": "mode kernel repetition"},
        "derived": {"seconds": "mode kernel bound"}},
    "gpu-gemm": {
        "positive": "rate samples seconds",
        "variables": {"rate": "mode size how", "samples": "mode size how repetition"},
        "derived": {"seconds": "mode size how bound"}},
    "gpu-layer": {
        "positive": "rate samples seconds",
        "variables": {"rate": "mode hidden library", "samples": "mode hidden library repetition"},
        "derived": {"seconds": "mode hidden library bound"}},
    "gpu-rows": {
        "positive": "samples seconds",
        "variables": {"samples": "row repetition"},
        "derived": {"seconds": "row bound"}}}


def derive(record: Measurements) -> Derived:
    """Return the medians of the samples."""
    return {"seconds": (medians(record.raw["samples"].values), "s")}
