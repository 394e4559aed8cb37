"""Derive the speed of a training."""

import numpy as np

from bench.records.measurements import Measurements, Variable


def derive(record: Measurements) -> dict[str, Variable]:
    """Return the tokens a second of the steps of this run."""
    chosen, steps = record.configuration, np.array(record.scales["step"], int)
    # Those before it began may be another machine's.
    seconds = record.raw["step_seconds"].values[steps >= int(chosen["began"])]
    speed = tokens_per_second(int(chosen["batch"]) * int(chosen["seq"]), seconds)
    return {"tokens_per_second": Variable(np.array(speed), "s-1", ())}


def tokens_per_second(tokens: int, seconds: np.ndarray) -> float:
    """Compute the tokens of a step over its median seconds, without the first of several.

    NaN without any step.
    """
    counted = seconds[1:] if len(seconds) > 1 else seconds
    return tokens / float(np.median(counted)) if len(counted) else np.nan
