"""Compute learning rates that change from step to step."""

import math
from typing import Any

from mm3d.arrays.plain_numbers import check_range, plain_number


def check_rate(lr: Any) -> None:
    """Raise ValueError unless `lr` is a learning rate."""
    check_range("lr", lr, lambda lr: 0 <= lr < math.inf, "at least 0")


def warmup_cosine(step: int, steps: int, peak: float, warmup: int = 0,
                  floor: float = 0.0) -> float:
    """Return the learning rate of a step: a linear rise to `peak`, then half a cosine to `floor`.

    Parameters
    ----------
    step : int
        The step, from 0.
    steps : int
        Steps of the whole training; the last of them has the rate `floor`, and so has any after.
    peak, floor : float
        The largest rate, and the last one.
    warmup : int
        Steps of the rise; the first has the rate ``peak / warmup``, the last `peak`.  With 0 or 1
        step 0 has `peak`, also where it is the last.

    Returns
    -------
    float
        The learning rate.

    Raises
    ------
    ValueError
        For a step before the first, a rise that is longer than the training, and a `floor` that
        is negative or above `peak`.
    """
    peak, floor = plain_number(peak), plain_number(floor)
    check_range("step", step, lambda step: step >= 0, "at least 0")
    check_range("warmup", warmup, lambda warmup: 0 <= warmup <= steps,
                f"0 to {steps}, the number of steps,")
    check_range("floor", floor, lambda floor: 0 <= floor <= peak, f"0 to {peak}, the peak,")
    top, last = max(0, warmup - 1), steps - 1
    if step == top:
        return peak
    if step < top:
        return peak * (step + 1) / warmup
    share = min(1.0, (step - top) / max(1, last - top))
    return floor + (peak - floor) * (1 + math.cos(math.pi * share)) / 2
