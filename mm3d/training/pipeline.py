"""Train a Transformer whose layers are divided among the stages of a pipeline."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Callable, ContextManager, Mapping

import numpy as np

from mm3d.arrays.backend import Array
from mm3d.arrays.plain_numbers import check_types, check_whole
from mm3d.config import Division, refuse_of_mesh
from mm3d.grid.activations import Context
from mm3d.grid.agreement import checksums, refuse_freed, same_arguments
from mm3d.grid.axis import Traffic, TrafficCounts
from mm3d.grid.grid import GridAxes
from mm3d.model.draws import InitialValues, varied_values
from mm3d.model.parameters import Parameter, Trained
from mm3d.model.stack import Stack, make_of_fields
from mm3d.model.transformer import Transformer
from mm3d.model.transformer_layers import transformer_layers
from mm3d.names import check_name
from mm3d.training.batches import divide_layers, divide_rows
from mm3d.training.data_parallel import DataParallel, check_zero
from mm3d.training.expert_parallel import check_experts, expert_ranks
from mm3d.training.hops import Hops
from mm3d.training.mesh import Mesh, check_mesh
from mm3d.training.schedules import Schedule, build
from mm3d.training.schedules.schedule import Action
from mm3d.training.worker import Worker
from mm3d.transport.communicators import Freed


class Staged(Trained):
    """Hold a rank's part of a model on the stages of a mesh; tell its grids and their traffic."""

    mesh: Mesh
    data_grids: list[GridAxes]
    hops: Hops

    @property
    def comm(self) -> Any:
        """Return all ranks of the mesh; once the model is freed, what refuses every use."""
        own = self.hops.messages.comm
        return own if isinstance(own, Freed) else self.mesh.comm

    @property
    def grids(self) -> list[GridAxes]:
        """Return the grids of this rank, for observers of their collectives."""
        return [self.mesh.scheme.grid, *self.data_grids]

    def traffic(self) -> TrafficCounts:
        """Return the traffic of this rank, by direction and collective.

        Blocks sent to other stages are ("s", "send"); d and r join replicas, for experts replicas
        with the same experts, and e divides experts.
        """
        found = self.mesh.scheme.grid.traffic()
        found[self.hops.direction, "send"] = self.hops.traffic
        for grid in self.data_grids:
            for key, one in grid.traffic().items():
                found[key] = found[key] + one if key in found else one
        return found

    def reset_traffic(self) -> None:
        """Reset the counts of traffic to zero."""
        self.mesh.scheme.grid.reset_traffic()
        for grid in self.data_grids:
            grid.reset_traffic()
        self.hops.traffic = Traffic()

    def _gather(self, call: str, of: Callable[[Parameter], Any],
                loaded: Mapping[str, np.ndarray] = MappingProxyType({})) -> dict[str, Any]:
        """Return `of(parameter)` of all stages on every rank, which compare what is `loaded`."""
        with same_arguments(self.comm, call) as given:
            given |= checksums(loaded)
        own = {p.name: of(p) for p in self.trained}
        own = own if self.mesh.replica == self.mesh.place == 0 else {}
        found = {name: a for every in reversed(self.comm.allgather(own))
                 for name, a in every.items()}
        return {name: found[name] for name in sorted(found, key=_place_in_model)}


