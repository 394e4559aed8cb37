"""Derive how far the losses of meshes are from those of one rank."""

import numpy as np

from bench.records.measurements import Measurements, Variable

ROUTED = ("chosen", "dropped")    # pairs of a token and a choice that meshes are compared by


def derive(record: Measurements) -> dict[str, Variable]:
    """Return the largest relative difference of a loss of each mesh."""
    return {"loss_difference": Variable(loss_differences(record).max(axis=1), "1", ("mesh",))}


def loss_differences(record: Measurements) -> np.ndarray:
    """Compute the relative difference of each mesh's loss to one rank's, (mesh, step)."""
    losses, meshes = record.raw["loss"].values, list(record.scales["mesh"])
    names = str(record.configuration.get("one_rank", "; ".join(meshes[:1] * len(meshes))))
    expected = losses[[meshes.index(name) for name in names.split("; ")]]
    return np.abs(losses - expected) / expected
