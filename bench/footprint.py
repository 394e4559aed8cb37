"""The memory that a rank takes, as its allocator counts it and as the system sees it."""

import gc
from pathlib import Path

from mm3d.grid import Grid

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Footprint:
    """What this rank takes beyond what it had when this was made.

    Parameters
    ----------
    grid : Grid
        Whose arrays are counted.
    """

    accounts = ("arrays", "resident")

    def __init__(self, grid: Grid) -> None:
        gc.collect()
        self.grid, self.resident = grid, _resident("VmRSS")
        self.before = _in_use(grid)
        grid.backend.reset_peak()
        if CLEAR.exists():
            CLEAR.write_text("5")    # the system's high-water mark starts anew

    def peaks(self) -> tuple[float, float]:
        """Bytes of the most arrays at one time, and of the most resident memory; NaN unknown.

        Of an array that ranks share each counts an equal part.
        """
        arrays = self.grid.backend.memory()["peak"] - self.before
        return float(arrays), _resident("VmHWM") - self.resident


def _in_use(grid: Grid) -> int:
    return grid.backend.memory()["in_use"]


def _resident(name: str) -> float:
    """A line of the system's account of this process, in bytes; NaN where it keeps none."""
    if not STATUS.exists():
        return float("nan")
    found = [line.split()[1] for line in STATUS.read_text().splitlines()
             if line.startswith(f"{name}:")]
    return 1024.0 * int(found[0]) if found else float("nan")
