"""Describe a training to predict: its layers divided among pipeline stages, in equal replicas.

Its ranks are run dry, one micro-batch or a whole step.
"""

import math
import sys
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any, Callable, Self

import numpy as np

import mm3d
from bench.cases.variants import itemsize
from bench.instruments.placement import mesh_order
from mm3d import ModelSizes
from mm3d.config import Config
from mm3d.grid.activations import chunks_of
from mm3d.grid.shape import GridShape
from mm3d.model.attention.costs import context_pairs
from mm3d.model.attention.windows import visible
from mm3d.model.cross_entropy import Targets
from mm3d.model.experts.token_order import capacity_of
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.tracing import dry_run
from mm3d.tracing.events import HALVES, PHASES
from mm3d.tracing.trace import SUMS, Trace
from mm3d.training.batches import divide_layers
from mm3d.training.optimizers import AdamW
from mm3d.training.pipeline import check_context
from mm3d.training.schedules import Schedule, build

LAYERS, ENDS = PASSES = "layers", "ends"    # parts of a trace, beside sums


@lru_cache(maxsize=32)
def build_once(name: str, ranks: int, microbatches: int) -> Schedule:
    """Build a schedule that models share, so that it is checked once."""
    return build(name, ranks, microbatches)


@cache
def mesh_shape(copies: int, shards: int, stages: int, grid: GridShape) -> GridShape:
    """Return a mesh: copies of a model (r), replicas that divide one (d), stages (s), the grid."""
    return GridShape("rds" + grid.directions, (copies, shards, stages, *grid.sizes))


@cache
def mesh_strides(mesh: GridShape, inside: str) -> dict[str, int]:
    """Return the strides of a mesh's directions over the nodes, with `inside` the fastest.

    See `bench.instruments.placement.mesh_order`, which says the errors.
    """
    order = mesh_order(mesh, inside)
    placed = GridShape(order, [mesh[name] for name in order])
    return {name: placed.stride(name) for name in mesh}


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """How a batch, and a copy of a model, are divided among replicas; as of `mm3d.Division`."""

    data: int = 1
    context: int = 1
    context_way: str = "gather"
    zero: int = 0
    shards: int | None = None
    expert_parallel: int = 1

    @property
    def replicas(self) -> int:
        """Return the number of all replicas."""
        return self.data * self.context

    @property
    def dividing(self) -> int:
        """Return the number of replicas that divide a copy of the model by ZeRO."""
        return self.shards or self.replicas


