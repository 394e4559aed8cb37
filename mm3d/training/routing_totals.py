"""Sum up how the tokens of a step were routed, over layers, micro-batches, ranks and stages."""

import math
from typing import Any, Iterable

import numpy as np

from mm3d.grid.layout import Layout
from mm3d.model.experts.totals import RoutingTotals, updated_bias
from mm3d.model.transformer import Transformer


def sum_routings(comm: Any, chunks: Iterable[Transformer],
                 microbatches: int) -> dict[str, RoutingTotals]:
    """Return the routing of each layer with experts in the forwards since the last call.

    Every rank must call it.  Numbers of tokens are sums over the micro-batches, and losses their
    means; sums are exact, so they do not depend on who has which rows.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        All ranks of the model.
    chunks : iterable of Transformer
        This rank's chunks.
    microbatches : int
        Number of micro-batches.
    """
    own: dict[str, list] = {}
    for chunk in chunks:
        rows = Layout(chunk.outer.rows).letters
        counted = not any(n for c, n in chunk.grid.coords.items() if c not in rows)
        for one in chunk.routings.totals:
            found = own.setdefault(one.name, [0, 0, [], []])
            found[0], found[1] = found[0] + one.chosen, found[1] + one.dropped
            if counted:
                found[2].append(one.balance)
                found[3].append(one.z)
        chunk.routings.totals.clear()
    every = comm.allgather(own)
    names = dict.fromkeys(name for one in every for name in one)
    return {name: _join(name, [one[name] for one in every if name in one], microbatches)
            for name in sorted(names, key=_number)}


def _join(name: str, parts: list[list], microbatches: int) -> RoutingTotals:
    """Join the totals of one layer from the ranks that have it."""
    balance, z = (math.fsum(x for part in parts for x in part[n]) / microbatches for n in (2, 3))
    return RoutingTotals(name, *map(np.asarray, parts[0][:2]), balance, z)


def _number(name: str) -> int:
    """Return the number of a layer, from its name in the model."""
    return int(name.split(".")[1])


def update_biases(chunks: Iterable[Transformer], totals: dict[str, RoutingTotals],
                  rate: float) -> None:
    """Change the biases of the gate "sigmoid-bias" after a step; every rank must call it."""
    for chunk in chunks:
        for name, bias in chunk.routings.biases.items():
            # From the master: in 16 bits small steps would be rounded away.
            value = chunk.grid.backend.to_host(bias.master).astype(np.float64)
            bias.load(updated_bias(value, totals[name].chosen, rate))
