"""Send activations, and gradients of a tied table, between the ranks of two stages.

A rank sends the part of its own block that another rank is to hold, straight to that rank:
where both stages have the same grid, its whole block in one message.  Nothing is gathered.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Mapping, Sequence

from mm3d.arrays.backend import Array
from mm3d.grid.axis import Traffic
from mm3d.grid.layout import Layout
from mm3d.grid.shape import GridShape
from mm3d.model.parameters import Parameter
from mm3d.schemes.scheme import Scheme
from mm3d.training.mesh import Mesh
from mm3d.training.schedules.schedule import Completion, Schedule
from mm3d.training.data_parallel import shard_layout
from mm3d.transport.pending import Pending
from mm3d.transport.point_to_point import PointToPoint, tag_count


Box = tuple[tuple[int, int], ...]    # start and stop in each dimension


@dataclass(frozen=True)
class Transfer:
    """Describe a part of an activation that a rank of one stage sends to a rank of another."""

    # The ranks, by their numbers in their stages.
    source: int
    target: int
    box: Box    # the part, in the global activation

    @property
    def words(self) -> int:
        """The number of elements."""
        return math.prod(stop - start for start, stop in self.box)


def layout_blocks(layout: Layout, grid: GridShape, shape: tuple[int, ...]) -> list[Box]:
    """Return the block of an array of global `shape` that each rank of a grid holds."""
    return [tuple((one.start, one.stop) for one in layout.slices(grid, shape, coords))
            for coords in grid.all_coordinates()]


def activation_blocks(scheme: type[Scheme], grid: GridShape, shape: tuple[int, int, int],
                      options: Mapping[str, Any]) -> list[Box]:
    """Return the block of an activation of global `shape` that each rank of a grid holds."""
    rows, features = scheme.layouts(grid, *shape[:2], **options)[0][:2]
    return layout_blocks(Layout(f"{rows},{features}"), grid, shape)


def transfers(sources: Sequence[Box], targets: Sequence[Box], source: int | None = None,
              target: int | None = None) -> list[Transfer]:
    """List what the ranks of one stage send to the ranks of another, from the blocks of both.

    Where several ranks hold copies of a block, each target receives from the one of its own
    number, or else from one of them in turn.  With `source` or `target` only what that rank
    sends or receives is looked for, in a time linear in the number of blocks.
    """
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(sources):
        holders.setdefault(box, []).append(rank)
    if source is not None:
        holders = {sources[source]: holders[sources[source]]}
    found = []
    for number in range(len(targets)) if target is None else (target,):
        for box, ranks in holders.items():
            both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, targets[number]))
            if all(start < stop for start, stop in both):
                own = number < len(sources) and sources[number] == box
                holder = number if own else ranks[number % len(ranks)]
                if source in (None, holder):
                    found.append(Transfer(holder, number, both))
    return found


Arriving = list[tuple[Transfer, Pending]]    # the parts of a rank's block


class BlockMessages:
    """Send parts of a rank's block, and receive the parts of one; count what is sent.

    Every rank of the mesh creates it; `synchronous` and `asleep` are as in
    `mm3d.transport.point_to_point.PointToPoint`.  `traffic` counts the blocks (calls), messages,
    words and bytes that this rank has sent.
    """

    _own: Box    # this rank's block

    def __init__(self, mesh: Mesh, synchronous: bool, asleep: bool) -> None:
        self.mesh = mesh
        self.messages = PointToPoint(mesh.comm, mesh.scheme.grid.backend, synchronous, asleep)
        self.traffic = Traffic()

    def send_parts(self, block: Array, parts: Sequence[Transfer],
                   rank_of: Callable[[int], int], tag: int) -> None:
        """Begin to send parts of this rank's `block`, each to the `rank_of` its target."""
        traffic = self.traffic
        traffic.calls += 1
        for one in parts:
            part = block[within(one.box, self._own)]
            self.messages.send(part, rank_of(one.target), tag)
            traffic.messages += 1
            traffic.words += part.size
            traffic.moved += part.size
            traffic.bytes += part.size * block.dtype.itemsize

    def receive_parts(self, dtype: Any, parts: Sequence[Transfer],
                      rank_of: Callable[[int], int], tag: int) -> Arriving:
        """Begin to receive parts of this rank's block, each from the `rank_of` its source."""
        return [(one, self.messages.begin_receive(
            tuple(stop - start for start, stop in one.box), dtype, rank_of(one.source), tag))
            for one in parts]


