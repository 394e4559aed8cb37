"""Predict the seconds of a pipeline's step by a machine model, on any number of ranks.

The layers of a stage are run dry for one micro-batch, and F, B and W predicted from the trace;
hops take the link inside a node or between nodes (`bench.prediction.hop_seconds`).  The clock then
times the schedule.  Replicas sum gradients and gather values where their stage of ZeRO does: in F,
B and W, or at the end of a stage's step.  Words and memory are exact, from a dry run of a whole
step; seconds are a model.
"""

import sys
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from typing import Any, Iterable

import numpy as np

import mm3d
from bench.prediction.hop_seconds import place_moves, seconds_of_moves, stage_moves
from bench.prediction.kernels import with_kernels
from bench.prediction.machine_model import Machine
from bench.prediction.seconds import Terms, achieved_seconds, trace_terms
from mm3d import ModelSizes
from mm3d.grid.shape import GridShape
from mm3d.model.experts.capacity import capacity_of
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.stack import Stack
from mm3d.tracing import dry_run
from mm3d.tracing.trace import SUMS, Trace
from mm3d.training.batches import divide_layers
from mm3d.training.optimizers import AdamW
from mm3d.training.schedules import Schedule, Times, build, clock
from mm3d.training.schedules.clock import Timeline, pairs
from mm3d.training.schedules.memory import peak_in_flight

HALVES = ("forward", "backward_input", "backward_weights")


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

    @property
    def places(self) -> int:
        """Return the number of ranks of a stage."""
        return self.grids[0].ranks

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
        return build("zb-h1" if self.halves else "gpipe", self.schedule.ranks, 1)

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
            (dry_run.step_in_halves if self.halves else dry_run.step_of_chunks)(model, trace)
            pipeline = model
            if self.vocab:
                pipeline = model.pipeline
                dry_run.step_of_ends(model, trace, self.halves)
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


@dataclass(frozen=True)
class PredictedPipeline:
    """The predicted times of a pipeline's step.

    Attributes
    ----------
    timeline : Timeline
        In seconds.
    inside, between : float
        Seconds of the longest hop inside a node and between nodes; NaN without such hops.
    sums : tuple of Fraction
        Seconds of each stage, after its last action, to sum gradients over replicas and to gather
        the values that the optimizer has changed.
    spent : tuple of dict
        Of each stage of the schedule, the result of `chunk_terms`.
    """

    timeline: Timeline
    inside: float
    between: float
    sums: tuple[Fraction, ...]
    spent: tuple[dict[str, Terms], ...]

    @property
    def seconds(self) -> Fraction:
        """Return the seconds of the step, to the end of the last sum."""
        return self._with_sums(self.timeline)

    @property
    def without_hops(self) -> Fraction:
        """Return the seconds of the step if hops took no time."""
        times = self.timeline.times
        if not any(times.links.values()):
            return self.seconds
        return self._with_sums(clock(self.timeline.schedule,
                                     Times(times.forward, times.backward, times.weights)))

    def _with_sums(self, timeline: Timeline) -> Fraction:
        """Return the time from the first begin to the last end of a stage's sums."""
        return (max(ends[-1] + own for ends, own in zip(timeline.ends, self.sums))
                - min(starts[0] for starts in timeline.starts))


def predict_pipeline(model: PipelineModel, machine: Machine,
                     repeats: bool = False) -> PredictedPipeline:
    """Predict the times of a step on a machine; with `repeats`, backward repeats F first."""
    rank_of = model.schedule.rank_of
    chunks = [(len(part), model.grids[rank_of[stage]], _end_of(model, stage))
              for stage, part in enumerate(model.parts)]
    spent = {chunk: chunk_terms(model, machine, *chunk) for chunk in set(chunks)}
    steps = {chunk: _chunk_seconds(model, machine, terms, repeats)
             for chunk, terms in spent.items()}
    found = {pair: _hop_seconds(model, machine, *pair)
             for pair in pairs(model.schedule) if pair[0] != pair[1]}
    times = Times.by_stage(*zip(*(steps[chunk][:3] for chunk in chunks)))
    links = {pair: Fraction(seconds) for pair, (seconds, _) in found.items()}
    times = Times(times.forward, times.backward, times.weights, links=links)
    longest = [max((seconds for seconds, level in found.values() if level == wanted),
                   default=np.nan) for wanted in ("node", "network")]
    sums = tuple(sum((steps[chunks[stage]][3] for stage in stages), Fraction(0))
                 for stages in model.schedule.stages)
    return PredictedPipeline(clock(model.schedule, times), *longest, sums,
                             tuple(spent[chunk] for chunk in chunks))


