"""Replicate a model over a direction of ranks, and divide its state among them: ZeRO 0 to 3.

Replicas compute with different rows of a batch, so a parameter's gradient is the sum over them.  A
stage of ZeRO says which arrays of a parameter are divided along direction d, and so held once:
``README.rst`` has a table of them, and of the words that they move.

A shard divides this rank's block further: the layout has the letter d last in its first
dimension, so "xy,z" becomes "xyd,z", and a shard is a part of the global array like any block.

Terms are added in the order of the ranks in every stage.  With one micro-batch all stages compute
the same bits.  With several, 0 and 1 add the micro-batches of a rank before the ranks, 2 and 3 the
ranks of a micro-batch before the micro-batches, so only 0 equals 1, and 2 equals 3, to the bit.

Where d does not join all replicas (hybrid sharding), the copies of a shard are summed along r.
"""

from contextlib import contextmanager
from copy import copy
from typing import Any, Callable, Iterator

from mm3d.arrays.plain_numbers import is_whole
from mm3d.model.parameters import Parameter
from mm3d.training.mesh import DataGrid
from mm3d.training.sharded_parameters import (ReplicatedParameter, ShardedGradient, ShardedMaster,
                                              ShardedValue, SummedParameter)
from mm3d.transport.pending import Pending

STAGES = (0, 1, 2, 3)


class DataParallel:
    """Create the parameters of one rank's replica, and sum their gradients over all replicas.

    `grid` has the ranks of a stage in all replicas, and `zero` is the stage of ZeRO.  While a rank
    computes, `in_flight` sums of gradients may go on, where the transport can.  A sum begins after
    the last gradient of a parameter in a step (stages 0 and 1), or after each micro-batch (2 and
    3).  With 0 it blocks, at the end of a step, or at once.  `parameters` has all that were
    created, in order.
    """

    def __init__(self, grid: DataGrid, zero: int = 0, in_flight: int = 0) -> None:
        self.grid, self.zero, self.in_flight = grid, zero, in_flight
        self.parameters: list[SummedParameter] = []
        self._begun: list[tuple[Pending, Callable[[Pending], Any]]] = []    # what ends each

    def create_parameter(self, *arguments: Any) -> Parameter:
        """Create a parameter from the arguments of `mm3d.model.parameters.Parameter`."""
        kind = (ReplicatedParameter, ShardedMaster, ShardedGradient, ShardedValue)[self.zero]
        self.parameters.append(kind(*arguments, sums=self))
        return self.parameters[-1]

    def on(self, grid: DataGrid) -> "DataParallel":
        """Return a copy that creates parameters with their copies on another `grid`.

        They are added to `parameters` here too, and their gradients summed with the others.
        """
        other = copy(self)
        other.grid = grid
        return other

    @contextmanager
    def summed(self, microbatches: int) -> Iterator[None]:
        """Sum the gradients that are accumulated in this context over all replicas.

        Every rank must enter it, and accumulates the same number of micro-batches.  Earlier
        gradients are kept, and counted once.
        """
        while self._begun:    # in a step that failed, alike on all ranks
            self._begun.pop(0)[0].take()
        for p in self.parameters:
            p.begin_step(microbatches)
        try:
            yield
            self.finish()
        finally:    # also of a step that failed
            for p in self.parameters:
                p.finish_gradient()

    def finish(self) -> None:
        """Sum the gradients that are not summed yet over all replicas."""
        self.complete(0)
        for p in self.parameters:
            p.finish_step()
        self.complete(0)

    def start(self, pending: Pending, end: Callable[[Pending], Any]) -> None:
        """Add a sum in flight, which `end` completes."""
        self._begun.append((pending, end))
        self.complete(self.in_flight)

    def complete(self, left: int) -> None:
        """Complete the sums in flight, but for the `left` newest."""
        while len(self._begun) > left:
            pending, end = self._begun.pop(0)
            end(pending)


def check_zero(zero: Any) -> None:
    """Raise ValueError unless `zero` is a stage of ZeRO."""
    if not is_whole(zero, 0) or zero not in STAGES:
        raise ValueError(f"zero={zero!r} is no stage of ZeRO: 0 (replicas), 1 (optimizer state "
                         f"divided), 2 (gradients too) and 3 (parameters too) would do")
