"""Measure the memory of a rank, as its allocator counts it and as the system sees it."""

import gc
import math
from pathlib import Path

from bench.instruments.available_memory import read_bytes
from mm3d.grid.grid import Grid

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Resident:
    """Growth of this process' memory since the object was made, as the system counts it."""

    def __init__(self) -> None:
        gc.collect()
        self.before = _status("VmRSS")

    def mark(self) -> None:
        """Reset the peak."""
        if CLEAR.exists():
            CLEAR.write_bytes(b"5")

    def growth(self) -> float:
        """Return the bytes of the peak since the mark; NaN where the system does not tell."""
        return _status("VmHWM") - self.before


class Footprint:
    """Growth of this rank's memory, of the arrays of a grid, since the object was made."""

    accounts = ("arrays", "resident")

    def __init__(self, grid: Grid) -> None:
        self.resident, self.backend = Resident(), grid.backend
        self.before = self.backend.memory()["in_use"]
        self.backend.reset_peak()
        self.resident.mark()

    def peaks(self) -> tuple[float, float]:
        """Return the peaks in bytes, of arrays and of resident memory; NaN unknown.

        Each rank counts an equal part of an array that ranks share.
        """
        return float(self.backend.memory()["peak"] - self.before), self.resident.growth()


def _status(name: str) -> float:
    """Read a line of the system's status of this process, in bytes; NaN if it is missing."""
    found = read_bytes(STATUS, name)
    return math.nan if found is None else float(found)
