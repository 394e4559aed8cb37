"""Divide the experts of a model among its replicas.

Direction e joins neighbouring replicas; each has other experts, and sees the tokens of the whole
group (`mm3d.training.data_grid.DataGrid.with_experts`).  Each group has every expert once, so an
expert's gradient is summed over its copies along d and r, as for any parameter, and ZeRO divides a
rank's experts along d.  All losses and gradients are divided by the same number of tokens, the
whole batch's, so experts need no factor of their own.
"""

from typing import Any

from mm3d.grid.grid import Grid
from mm3d.grid.layout import Layout
from mm3d.model.experts.capacity import capacity_of
from mm3d.model.experts.options import ExpertOptions, check_experts_given
from mm3d.model.experts.shared import ExpertRanks
from mm3d.model.parameters import Parameter
from mm3d.training.data_grid import DataGrid
from mm3d.training.data_parallel import DataParallel
from mm3d.training.mesh import check_divisor


def expert_ranks(data: DataParallel | None, grid: DataGrid | None, batch: int) -> ExpertRanks:
    """Return the replicas that have other tokens, and the replicas that divide the experts.

    Parameters
    ----------
    data : DataParallel or None
        The replicas; None with one replica.
    grid : DataGrid or None
        The directions of replicas; with e where experts are divided.
    batch : int
        Number of sequences of a micro-batch in all replicas.
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

    Parameters
    ----------
    experts : ExpertOptions or None
        The options.
    expert_parallel : int
        The number of replicas that divide them.
    replicas : int
        Number of all replicas.
    tokens : int
        Number of tokens of a micro-batch in all replicas.
    layers : int, optional
        Number of layers of the model.

    Raises
    ------
    ValueError
        When experts cannot be divided so, drop every token, or are in no layer.
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
