"""The memory that a rank takes, as its allocator counts it and as the system sees it."""

import gc
import math
from pathlib import Path

from mm3d.grid import Grid

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Resident:
    """Memory of this process beyond what it had when this was made, as the system counts it."""

    def __init__(self) -> None:
        gc.collect()
        self.before = _status("VmRSS")

    def mark(self) -> None:
        """Let the highest start again from what there is now."""
        if CLEAR.exists():
            CLEAR.write_text("5")

    def growth(self) -> float:
        """Bytes at the highest since the mark; NaN where the system does not tell."""
        return _status("VmHWM") - self.before


class Footprint:
    """What this rank takes beyond what it had when this was made.

    Parameters
    ----------
    grid : Grid
        Whose arrays are counted.
    """

    accounts = ("arrays", "resident")

    def __init__(self, grid: Grid) -> None:
        self.resident, self.backend = Resident(), grid.backend
        self.before = self.backend.memory()["in_use"]
        self.backend.reset_peak()
        self.resident.mark()

    def peaks(self) -> tuple[float, float]:
        """Bytes of the most arrays at one time, and of the most resident memory; NaN unknown.

        Of an array that ranks share each counts an equal part.
        """
        return float(self.backend.memory()["peak"] - self.before), self.resident.growth()


def _status(name: str) -> float:
    """A line of the system's account of this process, in bytes; NaN where it keeps none."""
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return 1024.0 * int(found[0]) if found else math.nan
