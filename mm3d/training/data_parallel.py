"""Replicate a model over a direction of ranks, and divide its state among them: ZeRO 0 to 3.

Replicas compute with different rows of a batch, so the gradient of a parameter is the sum of
theirs.  A stage of ZeRO says what of a parameter is divided along direction d, and so held once:

=====  ========  =========  ========  =================================================
stage  master,   gradient   value     words of Psi parameters and k micro-batches, times
       moments                        N - 1 over all ranks
=====  ========  =========  ========  =================================================
0      whole     whole      whole     2 Psi: gradients are summed at the end of a step
1      divided   whole      whole     2 Psi: a sum, and a gather of what was updated
2      divided   divided    whole     (k + 1) Psi: a sum for each micro-batch
3      divided   divided    divided   3 k Psi: values are gathered for forward and for
                                      backward; 2 k for vectors, which forward saves
=====  ========  =========  ========  =================================================

A shard divides this rank's block further: the layout has the letter d after those of its first
dimension, so "xy,z" becomes "xyd,z", and a shard is a part of the global array like any block.

Terms are added in the order of the ranks in every stage.  With one micro-batch all stages compute
the same bits.  With several, 0 and 1 add the micro-batches of a rank before the ranks, 2 and 3 the
ranks of a micro-batch before the micro-batches, so only 0 equals 1, and 2 equals 3, to the bit.

Where d has not all replicas (hybrid sharding), the sums go on along r, over the copies of a shard.
"""

import numbers
from contextlib import contextmanager
from copy import copy
from typing import Any, Callable, Iterator

from mm3d.model.parameters import Parameter
from mm3d.training.data_grid import DataGrid
from mm3d.training.sharded_parameters import (ReplicatedParameter, ShardedGradient, ShardedMaster,
                                              ShardedValue, SummedParameter)

STAGES = (0, 1, 2, 3)


class DataParallel:
    """Create the parameters of one rank's replica, and sum their gradients over all replicas.

    Parameters
    ----------
    grid : DataGrid
        The ranks of a stage in all replicas.
    zero : {0, 1, 2, 3}
        The stage of ZeRO.
    in_flight : int
        How many sums of gradients go on while a rank computes, where the transport can: those of
        the parameters after which no gradient of the step is added (stages 0 and 1), or of a
        micro-batch (2 and 3).  0 sums at the end of a step, or at once.

    Attributes
    ----------
    parameters : list of Parameter
        Those created, in order.

    Raises
    ------
    ValueError
        When there is no such stage, or for a negative `in_flight`.
    """

    def __init__(self, grid: DataGrid, zero: int = 0, in_flight: int = 0) -> None:
        check_zero(zero)
        check_in_flight(in_flight)
        self.grid, self.zero, self.in_flight = grid, zero, in_flight
        self.parameters: list[SummedParameter] = []
        self._begun: list[Callable[[], Any]] = []    # each ends a sum

    def create_parameter(self, *arguments: Any) -> Parameter:
        """Create a parameter from the arguments of `mm3d.model.parameters.Parameter`."""
        kind = (ReplicatedParameter, ShardedMaster, ShardedGradient, ShardedValue)[self.zero]
        self.parameters.append(kind(*arguments, sums=self))
        return self.parameters[-1]

    def on(self, grid: DataGrid) -> "DataParallel":
        """Return what creates parameters whose copies lie otherwise, on `grid`.

        They are parameters of this one too, which sums their gradients.
        """
        other = copy(self)
        other.grid = grid
        return other

    @contextmanager
    def summed(self, microbatches: int) -> Iterator[None]:
        """Sum the gradients that are accumulated in this context over all replicas.

        Every rank must enter it, and accumulates as many micro-batches.  What the gradients
        were before is kept, and added once.
        """
        for p in self.parameters:
            p.begin_step(microbatches)
        yield
        self.finish()

    def finish(self) -> None:
        """Sum over all replicas what is not summed yet."""
        self.complete(0)
        for p in self.parameters:
            p.finish_step()
        self.complete(0)

    def start(self, end: Callable[[], Any]) -> None:
        """Take over a sum that was begun; `end` completes it."""
        self._begun.append(end)
        self.complete(self.in_flight)

    def complete(self, left: int) -> None:
        """Complete the sums in flight, but for the `left` newest."""
        while len(self._begun) > left:
            self._begun.pop(0)()


def check_zero(zero: Any) -> None:
    """Raise ValueError unless `zero` is a stage of ZeRO."""
    if zero not in STAGES or isinstance(zero, bool):
        raise ValueError(f"zero={zero!r} is no stage of ZeRO: 0 (replicas), 1 (optimizer state "
                         f"divided), 2 (gradients too) and 3 (parameters too) would do")


def check_in_flight(in_flight: Any) -> None:
    """Raise ValueError unless so many sums can be in flight."""
    if (not isinstance(in_flight, numbers.Integral) or isinstance(in_flight, bool)
            or in_flight < 0):
        raise ValueError(f"in_flight={in_flight!r} is no number of sums: 0 or more would do")
