"""Describe a training to predict: its layers divided among pipeline stages, in equal replicas.

Its ranks are run dry, one micro-batch or a whole step.
"""

import sys
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any, Self

import numpy as np

import mm3d
from mm3d import ModelSizes
from mm3d.config import Config
from mm3d.grid.shape import GridShape
from mm3d.model.cross_entropy import Targets
from mm3d.model.experts.capacity import capacity_of
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.tracing import dry_run
from mm3d.tracing.events import HALVES, PHASES
from mm3d.tracing.trace import SUMS, Trace
from mm3d.training.batches import divide_layers
from mm3d.training.optimizers import AdamW
from mm3d.training.schedules import Schedule, build


@lru_cache(maxsize=32)
def build_once(name: str, ranks: int, microbatches: int) -> Schedule:
    """Build a schedule that models share, so that it is checked once."""
    return build(name, ranks, microbatches)


@dataclass(frozen=True)
class PipelineModel:
    """A model to predict: its layers divided among pipeline stages, in equal replicas.

    Attributes
    ----------
    schedule : Schedule
        Its ranks are the stages of the mesh.
    scheme : str
        The parallelism of the layers.
    grids : tuple of GridShape
        The grid of each stage of the mesh; all have as many ranks.
    stack : Stack
        The whole model, with the sequences of all micro-batches of a replica.  Its experts all get
        equally many tokens.
    options : tuple of (str, object)
        Options of the scheme.
    data, shards : int, int or None
        Number of replicas, and of those that divide a copy, as for `mm3d.Mesh`.
    zero : {0, 1, 2, 3}
        As for `mm3d.Pipeline`.
    expert_parallel : int
        As for `mm3d.Pipeline`.
    vocab : int
        Number of tokens of a `mm3d.GPT`; 0 for the layers alone.
    tied : bool
        Whether its logits are computed with the embedding's table.
    named : str
        The name of the schedule; "" for one without.
    """

    schedule: Schedule
    scheme: str
    grids: tuple[GridShape, ...]
    stack: Stack
    options: tuple[tuple[str, Any], ...] = ()
    data: int = 1
    zero: int = 0
    shards: int | None = None
    expert_parallel: int = 1
    vocab: int = 0
    tied: bool = True
    named: str = ""

    @classmethod
    def of(cls, config: Config, ranks: int = 0) -> Self:
        """Return a training to predict, which has a grid, or so many ranks.

        Raises
        ------
        ValueError
            When there is no such schedule, or the scheme has no such grid.
        """
        model, how = config.model, config.division
        kind = find_scheme(how.scheme)
        grid = kind.grid_shape(how.grid or kind.default_grid(ranks // how.data // how.stages))
        return cls(build_once(how.schedule, how.stages, how.microbatches), how.scheme,
                   (grid,) * how.stages,
                   Stack.of(config.stack() | {"batch": model.batch // how.data}), data=how.data,
                   zero=how.zero, shards=how.shards, expert_parallel=how.expert_parallel,
                   vocab=model.vocab, tied=model.tied, named=how.schedule)

    @property
    def places(self) -> int:
        """Return the number of ranks of a stage."""
        return self.grids[0].ranks

    @property
    def mesh(self) -> GridShape:
        """Return the mesh: copies (r), replicas that divide one (d), stages (s), and the grid."""
        shards, grid = self.shards or self.data, self.grids[0]
        return GridShape("rds" + grid.directions, (
            self.data // shards, shards, self.schedule.ranks, *grid.sizes))

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
        """Return the global shape of the activations of a micro-batch."""
        return self.micro.batch, self.micro.seq, self.micro.hidden

    @cached_property
    def parts(self) -> list[range]:
        """Return the layers of each stage.

        Raises
        ------
        ValueError
            When the model cannot be divided so, or its experts cannot be predicted.
        """
        found = divide_layers(self.schedule, self.schedule.ranks, self.sizes,
                              self.schedule.microbatches)
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
                         data=self.data, shards=self.shards, **dict(self.options))
        stack = replace(self.stack, layers=layers, master=master,
                        batch=self.data * schedule.microbatches * self.micro.batch)
        how = {"zero": self.zero, "expert_parallel": self.expert_parallel}
        if not self.vocab:
            return mm3d.Pipeline(mesh, schedule, **stack.fields(), **how)
        fields = {name: value for name, value in stack.fields().items() if name != "causal"}
        return mm3d.GPT(mesh, **fields, **how, schedule=schedule, vocab=self.vocab,
                        tied=self.tied)

    def trace(self, layers: int, place: int = 0, stage: int = 0, replica: int = 0,
              block: int = sys.maxsize, sums: bool = True, extrapolates: bool = True) -> Trace:
        """Run one micro-batch dry in `layers` layers of a rank, and its sums over replicas."""
        stages, one = self.schedule.ranks, self.of_one_micro_batch

        def step(model: mm3d.Pipeline | mm3d.GPT, trace: Trace) -> None:
            dry_run.step_of_chunks(model, trace, self.halves)
            pipeline = model
            if self.vocab:
                pipeline = model.pipeline
                step_of_ends(model, trace, self.halves)
            if sums and pipeline.data is not None:
                pipeline.data.finish()
                model.refresh()

        def trace_of(count: int) -> Trace:
            return dry_run.trace(
                lambda *where: self.build(one, count * stages, *where), self.data * self.ranks,
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
    def whole_step(self, place: int, stage: int, replica: int = 0,
                   optimizer: bool = False) -> Trace:
        """Run a whole step dry on one rank, with AdamW or without an optimizer.

        Types of 16 bits are trained with masters in float32.
        """
        master = "float32" if optimizer and np.dtype(self.stack.dtype).itemsize == 2 else None

        def step(model: mm3d.Pipeline, trace: Trace) -> None:
            change = AdamW(model, 1e-3).step if optimizer else model.refresh
            model.rehearse()
            change()
        return dry_run.extrapolate(
            lambda layers: dry_run.trace(
                lambda *where: self.build(self.schedule, layers, *where, master),
                self.data * self.ranks, self.rank(place, stage, replica), step=step),
            self.sizes.layers,
            dry_run.period_of(self.stack.recompute, self.experts) * self.schedule.stage_count)


def step_of_ends(model: Any, trace: Trace, halves: bool = False) -> None:
    """Compute one micro-batch in the ends of a `GPT` on this rank, without its layers.

    Its passes are those of the layers: backward belongs to the first of the `halves`.
    """
    ends, chunks = model.chains[-1], model.chunks
    rows = model.pipeline.rows[0]
    tokens = np.zeros((rows.stop - rows.start, model.shape[1]), int)
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
