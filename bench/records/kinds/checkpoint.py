"""Rates of writing and reading checkpoints, beside the disk's own."""

import math

from bench.document import Column, Notes, Part, make_table, spread
from bench.records.kinds import Derived, each, medians
from bench.records.measurements import Measurements, Place, list_places
from bench.records.notes import describe_machine

SCHEMAS = {
    "checkpoint": {
        "verified": True,
        "positive": "bytes rate samples seconds",
        "settings": "batch dtype ended_by heads hidden layers ranks scheme seq",
        "variables": {"bytes": "", "samples": "operation repetition"},
        "derived": {"rate": "operation", "seconds": "operation bound"},
        "labels": {"operation": [["save", "restore", "disk write", "disk read"]]}}}

OF_THE_DISK = {"save": "disk write", "restore": "disk read"}


def derive(record: Measurements) -> Derived:
    """Return seconds and bytes a second by operation."""
    seconds = medians(record.raw["samples"].values)
    rate = float(record.raw["bytes"].values) / seconds[:, 0]
    return {"seconds": (seconds, "s"), "rate": (rate, "byte s-1")}


@each
def tables(record: Measurements) -> list[Part]:
    """Make the table of rates, and of shares of the disk's own."""
    total = float(record.values("bytes"))
    return [make_table(f"A checkpoint of {total / 1e9:.3g} GB, {record.configuration['ranks']} "
                       f"ranks", COLUMNS, list_places(record, "operation")),
            Notes("About these times:", [
                "Parameters and moments of AdamW; a sample is the slowest rank's. Save ends when "
                "all is on the disk; to remove the one before is not timed; restore compares "
                "checksums and copies. The disk: as many random bytes of each rank to one plain "
                "file, synchronised, and read. Files are dropped from the cache first, where the "
                f"system does so. {describe_machine(record)}."])]


def _share(at: Place) -> float:
    """Return the rate over that of the disk; NaN of the disk's own."""
    disk = OF_THE_DISK.get(at["operation"])
    if disk is None:
        return math.nan
    operations = list(at.record.scales["operation"])
    return at("rate") / at.record.values("rate", operation=operations.index(disk))


COLUMNS = [
    Column("", of=lambda at: at["operation"]),
    *spread(lambda at: at("seconds"), ".3g", units=("(s)",) * 3),
    Column("rate", "(GB/s)", of=lambda at: at("rate") / 1e9, form=".3g"),
    Column("of the disk's own", of=_share, form=".0%")]
