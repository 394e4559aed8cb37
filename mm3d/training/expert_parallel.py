"""Divide the experts of a model among its replicas, and sum up how tokens were routed to them.

Direction e joins neighbouring replicas; each has other experts, and sees the tokens of the whole
group (`mm3d.training.mesh.DataGrid.with_experts`).  Each group has every expert once, so an
expert's gradient is summed over its copies along d and r, as for any parameter, and ZeRO divides a
rank's experts along d.  All losses and gradients are divided by the same number of tokens, the
whole batch's, so experts need no factor of their own.
"""

import math
from typing import Any, Iterable

import numpy as np

from mm3d.grid.grid import Grid
from mm3d.grid.layout import Layout
from mm3d.model.builder import ExpertRanks
from mm3d.model.experts.token_order import capacity_of
from mm3d.model.experts.options import ExpertOptions, check_experts_given
from mm3d.model.experts.totals import RoutingTotals, updated_bias
from mm3d.model.parameters import Parameter
from mm3d.model.transformer import Transformer
from mm3d.training.mesh import DataGrid, check_divisor
from mm3d.training.data_parallel import DataParallel


def expert_ranks(data: DataParallel | None, grid: DataGrid | None, batch: int) -> ExpertRanks:
    """Return the replicas that have other tokens, and the replicas that divide the experts.

    `data` and `grid` are the replicas and their directions, with e where experts are divided; None
    with one replica.  A micro-batch has `batch` sequences in all replicas.
    """
    if data is None or grid is None:
        return ExpertRanks()
    if "e" not in grid.shape:
        return ExpertRanks(grid.replicas, batch=batch)
    experts = data.on(grid)

    def create(name: str, _: Grid, layout: Layout, *more: Any) -> Parameter:
        return experts.create_parameter(name, grid, Layout(f"e{layout.spec}", layout.units), *more)
    return ExpertRanks(grid.replicas, grid["e"], create, batch)


def check_experts(experts: ExpertOptions | None, expert_parallel: Any, replicas: int,
                  tokens: int, layers: int | None = None) -> None:
    """Check the options of experts, and the number of replicas that divide them.

    `tokens` are those of a micro-batch in all `replicas`, `layers` those of the model.
    Raises ValueError when experts cannot be divided so, drop every token, or are in no layer.
    """
    check_experts_given(experts, layers)
    if experts is None:
        if expert_parallel != 1:
            raise ValueError(f"expert_parallel={expert_parallel!r} divides experts, but the model "
                             f"has none: experts=mm3d.Experts(...) would do")
        return
    capacity_of(experts, tokens)
    check_divisor(f"expert_parallel={expert_parallel!r} does", expert_parallel, replicas,
                  f"{replicas} replicas into equal groups")
    if expert_parallel > experts.count:
        raise ValueError(f"count={experts.count} experts cannot be divided among "
                         f"expert_parallel={expert_parallel} ranks: at least "
                         f"{expert_parallel} experts, or expert_parallel=1, would do")


def sum_routings(comm: Any, chunks: Iterable[Transformer],
                 microbatches: int) -> dict[str, RoutingTotals]:
    """Return the routing of each layer with experts in the forwards since the last call.

    Every rank must call it.  Numbers of tokens are sums over the micro-batches, and losses their
    means; sums are exact, so they do not depend on who has which rows.
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
    found = {}
    for name in sorted({name for one in every for name in one},
                       key=lambda name: int(name.split(".")[1])):    # the number of the layer
        parts = [one[name] for one in every if name in one]
        losses = (math.fsum(x for part in parts for x in part[n]) / microbatches for n in (2, 3))
        found[name] = RoutingTotals(name, *map(np.asarray, parts[0][:2]), *losses)
    return found


def update_biases(chunks: Iterable[Transformer], totals: dict[str, RoutingTotals],
                  rate: float) -> None:
    """Change the biases of the gate "sigmoid-bias" after a step; every rank must call it."""
    for chunk in chunks:
        for name, bias in chunk.routings.biases.items():
            # From the master: in 16 bits small steps would be rounded away.
            value = chunk.grid.backend.to_host(bias.master).astype(np.float64)
            bias.load(updated_bias(value, totals[name].chosen, rate))
