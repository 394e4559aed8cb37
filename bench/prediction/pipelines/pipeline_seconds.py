"""Predict the seconds of a pipeline's step by a machine model, on any number of ranks.

The layers of a stage are run dry for one micro-batch, and F, B and W predicted from the trace;
hops take the link inside a node or between nodes (`hop_seconds`).  The clock then times the
schedule.  Replicas sum gradients and gather values where their stage of ZeRO does: in F, B and W,
or at the end of a stage's step.  Words and memory are exact, from a dry run of a whole step;
seconds are a model.
"""

from collections import Counter
from copy import copy
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from operator import itemgetter
from typing import Iterable

import numpy as np

from bench.cases.variants import itemsize
from bench.prediction.kernels import priced
from bench.prediction.machine_model import Machine
from bench.prediction.pipelines.chunk_events import events_of_chunk, run_few
from bench.prediction.pipelines.hop_seconds import place_moves, seconds_of_moves, stage_moves
from bench.prediction.pipelines.pipeline_model import PASSES, PipelineModel
from bench.prediction.seconds import REPLICAS, Terms, achieved_seconds, trace_terms, with_strides
from mm3d.grid.shape import GridShape
from mm3d.tracing import dry_run
from mm3d.tracing.events import Collective, HALVES, PHASES
from mm3d.tracing.trace import SUMS, Trace
from mm3d.training.schedules import Schedule, Times, time_actions
from mm3d.training.schedules.clock import Timeline, pairs, peak_in_flight

Steps = tuple[Fraction, ...]    # seconds by stage
ONE_CHUNK = ("1f1b", "zb-h1")    # schedules whose backwards come in the order of the forwards


@dataclass(frozen=True)
class Spent:
    """The seconds of one micro-batch in the layers of a stage, at full figures.

    They are by phase, sums after the last among them, and term of `seconds.TERMS`; apart are those
    `over` replicas, of collectives in these phases, which ZeRO 2 and 3 have.
    """

    own: dict[str, Terms]
    over: dict[str, Terms]

    def seconds(self, machine: Machine, phase: str, overlap: bool = False) -> float:
        """Return the seconds of a phase; with `overlap` the longer of the two goes on behind."""
        own, over = (achieved_seconds(machine, one.get(phase, {}))
                     for one in (self.own, self.over))
        return max(own, over) if overlap else own + over


@dataclass(frozen=True)
class PredictedPipeline:
    """The predicted times of a pipeline's step, in seconds.

    The longest hop takes `inside` in a node and `between` nodes; NaN without such hops.  After its
    last action each stage `sums` gradients over replicas and gathers the values that the optimizer
    has changed.  `spent` are the results of `chunk_terms`, of each stage of the schedule.
    """

    timeline: Timeline
    inside: float
    between: float
    sums: tuple[Fraction, ...]
    spent: tuple["Spent", ...]

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
        return self._with_sums(_timed(self.timeline.schedule, times.forward, times.backward,
                                      times.weights))

    def _with_sums(self, timeline: Timeline) -> Fraction:
        """Return the time from the first begin to the last end of a stage's sums."""
        return (max(ends[-1] + own for ends, own in zip(timeline.ends, self.sums))
                - min(starts[0] for starts in timeline.starts))


