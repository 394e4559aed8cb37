"""Compute the seconds of a step from samples of forward and backward on every rank."""

from statistics import median

import numpy as np


def slowest(samples: np.ndarray) -> np.ndarray:
    """Return the maximum over ranks of samples (repetitions, ranks)."""
    return samples.max(axis=1)


def typical(samples: np.ndarray) -> float:
    """Return the median over repetitions of `slowest`."""
    return median(slowest(samples).tolist())


def step_times(samples: dict[str, np.ndarray], batch: int) -> np.ndarray:
    """Return seconds a sequence of every repetition: (forward + backward) / batch."""
    return (slowest(samples["forward"]) + slowest(samples["backward"])) / batch


def average_step_time(samples: dict[str, np.ndarray], batch: int) -> float:
    """Return (forward + backward) / batch of medians, the paper's equation 6, in seconds."""
    return (typical(samples["forward"]) + typical(samples["backward"])) / batch
