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
from functools import partial
from typing import Any, Callable, Iterator

from mm3d.arrays.backend import Array, namespace
from mm3d.grid.grid import Grid
from mm3d.grid.layout import Layout
from mm3d.grid.split import Split
from mm3d.model.parameters import Parameter
from mm3d.training.data_grid import DataGrid
from mm3d.transport.pending import Pending

STAGES = (0, 1, 2, 3)


def shard_layout(layout: Layout) -> Layout:
    """Return the layout of the shards of blocks in `layout`: d divides their first dimension.

    Vectors on a diagonal are divided in the first dimension that a direction divides, since the
    diagonal is that of the first letter.
    """
    dims = layout.spec.partition("@")[0].split(",")    # as written, with the 0 of faces
    place = next(n for n, letters in enumerate(dims) if letters) if layout.diagonal else 0
    # What is whole is divided in single elements: nothing need stay together in a shard.
    units = {dim: unit for dim, unit in layout.units.items() if dims[dim] or dim != place}
    dims[place] += "d"
    return Layout(",".join(dims) + ("@" + layout.diagonal if layout.diagonal else ""), units)


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

    @contextmanager
    def summed(self, microbatches: int) -> Iterator[None]:
        """Sum the gradients that are accumulated in this context over all replicas.

        Every rank must enter it, and accumulates as many micro-batches.  What the gradients
        were before is kept, and added once.
        """
        for p in self.parameters:
            p.begin_step(microbatches)
        yield
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


class SummedParameter(Parameter):
    """Hold a parameter whose gradient is summed over replicas; parameters as for `Parameter`.

    Further parameters
    ------------------
    sums : DataParallel
        Sums its gradient.
    """

    def __init__(self, name: str, grid: Grid, layout: Layout, shape: tuple[int, ...],
                 dtype: Any, gathered_along: Split | None = None, master: Any = None, *,
                 sums: DataParallel) -> None:
        self.sums, self.data = sums, sums.grid
        self.stored = layout.owns_block(grid)
        self._left, self._is_zero = 0, False
        super().__init__(name, *self._place(grid, layout), shape, dtype, gathered_along, master)
        self.first_copy = self._has_first_copy()

    def _place(self, grid: Grid, layout: Layout) -> tuple[Any, Layout]:
        """Return the grid and the layout of master and gradient."""
        return grid, layout

    def _has_first_copy(self) -> bool:
        """Return whether no rank outside `grid` holds this block already."""
        return True

    @property
    def first(self) -> bool:
        """Return whether this rank keeps what the gradient was before a step."""
        return self.data.coords["r"] == 0

    def twin(self) -> Parameter:
        other = super().twin()
        self.sums.parameters.append(other)
        return other

    def zero_gradient(self) -> None:
        self.grad[...] = 0
        self._is_zero = True

    def begin_step(self, microbatches: int) -> None:
        """Prepare the gradient: what it was before must be counted once."""
        if not self._is_zero and not self.first:
            self.grad[...] = 0
        self._left, self._is_zero = microbatches, False

    def finish_step(self) -> None:
        """Complete the gradient at the end of a step."""

    def _sum_copies(self) -> None:
        """Add the shards of the other copies of the model."""
        if self.stored and self.data.replicated.size > 1:
            self.grad[...] = self.data.replicated.all_reduce(self.grad)


class ReplicatedParameter(SummedParameter):
    """Hold a parameter of which every replica has master, gradient and value (stage 0)."""

    def _allocate_gradient(self) -> None:
        super()._allocate_gradient()
        self._flat = namespace(self.grad).reshape(self.grad, (self.grad.size,))
        self._split = Split(self.data["d"], 0, self.grad.size)

    @property
    def first(self) -> bool:
        return self.data.coords["r"] == self.data.coords["d"] == 0

    def _has_first_copy(self) -> bool:
        return self.first

    def accumulate(self, gradient: Array | None) -> None:
        super().accumulate(gradient)
        self._left -= 1
        if not self._left and self.sums.in_flight:
            self._begin_sum()

    def finish_step(self) -> None:
        if self._left or not self.sums.in_flight:
            self._left = 0
            self._begin_sum()

    def _begin_sum(self) -> None:
        """Begin to sum the gradient, as blocks that are gathered at the end."""
        if self.stored:
            pending = self._split.begin_reduce_scatter(self._flat)
            self.sums.start(partial(self._finish_sum, pending))

    def _finish_sum(self, pending: Pending) -> None:
        self._flat[...] = self._split.all_gather(pending.take())
        self._sum_copies()