def predict_pipeline(model: PipelineModel, machine: Machine, repeats: bool = False,
                     overlap: bool = False, inside: str = "") -> PredictedPipeline:
    """Predict the times of a step on a machine.

    Backward `repeats` F first; with `overlap` collectives over replicas in F, B and W go on behind
    their other work.  Ranks along `inside`, a direction of `PipelineModel.mesh`, follow each other
    on the nodes; "" for its order.

    Raises ValueError when there is no such direction, stages have grids of their own beside it,
    experts are divided among replicas that are not equally far apart then, or shards do not hold
    whole groups of replicas with the same sequences.
    """
    if inside and len(set(model.grids)) > 1:
        raise ValueError(f"--inside {inside}: stages with one grid would do")
    if inside and model.dividing % model.context:
        raise ValueError(f"--inside {inside} with --context {model.context}: a multiple of "
                         f"{model.context} as --shards would do")
    model.strides(inside)    # raises
    rank_of = model.schedule.rank_of
    chunks = [(len(part), model.grids[rank_of[stage]], _end_of(model, stage))
              for stage, part in enumerate(model.parts)]
    spent = {chunk: chunk_terms(model, machine, *chunk, inside) for chunk in set(chunks)}
    steps = {chunk: _chunk_seconds(model, machine, terms, repeats, overlap)
             for chunk, terms in spent.items()}
    found = {pair: _hop_seconds(model, machine, *pair, inside)
             for pair in pairs(model.schedule) if pair[0] != pair[1]}
    times = Times.by_stage(*zip(*(steps[chunk][:3] for chunk in chunks)))
    links = tuple((pair, Fraction(seconds)) for pair, (seconds, _) in found.items())
    longest = [max((seconds for seconds, level in found.values() if level == wanted),
                   default=np.nan) for wanted in ("node", "network")]
    sums = tuple(sum((steps[chunks[stage]][3] for stage in stages), Fraction(0))
                 for stages in model.schedule.stages)
    timeline = _timed(model.schedule, times.forward, times.backward, times.weights, links)
    return PredictedPipeline(timeline, *longest, sums, tuple(spent[chunk] for chunk in chunks))


@lru_cache(maxsize=8)
def _timed(schedule: Schedule, forward: Steps, backward: Steps, weights: Steps,
           links: tuple[tuple[tuple[int, int], Fraction], ...] = ()) -> Timeline:
    """Time a schedule; plans that differ in what replicas divide at the end share it."""
    return time_actions(schedule, Times(forward, backward, weights, links=dict(links)))


def _end_of(model: PipelineModel, stage: int) -> str:
    """Name the ends of a GPT in a stage of the schedule: "first", "last", both or none."""
    names = ["first"] * (stage == 0) + ["last"] * (stage == model.schedule.stage_count - 1)
    return " ".join(names) if model.vocab else ""


def _hop_seconds(model: PipelineModel, machine: Machine, source: int, target: int,
                 inside: str) -> tuple[float, str]:
    """Predict the seconds of a hop between two stages; return also the level of its links."""
    moves = stage_moves(model.scheme, model.grids[source], model.grids[target], model.shape,
                        dict(model.options))
    return seconds_of_moves(machine, *place_moves(
        moves, itemsize(model.stack.dtype), model.mesh, inside,
        machine.ranks_per_node, (source, target)))


def chunk_terms(model: PipelineModel, machine: Machine, layers: int, grid: GridShape,
                end: str, inside: str = "") -> Spent:
    """Predict the seconds of one micro-batch in `layers` layers, and of sums, at full figures.

    `grid` is that of their stage; `end` says which ends of a GPT it has: "first", "last", both or
    none; `inside` is as of `predict_pipeline`.
    """
    whole = model if end else replace(model, vocab=0)
    stage = model.schedule.ranks - 1 if end == "last" else model.grids.index(grid)
    stack = replace(model.stack, batch=model.micro.batch)
    one = replace(whole, stack=stack, schedule=whole.of_one_micro_batch, named="")
    trace = priced(events_of_chunk(one, layers, stage, machine.elementwise_block), machine,
                   stack, model.masked)
    if inside:
        trace = _placed(trace, model, inside)
    own, over = copy(trace), copy(trace)
    own.events, over.events = Counter(), Counter()
    for (phase, part, event), times in trace.events.items():
        apart = phase != SUMS and isinstance(event, Collective) and event.direction in REPLICAS
        (over if apart else own).events[phase, part, event] += times
    return Spent(trace_terms(machine, own), trace_terms(machine, over))


def _placed(trace: Trace, model: PipelineModel, inside: str) -> Trace:
    """Return a trace with the ranks of the mesh in another order on the nodes.

    Ranks that replicas or divided experts join are a number of neighbouring replicas apart.
    """
    mesh, strides = model.mesh, model.strides(inside)
    shards, near, far = mesh["d"], strides["d"], strides["r"]

    def stride_of(event: Collective) -> int:
        if event.direction in strides and event.direction not in REPLICAS:
            return strides[event.direction]
        apart = event.stride // mesh.stride("d")
        if apart % shards == 0:
            return apart // shards * far
        if apart * event.size > shards and far != shards * near:
            raise ValueError(f"--inside {inside}: shards={shards} that expert_parallel="
                             f"{model.expert_parallel} divides would do")
        return apart * near
    return with_strides(trace, stride_of)