@dataclass(frozen=True)
class PipelineModel(Replicas):
    """A model to predict: its layers divided among pipeline stages, in equal replicas.

    Each stage of the mesh has a grid of as many ranks, and each is a rank of the schedule, which
    is `named`, "" for one without.  The stack is the whole model, with the sequences of all
    micro-batches of a replica; its experts all get equally many tokens.  The vocabulary is that of
    a `mm3d.GPT`, 0 for the layers alone.
    """

    schedule: Schedule
    scheme: str
    grids: tuple[GridShape, ...]
    stack: Stack
    options: tuple[tuple[str, Any], ...] = ()
    vocab: int = 0
    tied: bool = True
    named: str = ""

    @classmethod
    def of(cls, config: Config, ranks: int = 0) -> Self:
        """Return a training to predict, which has a grid, or so many ranks.

        Raises ValueError when there is no such schedule, or the scheme has no such grid.
        """
        model, how = config.model, config.division
        kind = find_scheme(how.scheme)
        grid = kind.grid_shape(how.grid or kind.default_grid(
            ranks // (how.data * how.context * how.stages)))
        return cls(build_once(how.schedule, how.stages, how.microbatches), how.scheme,
                   (grid,) * how.stages,
                   Stack.of(config.stack() | {"batch": model.batch // how.data}), data=how.data,
                   context=how.context, context_way=how.context_way, zero=how.zero,
                   shards=how.shards, expert_parallel=how.expert_parallel,
                   vocab=model.vocab, tied=model.tied, named=how.schedule)

    @property
    def places(self) -> int:
        """Return the number of ranks of a stage."""
        return self.grids[0].ranks

    @property
    def mesh(self) -> GridShape:
        """Return the mesh, with the grid of the first stage."""
        return mesh_shape(self.replicas // self.dividing, self.dividing, self.schedule.ranks,
                          self.grids[0])

    def strides(self, inside: str = "") -> dict[str, int]:
        """Return `mesh_strides`, and that of c: replicas of a context are neighbours along d."""
        found = mesh_strides(self.mesh, inside)
        return found | {"c": found["d"]}

    @property
    def grid_name(self) -> str:
        """Name the grids: one if all stages have it, or those of the stages in order."""
        different = len(set(self.grids)) > 1
        return ", ".join(one.compact for one in self.grids) if different else str(self.grids[0])

    @property
    def sizes(self) -> ModelSizes:
        """Return the sizes of the whole model."""
        return self.stack.sizes

    @property
    def experts(self) -> ExpertOptions | None:
        """Return the options of its experts."""
        return self.stack.experts

    @property
    def micro(self) -> ModelSizes:
        """Return the sizes of the whole model for one micro-batch."""
        return ModelSizes(**{**self.sizes,
                             "batch": self.sizes.batch // self.schedule.microbatches})

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of the activations of a micro-batch in the first replica."""
        positions = sum(map(len, chunks_of(self.micro.seq, self.context, 0)))
        return self.micro.batch, positions, self.micro.hidden

    @property
    def masked(self) -> float:
        """Return which share of its scores the first rank of a causal context multiplies."""
        seq, window = self.sizes.seq, self.stack.architecture.window
        if self.context == 1 or not (self.stack.causal or self.vocab):
            return 1.0
        if self.context_way == "ring":
            pairs = context_pairs(seq, self.context, 0, window=window)
        else:    # with the keys of all chunks at once
            pairs = sum(math.prod(map(len, visible(own, range(seq), True, window)))
                        for own in chunks_of(seq, self.context, 0))
        return pairs / (self.shape[1] * seq)

    @cached_property
    def parts(self) -> list[range]:
        """Return the layers of each stage.

        Raises ValueError when the model cannot be divided so, or its experts cannot be predicted.
        """
        check_context(self.context, self.stack, self.context_way)
        found = divide_layers(self.schedule, self.schedule.ranks, self.sizes,
                              batch="a batch" if self.data == 1 else "a replica's batch")
        if self.experts:
            self._check_experts(found)
        return found

    def _check_experts(self, parts: list[range]) -> None:
        """Raise ValueError unless each stage begins at a multiple of `experts.every` layers."""
        capacity_of(self.experts, self.data * self.micro.tokens)
        every = self.experts.every
        wrong = [part.start for part in parts if part.start % every]
        if wrong:
            raise ValueError(f"a stage that begins with layer {wrong[0]} of a model with experts "
                             f"in one of {every} layers cannot be predicted: a multiple of "
                             f"{every * len(parts)} layers would do")

    @property
    def halves(self) -> bool:
        """Return whether the schedule runs B and W apart."""
        return any(action.kind == "W" for row in self.schedule.rows for action in row)

    @property
    def of_one_micro_batch(self) -> Schedule:
        """Return a schedule of one micro-batch with the same kinds of actions."""
        return build_once("zb-h1" if self.halves else "gpipe", self.schedule.ranks, 1)

    def build(self, schedule: Schedule, layers: int, comm: Any, backend: Any,
              master: str | None = None) -> mm3d.Pipeline | mm3d.GPT:
        """Build the model of `layers` layers with the micro-batches of `schedule`."""
        mesh = mm3d.Mesh(comm, self.schedule.ranks, self.scheme, self.grids, backend,
                         data=self.data, shards=self.shards, context=self.context,
                         **dict(self.options))
        stack = replace(self.stack, layers=layers, master=master,
                        batch=self.data * schedule.microbatches * self.micro.batch)
        how = {"zero": self.zero, "expert_parallel": self.expert_parallel,
               "context_way": self.context_way}
        if not self.vocab:
            return mm3d.Pipeline(mesh, schedule, **stack.fields(), **how)
        fields = {name: value for name, value in stack.fields().items() if name != "causal"}
        return mm3d.GPT(mesh, **fields, **how, schedule=schedule, vocab=self.vocab,
                        tied=self.tied)

    def trace(self, layers: int, place: int = 0, stage: int = 0, replica: int = 0,
              block: int = sys.maxsize, parts: tuple[str, ...] = (*PASSES, SUMS),
              extrapolates: bool = True) -> Trace:
        """Run one micro-batch dry in `layers` layers of a rank, and its sums over replicas.

        `parts` are those that are run.
        """
        stages, one = self.schedule.ranks, self.of_one_micro_batch

        def step(model: mm3d.Pipeline | mm3d.GPT, trace: Trace) -> None:
            if LAYERS in parts:
                dry_run.step_of_chunks(model, trace, self.halves)
            pipeline = model
            if self.vocab:
                pipeline = model.pipeline
                if ENDS in parts:
                    _step_of_ends(model, trace, self.halves)
            if SUMS in parts and pipeline.data is not None:
                pipeline.data.finish()
                model.refresh()

        def trace_of(count: int) -> Trace:
            return dry_run.trace(
                lambda *where: self.build(one, count * stages, *where), self.replicas * self.ranks,
                self.rank(place, stage, replica), block, step)
        return dry_run.extrapolate(
            trace_of, layers, dry_run.period_of(self.stack.recompute, self.experts)
        ) if extrapolates else trace_of(layers)

    @property
    def ranks(self) -> int:
        """Return the number of ranks of a replica."""
        return self.schedule.ranks * self.places

    def rank(self, place: int, stage: int, replica: int = 0) -> int:
        """Return the number of a rank among all."""
        return replica * self.ranks + stage * self.places + place

    @cache
    def whole_step(self, place: int, stage: int, replica: int = 0, optimizer: bool = False,
                   prepare: Callable[[Any], None] | None = None) -> Trace:
        """Run a whole step dry on one rank, with AdamW or without an optimizer.

        Types of 16 bits are trained with masters in float32.  Where `prepare` is called with the
        model, before the step, the trace tells memory alone.
        """
        master = "float32" if optimizer and itemsize(self.stack.dtype) == 2 else None

        def step(model: mm3d.Pipeline, trace: Trace) -> None:
            change = AdamW(model, 1e-3).step if optimizer else model.refresh
            if prepare:
                prepare(model)
            model.rehearse()
            change()
        return dry_run.extrapolate(
            lambda layers: dry_run.trace(
                lambda *where: self.build(self.schedule, layers, *where, master),
                self.replicas * self.ranks, self.rank(place, stage, replica), step=step,
                events=prepare is None),
            self.sizes.layers,
            dry_run.period_of(self.stack.recompute, self.experts) * self.schedule.stage_count)


def _step_of_ends(model: Any, trace: Trace, halves: bool = False) -> None:
    """Compute one micro-batch in the ends of a `GPT` on this rank, without its layers.

    Its passes are those of the layers: backward belongs to the first of the `halves`.
    """
    ends, chunks = model.chains[-1], model.chunks
    rows, context = model.pipeline.rows[0], model.pipeline.context
    positions = sum(map(len, context.chunks())) if context else model.shape[1]
    tokens = np.zeros((rows.stop - rows.start, positions), int)
    trace.begin_phase(PHASES[0])
    if ends.embedding is not None:
        ends.embedding.forward(tokens)
    if ends.output is not None:
        goal = Targets(tokens, 1.0)
        y = chunks[-1].random("output")
        saved = ends.output.forward(y, goal)[1]
        trace.begin_phase(HALVES[0] if halves else PHASES[1])
        ends.output.backward(goal, saved)
        del y, saved
    trace.begin_phase(HALVES[0] if halves else PHASES[1])
    if ends.embedding is not None:
        ends.embedding.backward(chunks[0].random("gradient"), tokens)
    trace.begin_phase(SUMS)
