"""Tie the head's weight to the embedding's table where they are on different stages.

`mm3d.model.heads.TiedHead` ties them on one stage.
"""

from functools import partial

from mm3d.grid.axis import Traffic
from mm3d.grid.layout import Layout
from mm3d.grid.shape import GridShape
from mm3d.model.parameters import Parameter
from mm3d.training.hops import BlockMessages, layout_blocks, transfers, within
from mm3d.training.mesh import Mesh
from mm3d.training.sharded_parameters import shard_layout


class TiedStages(BlockMessages):
    """Sum the gradients of a table that the first and the last stage of a schedule hold.

    Parameters
    ----------
    mesh, asleep, synchronous
        As for `mm3d.training.hops.BlockMessages`.
    stages : tuple of int
        The stage of the embedding, and another one of the head.
    shape : tuple of int
        Global shape of the table.
    divided : bool
        Whether replicas divide the gradients, as from stage 1 of ZeRO on.
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

        Parameters
        ----------
        parameter : Parameter or None
            The table or its copy on this rank; None on other stages, which do nothing.
        traffic : Traffic
            Counts what this rank sends.
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

    def free(self) -> None:
        """Free the communicator of the messages; every rank must call it."""
        self.messages.free()
