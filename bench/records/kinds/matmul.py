"""Derive the efficiency of a distributed product beside one process that uses all cores."""

import numpy as np

from bench.records.kinds import BOUND, medians
from bench.records.measurements import Measurements, Variable
from bench.statistics import elapsed
from mm3d.model import cost

RESULTS = {"forward": ("C",), "backward": ("dA", "dB")}
RATIOS = {"efficiency": (2, 0), "ceiling": (2, 1), "share_of_the_ceiling": (1, 0)}    # of kinds


def derive(record: Measurements) -> dict[str, Variable]:
    """Return seconds a call by phase and kind, their ratios, operations and the lower bound."""
    spans = elapsed(record.raw["times"].values).swapaxes(1, 2)    # (phase, kind, repetition)
    sizes = [record.configuration[name] for name in "MNK"]
    products = np.array([len(RESULTS[phase]) for phase in record.scales["phase"]])
    return {
        "seconds": Variable(medians(spans), "s", ("phase", "kind", *BOUND)),
        "flops": Variable(products * 2 * np.prod(sizes, dtype=np.int64), "1", ("phase",)),
        "least_words": Variable(products * cost.lower_bound(*sizes, len(record.scales["rank"])),
                                "1", ("phase",)),
        **{name: Variable(medians(spans[:, above] / spans[:, below]), "1", ("phase", *BOUND))
           for name, (above, below) in RATIOS.items()}}