def _end_of(model: PipelineModel, stage: int) -> str:
    """Name the ends of a GPT in a stage of the schedule: "first", "last", both or none."""
    names = ["first"] * (stage == 0) + ["last"] * (stage == model.schedule.stage_count - 1)
    return " ".join(names) if model.vocab else ""


def _hop_seconds(model: PipelineModel, machine: Machine, source: int,
                 target: int) -> tuple[float, str]:
    """Predict the seconds of a hop between two stages; return also the level of its links."""
    moves = stage_moves(model.scheme, model.grids[source], model.grids[target], model.shape,
                        dict(model.options))
    return seconds_of_moves(machine, *place_moves(
        moves, np.dtype(model.stack.dtype).itemsize, model.places, model.schedule.ranks,
        model.data, machine.ranks_per_node, (source, target)))


def chunk_terms(model: PipelineModel, machine: Machine, layers: int, grid: GridShape,
                end: str) -> dict[str, Terms]:
    """Predict the seconds of one micro-batch in `layers` layers, and of sums, at full figures.

    Parameters
    ----------
    model, machine
        The model, and its machine.
    layers : int
        Number of layers.
    grid : GridShape
        The grid of their stage.
    end : str
        The ends of a GPT that the stage has: "first", "last", both or none.

    Returns
    -------
    dict
        By phase, the seconds of each term of `bench.prediction.seconds.TERMS`.
    """
    whole = model if end else replace(model, vocab=0)
    stage = model.schedule.ranks - 1 if end == "last" else model.grids.index(grid)
    stack = replace(model.stack, batch=model.micro.batch)
    one = replace(whole, stack=stack, schedule=whole.of_one_micro_batch, named="")
    trace = _traced(one, layers, stage, machine.elementwise_block)
    trace = with_kernels(trace, machine.kernels, machine.attention, stack.dtype,
                         stack.hidden // stack.heads)
    return trace_terms(machine, trace)


@cache
def _traced(model: PipelineModel, layers: int, stage: int, block: int) -> Trace:
    """Trace one micro-batch; machines and schedules share it."""
    return model.trace(layers, stage=stage, block=block)


def _chunk_seconds(model: PipelineModel, machine: Machine, spent: dict[str, Terms],
                   repeats: bool) -> list[Fraction]:
    """Return the seconds of F, B, W and sums of a chunk; W is 0 where B includes it."""
    phases = HALVES if model.halves else ("forward", "backward")
    seconds = [achieved_seconds(machine, spent[phase]) for phase in phases]
    seconds[1] += seconds[0] * repeats
    sums = achieved_seconds(machine, spent.get(SUMS, {}))
    return [*[*map(Fraction, seconds), Fraction(0)][:3], Fraction(sums)]


def peak_bytes(model: PipelineModel, stage: int, optimizer: bool = False) -> int:
    """Run a step dry; return the peak bytes of the first rank of a stage."""
    return model.whole_step(0, stage, optimizer=optimizer).peak


def largest_peak_bytes(model: PipelineModel, optimizer: bool = False) -> int:
    """Return the peak bytes of a rank of the stage that needs the most.

    Among stages of the same grid and layers, only the first with the most micro-batches in flight
    is run.
    """
    alike: dict[tuple, list[int]] = {}
    for stage, grid in enumerate(model.grids):
        layers = tuple(len(model.parts[part]) for part in model.schedule.stages[stage])
        alike.setdefault((grid, layers), []).append(stage)
    flying = peak_in_flight(model.schedule)
    return max(peak_bytes(model, max(stages, key=flying.__getitem__), optimizer)
               for stages in alike.values())


def plan_pipelines(models: Iterable[PipelineModel], machine: Machine) -> list[
        tuple[PipelineModel, PredictedPipeline, float, bool]]:
    """Predict models; return each with its peak bytes and whether they fit, best first.

    Peak bytes include the optimizer's.
    """
    found = []
    for model in models:
        peak = largest_peak_bytes(model, optimizer=True)
        found.append((model, predict_pipeline(model, machine), peak,
                      peak <= machine.memory_bytes))
    return sorted(found, key=lambda one: (not one[3], one[1].seconds))