class Hops(BlockMessages):
    """Send and receive the results of a schedule's actions, and count them.

    The global shape of the activations of a micro-batch is (batch, seq, hidden).

    Raises
    ------
    ValueError
        On every rank alike and before any communication, when there are more messages than tags
        of MPI.
    """

    direction = "s"

    def __init__(self, mesh: Mesh, schedule: Schedule, shape: tuple[int, int, int], dtype: Any,
                 synchronous: bool = False, asleep: bool = False) -> None:
        self.schedule, self.shape, self.dtype = schedule, shape, dtype
        needed, available = 2 * schedule.stage_count * schedule.microbatches, tag_count(mesh.comm)
        if needed > available:
            raise ValueError(f"{schedule.stage_count} stages of {schedule.microbatches} "
                             f"micro-batches need {needed} tags, and this MPI has {available}: "
                             f"fewer micro-batches would do")
        super().__init__(mesh, synchronous, asleep)
        self._own = self._blocks(mesh.stage)[mesh.place]
        self._known: dict[tuple[int, int], list[Transfer]] = {}

    def _blocks(self, stage: int) -> list[Box]:
        """Return the blocks of an activation that the ranks of a stage of the mesh hold."""
        return activation_blocks(type(self.mesh.scheme), self.mesh.grids[stage], self.shape,
                                 self.mesh.options)

    def _transfers(self, source: int, target: int) -> list[Transfer]:
        """Return the transfers from a stage of the mesh to another that concern this rank."""
        key = source, target
        if key not in self._known:
            mine = "source" if self.mesh.stage == source else "target"
            self._known[key] = transfers(self._blocks(source), self._blocks(target),
                                         **{mine: self.mesh.place})
        return self._known[key]

    def tag(self, event: Completion) -> int:
        """Return the tag that messages with the result of `event` alone have."""
        number = event.stage * self.schedule.microbatches + event.micro
        return 2 * number + (event.step == "B")

    def send(self, event: Completion, block: Array, target: int) -> None:
        """Begin to send this rank's `block`, the result of `event`, to the stage `target`."""
        self.send_parts(block, self._transfers(self.mesh.stage, target),
                        partial(self.mesh.rank, target), self.tag(event))

    def begin_receive(self, event: Completion, source: int) -> Arriving:
        """Begin to receive this rank's block of the result of `event` from the stage `source`."""
        return self.receive_parts(self.dtype, self._transfers(source, self.mesh.stage),
                                  partial(self.mesh.rank, source), self.tag(event))

    def complete(self, parts: Arriving) -> Array:
        """Wait for a block that `begin_receive` has begun to receive, and return it."""
        own = self._own
        if len(parts) == 1 and parts[0][0].box == own:
            return self.messages.complete(parts[0][1])
        block = self.mesh.scheme.grid.backend.empty(
            tuple(stop - start for start, stop in own), self.dtype)
        while parts:
            one, pending = parts.pop()
            block[within(one.box, own)] = self.messages.complete(pending)
        return block


def within(box: Box, own: Box) -> tuple[slice, ...]:
    """Return the slices of `box` in the block `own`."""
    return tuple(slice(start - first, stop - first)
                 for (start, stop), (first, _) in zip(box, own))


class TiedStages(BlockMessages):
    """Sum the gradients of a table that the first and the last stage of a schedule hold.

    `stages` are that of the embedding, and another one of the head; `shape` is the table's,
    globally; `divided` says whether replicas divide the gradients, as from stage 1 of ZeRO on.
    Other parameters are as for `BlockMessages`.
    """

    def __init__(self, mesh: Mesh, stages: tuple[int, int], shape: tuple[int, int],
                 asleep: bool, divided: bool, synchronous: bool) -> None:
        super().__init__(mesh, synchronous, asleep)
        layout, grids = Layout(mesh.scheme.down_weight), [mesh.grids[stage] for stage in stages]
        # Shards are exchanged by all ranks that divide a copy, and blocks inside a replica.
        self._first, number = mesh.replica, mesh.place
        if divided:
            place = mesh.data_grid.coords["d"]
            self._first, number = mesh.replica - place, mesh.place + place * mesh.shape["t"]
            layout, sizes = shard_layout(layout), {"d": mesh.data.size}
            grids = [GridShape.from_sizes(sizes | dict(grid)) for grid in grids]
        if mesh.stage in stages:
            mine = stages.index(mesh.stage)
            own, others = (layout_blocks(layout, grids[n], shape) for n in (mine, 1 - mine))
            self._other, self._own = stages[1 - mine], own[number]
            self._sent = transfers(own, others, source=number)
            self._received = transfers(others, own, target=number)

    def _rank(self, stage: int, number: int) -> int:
        """Return the rank in the mesh that holds block `number` of a stage."""
        replica, place = divmod(number, self.mesh.shape["t"])
        return self.mesh.shape.rank({"d": self._first + replica, "s": stage, "t": place})

    def sum_gradients(self, parameter: Parameter | None, traffic: Traffic) -> None:
        """Exchange the gradients, and add the other stage's to that of `parameter`.

        That is the table or its copy on this rank; None on other stages, which do nothing.
        `traffic` counts what this rank sends.
        """
        if parameter is None:
            return
        self.traffic, other = traffic, partial(self._rank, self._other)
        receives = self.receive_parts(parameter.grad.dtype, self._received, other, 0)
        self.send_parts(parameter.grad, self._sent, other, 0)
        parts = [(one, self.messages.complete(pending)) for one, pending in receives]
        self.messages.finish()    # what was sent may be a view of the gradient
        for one, part in parts:
            parameter.grad[within(one.box, self._own)] += part
