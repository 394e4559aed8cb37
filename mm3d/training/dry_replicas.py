"""Trace a rank of replicas that divide the experts of a model, without running them.

A dry run (`mm3d.tracing.dry_run`) knows no values, so which experts tokens choose is assumed
(`mm3d.model.experts.assumed`): all equally often, or those of the traced rank more often.  All
that follows from the choice is exact: rows, products, collectives and memory.
"""

from typing import Any, Callable

from mm3d.grid.grid import GridAxes
from mm3d.model.experts.options import Experts
from mm3d.schemes.scheme import Scheme
from mm3d.training.data_grid import DataGrid
from mm3d.training.data_parallel import DataParallel
from mm3d.training.expert_parallel import check_experts, expert_ranks
from mm3d.training.mesh import check_data
from mm3d.transport.silent import DryCommunicator


class JoinedAxes(GridAxes):
    """Join the directions of the replicas and those of the grid of each, with their traffic.

    Parameters
    ----------
    data : DataGrid
        The replicas; of divided experts their grid, since nothing else goes between replicas here.
    """

    def __init__(self, data: DataGrid) -> None:
        self.comm, self.backend = data.comm, data.backend
        self.shape, self.coords = data.shape, data.coords
        self.axes = {**data.axes, **data.grid.axes}


def replicas_with_experts(experts: Experts, batch: int, seq: int, data: int, replica: int = 0,
                          expert_parallel: int = 1, shards: int | None = None,
                          way: str = "fewest", imbalance: float = 1.0
                          ) -> Callable[[Scheme], tuple[GridAxes, dict[str, Any]]]:
    """Return the argument `replicas` of `mm3d.tracing.dry_run.trace_step` for a model of experts.

    Parameters
    ----------
    experts : Experts
        The options of its experts, which `trace_step` gets too.
    batch, seq : int
        Number of sequences of each replica, and of positions in each.
    data, replica : int
        Number of replicas, and the one of the traced rank.
    expert_parallel, way
        As for `mm3d.Pipeline`.
    shards : int, optional
        As for `mm3d.Mesh`.
    imbalance : float
        How many times their equal share the experts of the traced rank get.

    Raises
    ------
    ValueError
        For numbers of replicas that cannot be, when experts cannot be divided so, or when a rank
        cannot get so many tokens.
    """
    shards = check_data(data, data, shards)
    check_experts(experts, expert_parallel, data, data * batch * seq, way)
    if imbalance != 1 and expert_parallel == 1:
        raise ValueError(f"imbalance={imbalance:g} is that of a rank with a part of the experts: "
                         f"expert_parallel={data} would do, or leave it out")

    def make(scheme: Scheme) -> tuple[GridAxes, dict[str, Any]]:
        if data == 1:
            return scheme.grid, {}
        ranks, rank = scheme.grid.size, scheme.grid.rank
        grid = DataGrid(DryCommunicator(data * ranks, replica * ranks + rank), scheme.grid, shards)
        sums = DataParallel(grid)
        own = grid.with_experts(expert_parallel) if expert_parallel > 1 else grid
        found = expert_ranks(sums, own, way, data * batch, imbalance)
        return JoinedAxes(own), {"parameter": sums.create_parameter, "expert_ranks": found}
    return make
