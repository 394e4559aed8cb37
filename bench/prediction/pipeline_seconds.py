"""Predict the seconds of a pipeline's step by a machine model, on any number of ranks.

The layers of a stage are traced dry for one micro-batch, and F, B and W predicted from the trace;
hops take the link inside a node or between nodes (`bench.prediction.hop_seconds`).  The clock then
times the schedule.  Replicas sum gradients, and gather values, where their stage of ZeRO says so:
in F, B and W, or at the end of a stage's step.  The traces and the words are exact; seconds are a
model.
"""

from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any, Iterable

import numpy as np

from bench.prediction.hop_seconds import place_moves, seconds_of_moves, sent_words, stage_moves
from bench.prediction.machine_model import Machine
from bench.prediction.memory_fit import optimizer_bytes
from bench.prediction.seconds import achieved_seconds, trace_terms
from mm3d import ModelSizes, model_spec
from mm3d.grid.shape import GridShape
from mm3d.model.experts.capacity import capacity_of
from mm3d.model.experts.options import ExpertOptions
from mm3d.schemes.parallelism import Parallelism
from mm3d.tracing import dry_run
from mm3d.tracing.trace import SUMS, Trace
from mm3d.training import costs
from mm3d.training.batches import divide_layers
from mm3d.training.dry_replicas import replicas_with_zero
from mm3d.training.schedules import Schedule, Times, build, clock
from mm3d.training.schedules.clock import Timeline, pairs

HALVES = ("forward", "backward_input", "backward_weights")


