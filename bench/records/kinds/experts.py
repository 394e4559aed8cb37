"""Derive how a layer of experts compares with others, its parts, and how tokens were routed."""

import numpy as np

from bench.records.kinds import BOUND, medians
from bench.records.measurements import Measurements, Variable
from mm3d.model.experts.totals import utilisation_entropy


def derive(record: Measurements) -> dict[str, Variable]:
    """Return seconds and ratios, seconds of parts, and what follows from the routing."""
    samples, tokens, dropped, words = (record.raw[name].values for name in (
        "samples", "tokens", "dropped", "words"))
    parts = medians(record.raw["part_samples"].values.max(axis=3))
    item = np.dtype(record.configuration["dtype"]).itemsize
    sending = [list(record.scales["part"]).index(name) for name in ("dispatch", "combine")]
    # Bytes a second between replicas, of the rank that sends most.  The parts order rows and add
    # them up, too.
    bandwidth = item * words.max(axis=1) / parts[:, :, sending, 0].sum((1, 2))
    of_routing = {
        "dropped_share": (dropped.sum(1) / tokens.sum((1, 2)), "1"),
        "entropy": (np.array([utilisation_entropy(one) for one in tokens]), "1"),
        "bandwidth": (np.where(bandwidth > 0, bandwidth, np.nan), "byte s-1")}
    return {
        "seconds": Variable(medians(samples), "s", ("routing", "kind", *BOUND)),
        "ratio": Variable(medians(samples / samples[:, :1]), "1", ("routing", "kind", *BOUND)),
        "share_of_one_product": Variable(medians(samples[:, 2] / samples[:, 1]), "1",
                                         ("routing", *BOUND)),
        "part_seconds": Variable(parts, "s", ("routing", "phase", "part", *BOUND)),
        **{name: Variable(values, units, ("routing",))
           for name, (values, units) in of_routing.items()}}
