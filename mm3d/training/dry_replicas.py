"""Trace a rank of replicas that divide parameters or experts of a model, without running them.

With `replicas_with_zero` a dry run counts what replicas of a model send each other for its
parameters in each stage of ZeRO.  With `replicas_with_experts` it counts the exchange of tokens
too.  It knows no values, so which experts tokens choose is assumed
(`mm3d.model.experts.assumed`): all equally often, or those of the traced rank more often.  All
that follows from the choice is exact: rows, products, collectives and memory.
"""

from typing import Any, Callable

from mm3d.grid.grid import GridAxes
from mm3d.grid.shape import GridShape
from mm3d.model.experts.options import ExpertOptions
from mm3d.schemes.scheme import Scheme
from mm3d.training.data_grid import DataGrid
from mm3d.training.data_parallel import DataParallel, check_zero
from mm3d.training.expert_parallel import check_experts, expert_ranks
from mm3d.training.mesh import check_data
from mm3d.transport.silent import DryCommunicator


class JoinedAxes(GridAxes):
    """Join the directions of the replicas and those of the grid of each, with their traffic.

    Parameters
    ----------
    data : DataGrid
        The replicas; of divided experts their grid, since nothing else goes between replicas here.
    stages : int
        Number of stages of a replica, whose ranks lie between those of a stage in two replicas.
    """

    def __init__(self, data: DataGrid, stages: int = 1) -> None:
        self.comm, self.backend = data.comm, data.backend
        inner = dict(data.grid.shape)
        outer = {name: size for name, size in data.shape.items() if name not in inner}
        self.shape = GridShape.from_sizes(outer | {"s": stages} | inner)
        self.coords = data.coords
        self.axes = {**data.axes, **data.grid.axes}


def replicas_with_experts(experts: ExpertOptions, batch: int, seq: int, data: int,
                          replica: int = 0, expert_parallel: int = 1, shards: int | None = None,
                          way: str = "fewest", imbalance: float = 1.0
                          ) -> Callable[[Scheme], tuple[GridAxes, dict[str, Any], None]]:
    """Return the argument `replicas` of `mm3d.tracing.dry_run.trace_step` for a model of experts.

    Parameters
    ----------
    experts : ExpertOptions
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

    def make(scheme: Scheme) -> tuple[GridAxes, dict[str, Any], None]:
        if data == 1:
            return scheme.grid, {}, None
        ranks, rank = scheme.grid.size, scheme.grid.rank
        grid = DataGrid(DryCommunicator(data * ranks, replica * ranks + rank), scheme.grid, shards)
        sums = DataParallel(grid)
        own = grid.with_experts(expert_parallel) if expert_parallel > 1 else grid
        found = expert_ranks(sums, own, way, data * batch, imbalance)
        return JoinedAxes(own), {"parameter": sums.create_parameter, "expert_ranks": found}, None
    return make


def replicas_with_zero(data: int, zero: int = 0, replica: int = 0, shards: int | None = None,
                       stages: int = 1) -> Callable[
                           [Scheme], tuple[GridAxes, dict[str, Any], Callable[[], None] | None]]:
    """Return the argument `replicas` of `mm3d.tracing.dry_run.trace_step` for a stage of ZeRO.

    The trace of one micro-batch then has its gathers of values and its sums of gradients, in
    stages 2 and 3, and in the phase "sums" what is sent once a step: sums of gradients after the
    last micro-batch, and the gather of values after the optimizer.

    Parameters
    ----------
    data, zero, shards
        As in `mm3d.training.data_costs.data_words`.
    replica : int
        The replica of the traced rank.
    stages : int
        Number of stages of each replica, for the strides of the directions of replicas.

    Raises
    ------
    ValueError
        For numbers of replicas that cannot be, or no stage of ZeRO.
    """
    check_zero(zero)
    shards = check_data(data, data, shards)

    def make(scheme: Scheme) -> tuple[GridAxes, dict[str, Any], Callable[[], None] | None]:
        if data == 1:
            return scheme.grid, {}, None
        ranks, rank = scheme.grid.size, scheme.grid.rank
        grid = DataGrid(DryCommunicator(data * ranks, replica * ranks + rank), scheme.grid, shards)
        sums = DataParallel(grid, zero)

        def end() -> None:
            for p in sums.parameters:
                p.finish_step()
            sums.complete(0)
            for p in sums.parameters:
                p.refresh()
        return JoinedAxes(grid, stages), {"parameter": sums.create_parameter}, end
    return make
