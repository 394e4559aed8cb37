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

from mm3d.arrays.backend import Array, namespace
from mm3d.arrays.plain_numbers import is_whole
from mm3d.grid.grid import Grid
from mm3d.grid.layout import Layout
from mm3d.grid.split import Split
from mm3d.model.parameters import Parameter
from mm3d.training.mesh import DataGrid
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


def shard_layout(layout: Layout) -> Layout:
    """Return the layout of the shards of blocks in `layout`: d divides their first dimension.

    Vectors on a diagonal are divided further in the first dimension that is divided already.
    """
    dims = layout.spec.partition("@")[0].split(",")    # as written, with the 0 of faces
    place = next(n for n, letters in enumerate(dims) if letters) if layout.diagonal else 0
    # What is whole is divided in single elements: nothing need stay together in a shard.
    units = {dim: unit for dim, unit in layout.units.items() if dims[dim] or dim != place}
    dims[place] += "d"
    return Layout(",".join(dims) + ("@" + layout.diagonal if layout.diagonal else ""), units)


class SummedParameter(Parameter):
    """Hold a parameter whose gradient `sums`, a `DataParallel`, adds up over replicas.

    That is once a step: over micro-batches, in `_terms`, then over replicas, as `_split` divides
    it among them.
    """

    _terms: Array
    _split: Split

    def __init__(self, name: str, grid: Grid, layout: Layout, shape: tuple[int, ...],
                 dtype: Any, gathered_along: Split | None = None, master: Any = None, *,
                 sums: Any) -> None:
        self.sums, self.data = sums, sums.grid
        self.stored = layout.owns_block(grid)
        self._left = 0
        super().__init__(name, *self._place(grid, layout), shape, dtype, gathered_along, master)

    def _place(self, grid: Grid, layout: Layout) -> tuple[Any, Layout]:
        """Return the grid and the layout of master and gradient."""
        return grid, layout

    @property
    def first(self) -> bool:
        """Return whether this rank keeps the gradient from before a step."""
        return self.data.coords["r"] == 0

    def twin(self) -> Parameter:
        other = super().twin()
        self.sums.parameters.append(other)
        return other

    def begin_step(self, microbatches: int) -> None:
        """Prepare the gradient: its earlier value must be counted once."""
        if not self.first:
            self.begin_gradient()
        self._left = microbatches

    def accumulate(self, gradient: Array | None) -> None:
        super().accumulate(gradient)
        self._left -= 1
        if not self._left and self.sums.in_flight:
            self._begin_sum()

    def finish_step(self) -> None:
        """Complete the gradient at the end of a step."""
        if self._left or not self.sums.in_flight:
            self._left = 0
            self._begin_sum()

    def _begin_sum(self) -> None:
        """Begin to sum the gradient over the replicas, by a reduce-scatter along d."""
        self.finish_gradient()
        if self.stored:
            pending = self._split.begin_reduce_scatter(self._terms)
            self.sums.start(pending, self._finish_sum)

    def _finish_sum(self, pending: Pending) -> None:
        """Complete the gradient from the sum of this rank's block."""
        self.grad[...] = pending.take()
        self._sum_copies()

    def _sum_copies(self) -> None:
        """Add the shards of the other copies of the model."""
        if self.stored and self.data["r"].size > 1:
            self.grad[...] = self.data["r"].all_reduce(self.grad)


class ReplicatedParameter(SummedParameter):
    """Hold a parameter whose value, gradient and master are whole on every replica (ZeRO-0)."""

    def __init__(self, *given: Any, **sums: Any) -> None:
        super().__init__(*given, **sums)
        self.first_copy = self.first

    def _allocate_gradient(self) -> None:
        super()._allocate_gradient()
        self._terms = namespace(self.grad).reshape(self.grad, (self.grad.size,))
        self._split = Split(self.data["d"], 0, self.grad.size)

    @property
    def first(self) -> bool:
        return self.data.coords["r"] == self.data.coords["d"] == 0

    def _finish_sum(self, pending: Pending) -> None:
        self._terms[...] = self._split.all_gather(pending.take())
        self._sum_copies()


class _ShardedParameter(SummedParameter):
    """Hold a parameter whose master is sharded along d; each replica has the whole value.

    The master of a rank is a part of the value where it can be.
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
        layout, grid = self.whole
        whole = layout.local_shape(grid, self.shape)
        self.value = (gathered_along or self.data.backend).empty(whole, self.dtype)
        self.master = (self.data.backend.empty(local, master) if self.has_master else
                       self._part_of(self.value))

    def _part_of(self, whole: Array) -> Array:
        """Return this rank's shard of `whole`, as a view if that is contiguous."""
        part, backend = whole[self._own], self.data.backend
        if backend.is_contiguous(part):
            return part
        return backend.empty(tuple(part.shape), part.dtype)

    rounded = None    # `value` has the shards of others, too

    def refresh(self) -> None:
        """Round the shards of the master to the type of `value`, and gather them in `value`."""
        if self.stored:
            xp, dtype = namespace(self.master), self.value.dtype
            rounded = xp.astype(self.master, dtype) if self.has_master else self.master
            self.value[...] = self._split.all_gather(rounded)


class ShardedMaster(_ShardedParameter):
    """Hold a parameter whose master alone is sharded along d (ZeRO-1).

    The gradient of a rank is a part of the whole one where it can be.
    """

    allocated = ("value", "_terms")

    def _allocate_gradient(self) -> None:
        """Allocate the sum over the micro-batches of this rank, and `grad`, a part of it."""
        self._terms = self.data.backend.empty(self.value.shape, self.master.dtype)
        self.grad = self._part_of(self._terms)

    @property
    def _sum(self) -> Array:
        return self._terms

    def zero_gradient(self) -> None:
        self._terms[...] = 0
        super().zero_gradient()

    def begin_step(self, microbatches: int) -> None:
        super().begin_step(microbatches)
        if self._has_terms:
            *before, own, _ = self._own
            for others in (slice(own.start), slice(own.stop, None)):
                self._terms[(*before, others, Ellipsis)] = 0
            self._terms[self._own] = self.grad


class ShardedGradient(_ShardedParameter):
    """Hold a parameter whose master and gradient are sharded along d (ZeRO-2)."""

    def empty_gradient(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate a term of the whole gradient; this rank keeps its shard of the sum."""
        return self.data.backend.empty(shape, dtype)

    def accumulate(self, gradient: Array | None) -> None:
        """Add the sum of all replicas' gradients of a micro-batch to this rank's shard."""
        if gradient is not None and self.stored:
            pending = self._split.begin_reduce_scatter(gradient)
            self.sums.start(pending, self._finish_sum)

    def _finish_sum(self, pending: Pending) -> None:
        Parameter.accumulate(self, pending.take())

    def finish_step(self) -> None:
        self.finish_gradient()
        self._sum_copies()


class ShardedValue(ShardedGradient):
    """Hold a parameter whose value, gradient and master are sharded along d (ZeRO-3).

    Each read of `value` gathers the whole block, which lives as long as it is used.
    """

    allocated = ("_shard", "grad")
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
    def rounded(self) -> Array | None:
        return self._shard if self.has_master else None

    refresh = Parameter.refresh
