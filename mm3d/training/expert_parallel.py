"""Divide the experts of a model among its replicas.

The direction of experts is direction d of the replicas (`mm3d.training.data_grid`): each rank
along it has other experts, which see the tokens of all of them, so their gradients are sums over
these tokens already.  Only the copies along r are added.  All losses and gradients are divided by
the same number of tokens, that of the whole batch, so experts need no factor of their own.
"""

from typing import Any

from mm3d.grid.grid import Grid
from mm3d.grid.layout import Layout
from mm3d.model.experts.capacity import capacity_of
from mm3d.model.experts.dispatch import WAYS
from mm3d.model.experts.options import Experts
from mm3d.model.experts.shared import ExpertRanks
from mm3d.training.data_parallel import DataParallel
from mm3d.training.sharded_parameters import SummedParameter


class DividedExperts(SummedParameter):
    """Hold what of a parameter, (experts, ...), belongs to this rank's experts.

    Value, master and gradient are there once along d, in every stage of ZeRO.
    """

    def _place(self, grid: Grid, layout: Layout) -> tuple[Any, Layout]:
        return self.data, Layout(f"d{layout.spec}", layout.units)

    def finish_step(self) -> None:
        self._sum_copies()


def expert_ranks(data: DataParallel | None, divided: bool, way: str, batch: int,
                 imbalance: float = 1.0) -> ExpertRanks:
    """Return the replicas that have other tokens, and with `divided` other experts.

    Parameters
    ----------
    data : DataParallel or None
        The replicas; None where there is one.
    divided : bool
        Whether direction d divides the experts.
    way : {"fewest", "exchange", "gather"}
        How rows come to divided experts.
    batch : int
        Number of sequences of a micro-batch in all replicas.
    imbalance : float
        See `mm3d.model.experts.shared.ExpertRanks`.
    """
    if data is None:
        return ExpertRanks()
    replicas = [data.grid[name] for name in "rd"]
    if not divided:
        return ExpertRanks(replicas, batch=batch)

    def create(*arguments: Any) -> DividedExperts:
        data.parameters.append(DividedExperts(*arguments, sums=data))
        return data.parameters[-1]
    return ExpertRanks(replicas, data.grid["d"], create, way, batch, imbalance)


def check_experts(experts: Experts | None, expert_parallel: Any, shards: int, replicas: int,
                  tokens: int, way: str) -> None:
    """Check the options of experts, and the number of ranks that divide them.

    Parameters
    ----------
    experts : Experts or None
        The options.
    expert_parallel : int
        This number.
    shards, replicas : int
        Size of direction d, and number of all replicas.
    tokens : int
        Number of tokens of a micro-batch in all replicas.
    way : str
        How rows come to divided experts.

    Raises
    ------
    ValueError
        When experts cannot be divided so, or drop every token.
    """
    if experts is None:
        if expert_parallel != 1:
            raise ValueError(f"expert_parallel={expert_parallel!r} divides experts, but the model "
                             f"has none: experts=mm3d.Experts(...) would do")
        return
    experts.check()
    if way not in WAYS:
        raise ValueError(f"expert_way={way!r} is unknown: choose one of {', '.join(WAYS)}")
    capacity_of(experts, tokens)
    if isinstance(expert_parallel, bool) or expert_parallel not in (1, shards):
        more = f", or a mesh with shards={expert_parallel!r}" if replicas > shards else ""
        raise ValueError(f"expert_parallel={expert_parallel!r}: experts are divided among the "
                         f"{shards} replicas that ZeRO divides a copy among, or not at all: "
                         f"{' or '.join(map(str, dict.fromkeys((1, shards))))} would do{more}")
    if expert_parallel > experts.count:
        raise ValueError(f"count={experts.count} experts cannot be divided among "
                         f"expert_parallel={expert_parallel} ranks: at least "
                         f"{expert_parallel} experts, or expert_parallel=1, would do")
