"""Train a GPT: embeddings, a Transformer divided among stages, and the cross entropy."""

import math
from dataclasses import replace
from typing import Any, Callable, ContextManager

import numpy as np
from mpi4py import MPI

from mm3d.arrays.backend import Array
from mm3d.arrays.plain_numbers import PlainNumbers, check_types
from mm3d.config import OF_MESH, Config, refuse_of_mesh
from mm3d.grid.agreement import checksum, compare, same_arguments
from mm3d.model.cross_entropy import Targets
from mm3d.model.experts.totals import RoutingTotals
from mm3d.model.draws import draw_parameter, gpt2_values
from mm3d.model.parameters import Parameter
from mm3d.training.batches import check_batch
from mm3d.training.gpt_ends import build_ends, check_scheme, check_vocabulary
from mm3d.training.mesh import Mesh, check_mesh
from mm3d.training.pipeline import Pipeline, Staged
from mm3d.training.expert_parallel import sum_routings, update_biases
from mm3d.training.schedules import Schedule
from mm3d.training.schedules.schedule import Action
from mm3d.training.hops import TiedStages


class GPT(PlainNumbers, Staged):
    """Train a causal language model of pre-LN Transformer layers, on any mesh.

    x = E[token] + P[position], without P where positions are rotary; then the layers, a last norm,
    logits x W or, tied, x E^T, and the cross entropy.  Initial values are GPT-2's, with which the
    first loss is near log(vocab): N(0, 0.02^2), positions 0.01, products into the residual stream
    divided by sqrt(2 layers), biases 0, norms 1.  The same seed gives the same model everywhere.

    The loss is the mean over all targets of the batch that are not ignored, however they are
    divided.

    Parameters
    ----------
    where : Mesh or Config
        A mesh, and as keywords the fields of `mm3d.config.Model` and `mm3d.config.Division` that
        the mesh does not set; or a configuration of all of them, with `comm`.
    comm : mpi4py.MPI.Intracomm, optional
        All ranks of a `Config`; each creates it, and calls `free` when it is not used any more.
    around : callable, optional
        Returns, for an action of the schedule, a context in which it is executed.
    asleep : bool
        Whether this rank sleeps while it waits for messages of other stages.
    drawn : bool
        Whether initial values are drawn; else they are 0, for a caller that loads all of them.
    **fields
        With a mesh: what is trained, and how it is divided.

    Attributes
    ----------
    chunks : list of Transformer
        The layers of each chunk of this rank's stage.
    trained : list of Parameter
        What an optimizer changes on this rank: masters, by their gradients.
    definition : Definition
        What it computes, as checkpoints hold it.
    loss_scale : float
        Factor of the gradients, not of the loss, against underflow in 16 bits; code that sets it
        divides the gradients by it.
    optimizer : callable
        Returns the optimizer, which sets this, or None; each step compares its numbers.
    routings : dict of str to RoutingTotals
        How the tokens of the last step were routed, and the losses of the routers, by layer.

    Raises
    ------
    ValueError
        On every rank alike, for sizes and options that do not fit, or differ between ranks.

    Examples
    --------
    >>> mesh = mm3d.Mesh(comm, stages=4, scheme="3d", grid=(2, 1, 1))    # on 8 ranks
    >>> model = mm3d.GPT(mesh, layers=4, hidden=64, heads=4, vocab=256, batch=16, seq=32,
    ...                  microbatches=4)
    >>> loss = model.step(tokens, targets)
    """

    def __init__(self, where: Mesh | Config, comm: MPI.Intracomm | None = None, *,
                 around: Callable[[Action], ContextManager] | None = None, asleep: bool = False,
                 drawn: bool = True, **fields: Any) -> None:
        mesh, config = _place(where, comm, fields)
        model, how = config.model, config.division
        rows = None if how.microbatches == 1 and isinstance(how.schedule, Schedule) else (
            how.microbatches)
        with same_arguments(mesh.comm, "GPT") as given:
            given |= {name: getattr(part, name) for part in (model, how)
                      for name in part.__dataclass_fields__ if name not in OF_MESH}
            check_vocabulary(model.vocab, model.label_smoothing, model.z_loss)
            check_scheme(mesh.scheme, model.tied)
            check_types(model)
        self.config, self.mesh = config, mesh
        self._own_mesh = mesh if isinstance(where, Config) else None
        self.vocab, self.ignored = model.vocab, model.ignored
        self.shape, self.loss_scale = (model.batch, model.seq), 1.0
        self.optimizer: Callable[[], Any] = lambda: None
        values = gpt2_values(model.layers) if drawn else lambda *_: (0, math.inf)
        self.pipeline = Pipeline(
            mesh, how.schedule, rows, around=around, asleep=asleep, initial_values=values,
            synchronous=how.synchronous, zero=how.zero, in_flight=how.in_flight,
            expert_parallel=how.expert_parallel, context_way=how.context_way, **config.stack())
        self.experts = model.experts
        self.routings: dict[str, RoutingTotals] = {}
        self.schedule, self.chunks = self.pipeline.schedule, self.pipeline.chunks
        self.data_grids, self.hops = self.pipeline.data_grids, self.pipeline.hops
        first, last = (self.schedule.rank_of[end] for end in (0, self.schedule.stage_count - 1))
        self._ends = build_ends(self.schedule, mesh.stage, self.chunks, model.vocab,
                                model.tied, ignored=model.ignored,
                                smoothing=model.label_smoothing, z_loss=model.z_loss)
        self._embedding, self._output = self._ends.embedding, self._ends.output
        self._tie = None
        if model.tied and first != last:
            data = self.pipeline.data
            self._tie = TiedStages(mesh, (first, last), (model.vocab, model.hidden), asleep,
                                   bool(data and data.zero), how.synchronous)
        before, after = self._ends.parameters
        for p in before + after:
            draw_parameter(p, model.seed, values)
        self.trained: list[Parameter] = [*before, *self.pipeline.parameters, *after]
        self.twins = self._ends.twins
        self.definition = self.pipeline.definition.extended(
            {"vocab": model.vocab, "tied": bool(model.tied)},
            {"label_smoothing": model.label_smoothing, "z_loss": model.z_loss,
             "ignored": model.ignored})

    def step(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """Compute the loss and all gradients; every rank must call it.

        Parameters
        ----------
        tokens, targets : array_like of int
            The whole batch, (batch, seq), the same on every rank.  Targets may be `ignored`;
            masked targets (`numpy.ma`) are.

        Returns
        -------
        float
            The mean loss over all targets that are not ignored, the same on every rank.  Losses
            of routers are added: for each layer the mean over the micro-batches and all their
            tokens, also with ignored targets (``routings`` has these losses alone).

        Raises
        ------
        ValueError
            On every rank alike and before anything changes, for arrays of another shape or type,
            or numbers out of range, on any rank; and when one has other tokens, targets or rates
            than the rest, or makes another call.
        """
        with same_arguments(self.comm, "step") as given:
            optimizer = self.optimizer()
            given |= {"loss_scale": self.loss_scale, "dropout_step": self.dropout_step} | (
                {} if optimizer is None else optimizer.numbers() | optimizer.options())
            tokens, targets, count = self._checked(tokens, targets, given)
        losses: list[Array] = []
        dropout = self._ends.dropout
        for chunk in self.chunks if self.experts else ():
            chunk.routings.scale = self.loss_scale / self.schedule.microbatches

        def output_gradient(micro: int, y: Array) -> Array:
            goal = Targets(self._part(targets, micro), self.loss_scale / count)
            total, saved = self._output.forward(y, goal)
            losses.append(total)
            return self._output.backward(goal, saved)

        def inputs(micro: int) -> Array:
            x = self._embedding.forward(self._part(tokens, micro))[0]
            return x if dropout is None else dropout.apply(x, x)

        def input_gradient(micro: int, dx: Array) -> None:
            if dropout is not None:
                dx = dropout.apply(dx, dx)
            self._embedding.backward(dx, self._part(tokens, micro))
        with self.new_gradients():
            self.pipeline.step(inputs, output_gradient, input_gradient)
        self._sum_tied_gradients()
        return self._mean(losses, count) + self._finish_routing()

    def evaluate(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """Compute the loss alone; parameters and errors as in `step`.

        Nothing is dropped, and losses of routers are not added.
        """
        with same_arguments(self.comm, "evaluate") as given:
            tokens, targets, count = self._checked(tokens, targets, given)
        losses: list[Array] = []

        def output(micro: int, y: Array) -> None:
            losses.append(self._output.forward(y, Targets(self._part(targets, micro)))[0])
        self.pipeline.forward(
            lambda micro: self._embedding.forward(self._part(tokens, micro))[0], output)
        return self._mean(losses, count)

    def _part(self, a: np.ndarray, micro: int) -> np.ndarray:
        """Return the sequences of a micro-batch of this replica, with its positions."""
        part, context = a[self.pipeline.rows[micro]], self.pipeline.context
        if context is None:
            return part
        return np.concatenate([part[:, chunk.start:chunk.stop]
                               for chunk in context.chunks()], axis=1)

    def _finish_routing(self) -> float:
        """Sum up the routings of a step; return the routers' losses."""
        if self.experts is None:
            return 0.0
        self.routings = sum_routings(self.comm, self.chunks, self.schedule.microbatches)
        return math.fsum(loss for one in self.routings.values() for loss in (one.balance, one.z))

    def _sum_tied_gradients(self) -> None:
        """Add the head's gradient of the table to the embedding's, and the reverse in its copy."""
        if self._tie is not None:
            own = self._embedding or self._output and self._output.head
            self._tie.sum_gradients(own and own.weight, self.hops.traffic)
        elif self._output is not None:
            self._output.add_tied_gradient()

    def _checked(self, tokens: Any, targets: Any,
                 given: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, int]:
        """Check a batch as `check_batch`; add its checksums to `given`, which ranks compare."""
        if not self.mesh.scheme.grid.backend.has_contents:    # it is that of `rehearse`
            return tokens, targets, targets.size
        found = check_batch(tokens, targets, self.shape, self.vocab, self.ignored)
        if self.comm.size > 1:
            given |= {"tokens": checksum(found[0]), "targets": checksum(found[1])}
        return found

    def _mean(self, losses: list[Array], count: int) -> float:
        """Return the mean of all losses, from the sums of this rank's micro-batches.

        Partial sums are added exactly, so all ranks and schedules get the same float.  The mean of
        arrays without contents is NaN.
        """
        backend = self.mesh.scheme.grid.backend
        if not backend.has_contents:
            return math.nan
        own = np.zeros(self.schedule.microbatches)
        if self._output is not None and self._output.loss.counts:
            own[:] = [float(backend.to_host(one)[0]) for one in losses]
        every = np.empty((self.comm.size, own.size))
        self.comm.Allgather(own, every)
        return math.fsum(every.flat) / count

    @property
    def dropout_step(self) -> int | None:
        """Return the step that masks of dropout are drawn for; None while nothing is dropped.

        `step` increments it; set it to resume a training.
        """
        return self.pipeline.dropout_step

    @dropout_step.setter
    def dropout_step(self, step: int | None) -> None:
        self.pipeline.dropout_step = step

    def update_biases(self) -> None:
        """Change the biases of the gate "sigmoid-bias" by the routings of the last step.

        Every rank must call it.  Optimizers do in each step that they do not skip; a training
        without an optimizer calls it before `refresh`.

        Raises
        ------
        ValueError
            On every rank alike, when some make another call: their biases would differ for good.
        """
        backend = self.mesh.scheme.grid.backend
        if self.routings and self.experts.gate == "sigmoid-bias" and backend.has_contents:
            compare(self.comm, "update_biases", {})
            update_biases(self.chunks, self.routings, self.experts.bias_rate)

    @property
    def chains(self) -> list[Any]:
        """Return the layers of this rank, with those before and after the Transformer's."""
        return [*self.pipeline.chains, self._ends]

    def rehearse(self) -> None:
        """Compute a step with the numbers of the vocabulary in turn, as a dry run does."""
        tokens, every = np.zeros(self.shape, int), [slice(0, self.shape[0])]
        # Where nothing is compared, what is not this rank's stays untouched, and takes no memory.
        for rows in every if self.mesh.scheme.grid.backend.has_contents else self.pipeline.rows:
            begin, end = (number * self.shape[1] for number in (rows.start, rows.stop))
            tokens[rows] = (np.arange(begin, end) % self.vocab).reshape(-1, self.shape[1])
        self.step(tokens, tokens)

    def free(self) -> None:
        """Free the communicators of the model, and a mesh that it made; every rank must call it.

        MPI has a few thousand communicators at most, and nothing but this gives them back.  It may
        be repeated.  Any later call that all ranks must make raises RuntimeError.
        """
        self.pipeline.free()
        if self._tie is not None:
            self._tie.messages.free()
        if self._own_mesh is not None:
            self._own_mesh.free()


def _place(where: Mesh | Config, comm: MPI.Intracomm | None,
           given: dict[str, Any]) -> tuple[Mesh, Config]:
    """Return the mesh and the configuration that the parameters of `GPT` say."""
    if not isinstance(where, Config):
        refuse_of_mesh(given)
        check_mesh(where, "GPT")
        return where, Config.of(given)
    if comm is None or given:
        raise TypeError(f"with a Config comm is needed, and no {', '.join(given) or 'fields'}: "
                        f"GPT(config, comm) would do")
    how = where.division
    options = {} if how.overlap is None else {"overlap": how.overlap}
    mesh = Mesh(comm, how.stages, how.scheme, how.grid, how.backend, data=how.data,
                shards=how.shards, context=how.context, **options)
    chosen = getattr(mesh.scheme, "overlap", None)
    return mesh, replace(where, division=replace(how, overlap=chosen))