def _chunk_seconds(model: PipelineModel, machine: Machine, spent: Spent, repeats: bool,
                   overlap: bool) -> list[Fraction]:
    """Return the seconds of F, B, W and sums of a chunk; W is 0 where B includes it."""
    phases = PHASES[0], *(HALVES if model.halves else PHASES[1:])
    seconds = [spent.seconds(machine, phase, overlap) for phase in phases]
    seconds[1] += seconds[0] * repeats
    sums = spent.seconds(machine, SUMS)
    return [*[*map(Fraction, seconds), Fraction(0)][:3], Fraction(sums)]


def peak_bytes(model: PipelineModel, stage: int, optimizer: bool = False) -> tuple[int, int]:
    """Return the peak bytes of the first rank of a stage in a step, by a dry run.

    Second are those of them that its layers have saved for backward.  Of micro-batches that are
    alike few are run (`chunk_events.run_few`).
    """
    prepare = run_few if model.schedule.chunks > 1 or model.named in ONE_CHUNK else None
    trace = model.whole_step(0, stage, 0, optimizer, prepare)
    return trace.peak, trace.activations


def fullest_stage(model: PipelineModel, optimizer: bool = False,
                  ends: str = "both") -> tuple[int, int, int]:
    """Return the stage that needs the most memory, and `peak_bytes` of its first rank.

    Among stages of the same grid and layers, only the first with the most bytes in flight is run;
    and of a GPT the first, with its embedding, and the last, where logits are.  `ends` says which
    may be the fullest where that is known: "last", "first" for any but the last, or "both".
    """
    alike: dict[tuple, list[int]] = {}
    for stage, grid in enumerate(model.grids):
        layers = tuple(len(model.parts[part]) for part in model.schedule.stages[stage])
        alike.setdefault((grid, layers), []).append(stage)
    flying = peak_in_flight(model.schedule, kept_for_weights(model))
    most = {key: max(stages, key=flying.__getitem__) for key, stages in alike.items()}
    if not model.halves and model.schedule.chunks == 1:    # the first has the embedding as well
        grid, layers = next(key for key, stages in alike.items() if 0 in stages)
        most = {(other, fewer): stage for (other, fewer), stage in most.items() if stage == 0
                or other != grid or fewer > layers or flying[stage] > flying[0]}
    found = {*most.values()} if ends != "last" or not model.vocab else set()
    if model.vocab and found and model.halves:
        found.add(model.schedule.rank_of[0])
    if model.vocab and ends != "first":
        found.add(model.schedule.rank_of[model.schedule.stage_count - 1])
    return max(((stage, *peak_bytes(model, stage, optimizer)) for stage in sorted(found)),
               key=itemgetter(1))


def kept_for_weights(model: PipelineModel) -> Fraction:
    """Return the bytes that W of a micro-batch needs, over those that B does; 0 without W.

    With recomputation it is above 1: B computes what W needs.
    """
    if not model.halves:
        return Fraction(0)
    stack = replace(model.stack, batch=model.micro.batch)
    one = replace(model, stack=stack, vocab=0, named="", schedule=model.of_one_micro_batch)
    trace = one.trace(dry_run.period_of(stack.recompute, stack.experts), parts=PASSES)
    return Fraction(trace.operands, trace.saved)


def plan_pipelines(models: Iterable[PipelineModel], machine: Machine) -> list[
        tuple[PipelineModel, PredictedPipeline, float, bool]]:
    """Predict models; return each with its peak bytes and whether they fit, best first.

    Peak bytes include the optimizer's.
    """
    found = []
    for model in models:
        peak = fullest_stage(model, optimizer=True)[1]
        found.append((model, predict_pipeline(model, machine), peak,
                      peak <= machine.memory_bytes))
    return sorted(found, key=lambda one: (not one[3], one[1].seconds))
