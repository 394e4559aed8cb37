"""Derive how a layer compares with its local products and with one process' PyTorch."""

import numpy as np

from bench.records.kinds import BOUND, medians
from bench.records.measurements import Measurements, Variable
from bench.statistics import elapsed
from mm3d import ModelSizes
from mm3d.model import cost


def derive(record: Measurements) -> dict[str, Variable]:
    """Return seconds by kind, their ratios to those of the layer, and its operations."""
    spans = elapsed(record.raw["times"].values).T    # (kind, repetition)
    sizes = ModelSizes.from_settings(record.configuration)
    return {"seconds": Variable(medians(spans), "s", ("kind", *BOUND)),
            "ratio": Variable(medians(spans / spans[0]), "1", ("kind", *BOUND)),
            "flops": Variable(np.array(sum(cost.flops(sizes).values())), "1", ())}