class ShardedMaster(SummedParameter):
    """Hold a parameter whose master alone is divided along d (stage 1).

    Master and gradient of a rank are parts of the whole arrays where they can be.
    """

    def _place(self, grid: Grid, layout: Layout) -> tuple[Any, Layout]:
        self.whole = layout, grid
        return self.data, shard_layout(layout)

    def _allocate(self, gathered_along: Split | None, master: Any) -> None:
        local = self.layout.local_shape(self.data, self.shape)
        self._split = self.layout.split(self.data, self.shape, "d")
        start = sum(self._split.counts[:self._split.axis.rank]) if self.stored else 0
        stop = start + local[self._split.dim]
        self._own = (slice(None),) * self._split.dim + (slice(start, stop), Ellipsis)
        self._allocate_value(gathered_along)
        self.master = (self.data.backend.empty(local, master) if self.has_master else
                       self._part_of(self.value))

    def _allocate_value(self, gathered_along: Split | None) -> None:
        """Allocate `value`, this rank's whole block."""
        layout, grid = self.whole
        whole = layout.local_shape(grid, self.shape)
        self.value = (gathered_along or self.data.backend).empty(whole, self.dtype)

    def _allocate_gradient(self) -> None:
        """Allocate the sum over the micro-batches of this rank, and `grad`, a part of it."""
        self._sum = self.data.backend.empty(self.value.shape, self.master.dtype)
        self.grad = self._part_of(self._sum)

    def _part_of(self, whole: Array) -> Array:
        """Return this rank's shard of `whole`, as a view if that is contiguous."""
        part, backend = whole[self._own], self.data.backend
        if backend.is_contiguous(part):
            return part
        return backend.empty(tuple(part.shape), part.dtype)

    @property
    def nbytes(self) -> int:
        held = [self.value, self._sum, *([self.master] if self.has_master else ())]
        return sum(a.nbytes for a in held)

    def refresh(self) -> None:
        """Round the shards of the master to the type of `value`, and gather them in `value`."""
        if self.stored:
            xp, dtype = namespace(self.master), self.value.dtype
            rounded = xp.astype(self.master, dtype) if self.has_master else self.master
            self.value[...] = self._split.all_gather(rounded)

    def zero_gradient(self) -> None:
        self._sum[...] = 0
        super().zero_gradient()

    def begin_step(self, microbatches: int) -> None:
        if not self._is_zero:
            *before, own, _ = self._own
            for others in (slice(own.start), slice(own.stop, None)):
                self._sum[(*before, others, Ellipsis)] = 0
            self._sum[self._own] = self.grad if self.first else 0
        self._left, self._is_zero = microbatches, False

    def accumulate(self, gradient: Array | None) -> None:
        if gradient is not None:
            self._sum += gradient
        self._left -= 1
        if not self._left and self.sums.in_flight:
            self._begin_sum()

    def finish_step(self) -> None:
        if self._left or not self.sums.in_flight:
            self._left = 0
            self._begin_sum()

    def _begin_sum(self) -> None:
        """Begin to sum the gradient, of which this rank keeps its shard."""
        if self.stored:
            pending = self._split.begin_reduce_scatter(self._sum)
            self.sums.start(partial(self._finish_sum, pending))

    def _finish_sum(self, pending: Pending) -> None:
        self.grad[...] = pending.take()
        self._sum_copies()


class ShardedGradient(ShardedMaster):
    """Hold a parameter whose master and gradient are divided along d (stage 2)."""

    _allocate_gradient = SummedParameter._allocate_gradient

    @property
    def nbytes(self) -> int:
        held = [self.value, self.grad, *([self.master] if self.has_master else ())]
        return sum(a.nbytes for a in held)

    zero_gradient = SummedParameter.zero_gradient
    begin_step = SummedParameter.begin_step

    def accumulate(self, gradient: Array | None) -> None:
        """Add the sum of all replicas' gradients of a micro-batch to this rank's shard."""
        if gradient is not None and self.stored:
            pending = self._split.begin_reduce_scatter(gradient)
            self.sums.start(partial(self._finish_sum, pending))

    def _finish_sum(self, pending: Pending) -> None:
        self.grad += pending.take()

    def finish_step(self) -> None:
        self._sum_copies()


class ShardedValue(ShardedGradient):
    """Hold a parameter of which everything is divided along d (stage 3).

    Each read of `value` gathers the whole block, which lives as long as it is used.
    """

    gathered_when_read = True

    def _allocate(self, gathered_along: Split | None, master: Any) -> None:
        local, backend = self.layout.local_shape(self.data, self.shape), self.data.backend
        self._split = self.layout.split(self.data, self.shape, "d")
        self._shard = (self._split if self.stored else backend).empty(local, self.dtype)
        self.master = backend.empty(local, master) if self.has_master else self._shard

    @property
    def value(self) -> Array:
        """Gather this rank's block from the shards; every rank along d must read it."""
        return self._split.all_gather(self._shard) if self.stored else self._shard

    @property
    def nbytes(self) -> int:
        held = [self._shard, self.grad, *([self.master] if self.has_master else ())]
        return sum(a.nbytes for a in held)

    def refresh(self) -> None:
        """Round the shard of the master to the type of values."""
        if self.has_master:
            xp = namespace(self.master)
            self._shard[...] = xp.astype(self.master, self._shard.dtype)