@dataclass(frozen=True)
class PipelineModel:
    """What is predicted: a model whose layers are divided among stages, in equal replicas.

    Attributes
    ----------
    schedule : Schedule
        Its ranks are the stages of the mesh.
    scheme : str
        The parallelism of the layers.
    grids : tuple of GridShape
        The grid of each stage of the mesh; all have as many ranks.
    sizes : ModelSizes
        Of the whole model, with the sequences of all micro-batches of a replica.
    dtype, recompute : str
        The type of all arrays, and the policy of recomputation.
    causal : bool
        Whether attention looks backward only.
    options : tuple of (str, object)
        Options of the scheme.
    weights_half : str
        As of `mm3d.Transformer`.
    data, zero, shards
        As in `mm3d.training.data_costs.data_words`.
    experts : ExpertOptions or None
        The options of the model's experts, of which all get equally many tokens.
    """

    schedule: Schedule
    scheme: str
    grids: tuple[GridShape, ...]
    sizes: ModelSizes
    dtype: str = "float32"
    recompute: str = "none"
    causal: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    weights_half: str = "keep"
    data: int = 1
    zero: int = 0
    shards: int | None = None
    experts: ExpertOptions | None = None

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
    def micro(self) -> ModelSizes:
        """Return the sizes of the whole model for one micro-batch."""
        return ModelSizes(**{**self.sizes,
                             "batch": self.sizes.batch // self.schedule.microbatches})

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the global shape of the activations of a micro-batch."""
        return self.micro.batch, self.micro.seq, self.micro.hidden

    @property
    def parts(self) -> list[range]:
        """Return the layers of each stage.

        Raises
        ------
        ValueError
            When the model cannot be divided so, or into micro-batches of equal length, which one
            trace can stand for; or for experts that are not predicted so.
        """
        batch, count = self.sizes.batch, self.schedule.microbatches
        if batch % count:
            near = [batch // count * count, batch // count * count + count]
            raise ValueError(f"a batch of {batch} sequences cannot be divided among {count} "
                             f"micro-batches of equal length, which predictions need: "
                             f"{' or '.join(str(one) for one in near if one)} would do")
        found = divide_layers(self.schedule, self.schedule.ranks, self.sizes,
                              self.schedule.microbatches)
        if self.experts:
            self._check_experts(found)
        return found

    def _check_experts(self, parts: list[range]) -> None:
        """Raise ValueError unless stages of as many layers have experts in the same ones."""
        if self.data > 1:
            raise ValueError(f"{self.data} replicas of stages with experts cannot be predicted, "
                             f"only one replica")
        capacity_of(self.experts, self.micro.tokens)
        every = self.experts.every
        wrong = [part.start for part in parts if part.start % every]
        if wrong:
            raise ValueError(f"a stage that begins with layer {wrong[0]} of a model with experts "
                             f"in one of {every} layers cannot be predicted: a multiple of "
                             f"{every * len(parts)} layers would do")

    @property
    def halves(self) -> bool:
        """Return whether the schedule takes B and W apart."""
        return any(action.kind == "W" for row in self.schedule.rows for action in row)

    def trace(self, layers: int, place: int = 0, stage: int = 0, replica: int = 0,
              **more: Any) -> Trace:
        """Trace one micro-batch in so many layers on one rank, and the sums over replicas."""
        how = {"halves": True, "weights_half": self.weights_half} if self.halves else {}
        if self.experts:
            how["experts"] = self.experts
        replicas = replicas_with_zero(self.data, self.zero, replica, self.shards,
                                      self.schedule.ranks)
        return dry_run.extrapolate_step(
            self.scheme, self.places, self.grids[stage].sizes, place, dtype=self.dtype,
            options=dict(self.options), causal=self.causal, recompute=self.recompute,
            replicas=replicas, **how, **more, **{**self.micro, "layers": layers})


@dataclass(frozen=True)
class PredictedPipeline:
    """The predicted times of a pipeline's step.

    Attributes
    ----------
    timeline : Timeline
        In seconds.
    inside, between : float
        Seconds of the longest hop inside a node and between nodes; NaN where there is none.
    sums : tuple of Fraction
        Seconds of each stage, after its last action, to sum gradients over the replicas and to
        gather what an optimizer has changed.
    """

    timeline: Timeline
    inside: float
    between: float
    sums: tuple[Fraction, ...]

    @property
    def seconds(self) -> Fraction:
        """Return the seconds of the step, to the end of the last sum."""
        return self._with_sums(self.timeline)

    @property
    def without_hops(self) -> Fraction:
        """Return the seconds of the step if hops took no time."""
        times = self.timeline.times
        return self._with_sums(clock(self.timeline.schedule,
                                     Times(times.forward, times.backward, times.weights)))

    def _with_sums(self, timeline: Timeline) -> Fraction:
        """Return the time from the first begin to the last end of a stage's sums."""
        return (max(ends[-1] + own for ends, own in zip(timeline.ends, self.sums))
                - min(starts[0] for starts in timeline.starts))


def predict_pipeline(model: PipelineModel, machine: Machine,
                     repeats: bool = False) -> PredictedPipeline:
    """Predict the times of a step on a machine; with `repeats` backward takes F once more."""
    rank_of = model.schedule.rank_of
    chunks = [(len(part), model.grids[rank_of[stage]]) for stage, part in enumerate(model.parts)]
    steps = {chunk: _chunk_seconds(model, machine, *chunk, repeats) for chunk in set(chunks)}
    found = {pair: _hop_seconds(model, machine, *pair)
             for pair in pairs(model.schedule) if pair[0] != pair[1]}
    times = Times.by_stage(*zip(*(steps[chunk][:3] for chunk in chunks)))
    links = {pair: Fraction(seconds) for pair, (seconds, _) in found.items()}
    times = Times(times.forward, times.backward, times.weights, links=links)
    longest = [max((seconds for seconds, level in found.values() if level == wanted),
                   default=np.nan) for wanted in ("node", "network")]
    sums = tuple(sum((steps[chunks[stage]][3] for stage in stages), Fraction(0))
                 for stages in model.schedule.stages)
    return PredictedPipeline(clock(model.schedule, times), *longest, sums)


def _hop_seconds(model: PipelineModel, machine: Machine, source: int,
                 target: int) -> tuple[float, str]:
    """Predict the seconds of a hop from a stage of the mesh to another, and its links' level."""
    moves = stage_moves(model.scheme, model.grids[source], model.grids[target], model.shape,
                        dict(model.options))
    return seconds_of_moves(machine, *place_moves(
        moves, np.dtype(model.dtype).itemsize, model.places, model.schedule.ranks, model.data,
        machine.ranks_per_node, source, target))


def _chunk_seconds(model: PipelineModel, machine: Machine, layers: int, grid: GridShape,
                   repeats: bool) -> list[Fraction]:
    """Predict the seconds of F, B, W and sums of so many layers; W may be a part of B."""
    trace = model.trace(layers, stage=model.grids.index(grid), block=machine.elementwise_block)
    spent = trace_terms(machine, trace)
    phases = HALVES if model.halves else ("forward", "backward")
    seconds = [achieved_seconds(machine, spent[phase]) for phase in phases]
    seconds[1] += seconds[0] * repeats
    sums = achieved_seconds(machine, spent.get(SUMS, {}))
    return [*[*map(Fraction, seconds), Fraction(0)][:3], Fraction(sums)]


def step_words(model: PipelineModel, trace: Trace, stage: int,
               place: int) -> dict[tuple[str, str], int]:
    """Count the words of one rank in a step, by direction and collective, exactly.

    Parameters
    ----------
    model : PipelineModel
        The pipeline.
    trace : Trace
        Of one micro-batch in all layers of the stage, as from `PipelineModel.trace`.
    stage, place : int
        The stage of the rank, and its place there.

    Returns
    -------
    dict
        As `mm3d.Pipeline.traffic` counts them in a step and the refresh of parameters that follows
        it; what moves nothing is left out.
    """
    found: Counter[tuple[str, str]] = Counter()
    for phase in trace.all_phases:
        times = 1 if phase == SUMS else model.schedule.microbatches
        for key, traffic in trace.traffic[phase].items():
            found[key] += times * traffic.words
    found["s", "send"] = sent_words(model.schedule, model.scheme, model.grids, model.shape,
                                    dict(model.options), stage, place)
    return {key: words for key, words in found.items() if words}


def peak_bytes(model: PipelineModel, stage: int) -> float:
    """Return the bytes of a rank of a stage at the peak, by the closed form.

    It leaves out what experts gather, which is added from a dry run of one micro-batch.
    """
    parts = [model.parts[part] for part in model.schedule.stages[stage]]
    found = _closed_peak(model, model.schedule, stage, parts)
    if model.experts:
        layers = sum(map(len, parts))
        found += _bytes_left_out(model, layers, model.grids[stage])
    return found


def training_bytes(model: PipelineModel, stage: int) -> float:
    """Return `peak_bytes` with what AdamW adds, see `memory_fit.optimizer_bytes`."""
    layers = sum(len(model.parts[part]) for part in model.schedule.stages[stage])
    return peak_bytes(model, stage) + optimizer_bytes(
        _stored_bytes(model, layers, model.grids[stage]), model.dtype, model.zero,
        model.shards or model.data)


@cache
def _stored_bytes(model: PipelineModel, layers: int, grid: GridShape) -> int:
    """Return the bytes of parameters and gradients of a rank, undivided among replicas."""
    alone = replace(model, data=1, shards=None, zero=0)
    return alone.trace(layers, stage=model.grids.index(grid)).parameters


@cache
def _bytes_left_out(model: PipelineModel, layers: int, grid: GridShape) -> float:
    """Return the bytes of a dry run of one micro-batch beyond those of the closed form."""
    one, stage = build("zb-h1" if model.halves else "1f1b", 1, 1), model.grids.index(grid)
    closed = _closed_peak(model, one, stage, [range(layers)])
    return max(0.0, model.trace(layers, stage=stage).peak - closed)


def _closed_peak(model: PipelineModel, schedule: Schedule, stage: int,
                 parts: list[range]) -> float:
    """Return the bytes at the peak of a rank with these layers in its chunks, in closed form."""
    micro = model.micro
    specs = [model_spec(micro, model.causal, model.recompute, part, experts=model.experts)
             for part in parts]
    parallelism = Parallelism(model.scheme, model.grids[stage], micro.batch, micro.seq,
                              **dict(model.options))
    return np.dtype(model.dtype).itemsize * costs.peak_words(
        schedule, min(stage, schedule.ranks - 1), specs, parallelism, model.weights_half,
        model.zero, model.shards or model.data)


def largest_peak_bytes(model: PipelineModel) -> float:
    """Return the bytes at the peak of a rank of the stage that needs the most."""
    return max(peak_bytes(model, stage) for stage in range(model.schedule.ranks))


def plan_pipelines(models: Iterable[PipelineModel], machine: Machine) -> list[
        tuple[PipelineModel, PredictedPipeline, float, bool]]:
    """Predict models; return each with its bytes at the peak and whether they fit, best first.

    The optimizer's bytes are among them.
    """
    found = []
    for model in models:
        peak = max(training_bytes(model, stage) for stage in range(model.schedule.ranks))
        found.append((model, predict_pipeline(model, machine), peak,
                      peak <= machine.memory_bytes))
    return sorted(found, key=lambda one: (not one[3], one[1].seconds))