class Pipeline(Staged):
    """Divide a Transformer among the stages of a mesh, and execute a schedule.

    Layers are numbered, named and drawn as in the model on one stage, so both are the same model.
    Gradients of parameters are sums over the micro-batches, taken in the order of the schedule's
    rows.

    Parameters
    ----------
    mesh : Mesh
        The ranks; all create it, and call `free` when it is not used any more.
    schedule : str or Schedule
        What each stage does, and in which order; a name of
        `mm3d.training.schedules.builders.all_builders` needs `microbatches`.
    microbatches : int, optional
        Number of micro-batches of a replica, with a schedule's name.
    around : callable, optional
        Returns, for an action, a context in which it is executed.
    asleep : bool
        See `mm3d.transport.point_to_point.PointToPoint`.
    initial_values : callable
        As for `mm3d.Transformer`.
    **fields
        Those of `mm3d.model.stack.Stack`, for the whole model: layers are divided among the stages
        of the schedule, and sequences among the micro-batches and replicas as
        `mm3d.training.batches.divide_rows` says: the micro-batches of a replica are equal.  The
        tokens of one micro-batch, of all replicas, are routed to experts together; the replicas
        then divide each micro-batch instead of the batch, so that the routing does not depend on
        their number.

        And of `mm3d.config.Division`: zero, in_flight, expert_parallel, synchronous, context_way.

    Attributes
    ----------
    schedule : Schedule
        As it is executed.
    rows : list of slice
        The sequences of the batch that are this replica's micro-batches.
    data : DataParallel or None
        Makes the parameters and sums their gradients over replicas; None with one replica.
    data_grids : list of GridAxes
        The grid of the replicas; and of a context, or of experts that replicas divide.
    context : Context or None
        How the positions of sequences are divided.
    chunks : list of Transformer
        The layers of each chunk of this rank's stage.
    parameters, trained : list of Parameter
        Parameters of all chunks; and the arrays that an optimizer changes and that a checkpoint
        stores, which are the same ones.
    definition : Definition
        What it computes, as checkpoints hold it.
    comm : mpi4py.MPI.Intracomm
        All ranks of the mesh.
    dropout_step : int or None
        The step of training that the masks of dropout are drawn for, counted by `step`; None
        while nothing is to be dropped.

    Raises
    ------
    ValueError
        On every rank alike, when the schedule is wrong, has not as many ranks as the mesh has
        stages, or more stages than there are layers, or micro-batches do not divide the batch,
        or their number is missing, or arguments differ between ranks.
    """

    def __init__(self, mesh: Mesh, schedule: str | Schedule, microbatches: int | None = None, *,
                 around: Callable[[Action], ContextManager] | None = None, asleep: bool = False,
                 initial_values: InitialValues = varied_values, **fields: Any) -> None:
        refuse_of_mesh(fields)
        check_mesh(mesh, "Pipeline")
        stack, how = make_of_fields(fields, "Pipeline", Stack, Division)
        with same_arguments(mesh.comm, "Pipeline") as given:
            given |= stack.fields() | {
                "microbatches": microbatches, "zero": how.zero, "in_flight": how.in_flight,
                "expert_parallel": how.expert_parallel, "synchronous": how.synchronous,
                "schedule": schedule, "context_way": how.context_way}
            check_types(how)
            check_zero(how.zero)
            check_whole("in_flight", how.in_flight, 0)
            if isinstance(schedule, str):
                if microbatches is None:
                    raise ValueError(f"schedule {schedule!r}: a name needs microbatches too, "
                                     f"their number")
                microbatches = check_whole("microbatches", microbatches)
                schedule = build(schedule, mesh.shape["s"], microbatches)
            elif not isinstance(schedule, Schedule):
                raise TypeError(f"schedule={schedule!r}: a name or a Schedule would do")
        self.mesh, self.schedule = mesh, schedule
        experts, share = stack.experts, mesh.context.size if mesh.context else 1
        replicas = mesh.shape["d"] // share    # with other sequences
        self.parts = divide_layers(schedule, mesh.shape["s"], stack.sizes, microbatches, replicas)
        together = stack.batch // schedule.microbatches    # sequences, of all replicas
        check_experts(experts, how.expert_parallel, replicas, together * stack.seq, stack.layers)
        self.rows = divide_rows(stack.batch, replicas, schedule.microbatches,
                                experts is not None)[mesh.replica // share]
        check_context(share, stack, how.context_way)
        self.context = mesh.context and Context(mesh.context, stack.seq, how.context_way)
        self.data, self.data_grids = None, []
        made: dict[str, Any] = {"initial_values": initial_values, "context": self.context}
        if mesh.data_grid is not None:
            self.data = DataParallel(mesh.data_grid, how.zero, how.in_flight)
            self.data_grids.append(mesh.data_grid)
            made["parameter"] = self.data.create_parameter
        if mesh.context_grid is not None:
            self.data_grids.append(mesh.context_grid)
        if how.expert_parallel > 1:
            self.data_grids.append(mesh.data_grid.with_experts(how.expert_parallel))
        if experts is not None:
            made["expert_ranks"] = expert_ranks(
                self.data, self.data_grids[-1] if self.data else None, together)
        of_rows = replace(stack, batch=self.rows[0].stop - self.rows[0].start)
        self.chunks = [Transformer(mesh.scheme, of_rows, **made,
                                   make_layers=partial(transformer_layers, part=self.parts[stage]))
                       for stage in schedule.stages[mesh.stage]]
        first = self.chunks[0]
        self.hops = Hops(mesh, schedule, first.shape, first.dtype, how.synchronous, asleep)
        self.dropout_step: int | None = 0 if stack.dropout else None
        if stack.dropout:
            around = self._placing_masks(around)
        self.worker = Worker(self.hops, self.chunks, around)
        self.parameters: list[Parameter] = [p for chunk in self.chunks for p in chunk.parameters]
        self.trained = self.parameters
        counts = experts is not None and experts.capacity is not None
        self.definition = first.definition.extended({}, {
            "routed_together": together * stack.seq} if counts else {})

    @property
    def chains(self) -> list[Transformer]:
        """Return the layers of this rank, for observers."""
        return self.chunks

    def rehearse(self) -> None:
        """Compute a step with random inputs and output gradients, as a dry run does."""
        self.step(lambda micro: self._random(micro, 0, "input"),
                  lambda micro, y: self._random(micro, -1, "output gradient"))

    def _random(self, micro: int, chunk: int, name: str) -> Array:
        """Draw this rank's block of an activation of a micro-batch."""
        return self.chunks[chunk].random(f"{name} {micro}")

    def step(self, inputs: Callable[[int], Array],
             output_gradient: Callable[[int, Array], Array],
             input_gradient: Callable[[int, Array], Any] = lambda micro, dx: None) -> None:
        """Compute forward and backward of all micro-batches; every rank must call it.

        It adds to the gradients of the parameters without a factor: `output_gradient` is the
        gradient of the step's loss, such as a mean over the tokens of all micro-batches.  Unlike
        `mm3d.GPT` it compares nothing over the ranks: it would wait for ranks that call `forward`
        instead.  Arrays that `inputs` and `output_gradient` return are not copied: they must stay
        unchanged until the end of the step.

        Parameters
        ----------
        inputs : callable
            Returns this rank's block of the input of a micro-batch; called in the stage with the
            first layer.
        output_gradient : callable
            Returns this rank's block of the gradient of the output, for a micro-batch and its
            output; called after the forward of the last layer, in its stage.
        input_gradient : callable
            Takes a micro-batch, and this rank's block of the gradient of its input.
        """
        refuse_freed(self.comm)
        with (self.data.summed(self.schedule.microbatches) if self.data else nullcontext()):
            self.worker.step(inputs, output_gradient, input_gradient)
        if self.dropout_step is not None:
            self.dropout_step += 1

    def forward(self, inputs: Callable[[int], Array],
                output: Callable[[int, Array], Any]) -> None:
        """Compute forward alone of all micro-batches, and save nothing; every rank must call it.

        Nothing is dropped, and routings are not counted.

        Parameters
        ----------
        inputs : callable
            As for `step`.
        output : callable
            Takes a micro-batch, and this rank's block of its output; called in the stage with the
            last layer.
        """
        refuse_freed(self.comm)
        for chunk in self.chunks:
            chunk.mask_key.place = None
        self.worker.forward(inputs, output)
        for chunk in self.chunks:
            chunk.routings.totals.clear()

    def _placing_masks(self, around: Callable[[Action], ContextManager] | None
                       ) -> Callable[[Action], ContextManager]:
        """Return an `around` that also tells a chunk, before F, which masks it is to draw."""
        def place(action: Action) -> ContextManager:
            if action.kind == "F":
                step, first = self.dropout_step, self.rows[action.micro].start
                chunk = self.chunks[action.chunk]
                chunk.mask_key.place = None if step is None else (step, first)
            return around(action) if around else nullcontext()
        return place

    def free(self) -> None:
        """Free the communicators of messages and experts; every rank must call it.

        It may be repeated.  Any later call that all ranks must make raises RuntimeError.
        """
        self.hops.messages.free()
        own = (self.mesh.data_grid, self.mesh.context_grid)
        for grid in [one for one in self.data_grids if one not in own]:
            grid.free()
            self.data_grids.remove(grid)


def check_context(ranks: int, stack: Stack, way: str) -> None:
    """Raise ValueError unless there are such a way, a position for each rank, and no experts."""
    ways = Division.__dataclass_fields__["context_way"].metadata["choices"]
    check_name("context_way", way, ways)
    if stack.seq < ranks:
        raise ValueError(f"seq={stack.seq} positions cannot be divided by context={ranks}: at "
                         f"least {ranks} positions would do")
    if ranks > 1 and stack.experts:
        raise ValueError(f"context={ranks} divides sequences, which experts route whole: "
                         f"context=1, or no experts, would do")


def _place_in_model(name: str) -> tuple[int, int]:
    """Return a key to sort parameters by, the same for all parameters of a layer."""
    ends = {"embedding": 0, "positions": 1, "norm": 3, "head": 4}
    part, _, rest = name.partition(".")
    return (ends[part], 0) if part in ends else (2, int(rest.partition(".")[0]))
