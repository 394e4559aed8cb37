"""Predict the seconds of a pipeline's step by a machine model, on any number of ranks.

The layers of a stage are traced dry for one micro-batch, and F, B and W predicted from the trace;
hops take the link inside a node or between nodes.  The clock then times the schedule.  The traces
and the words are exact; seconds are a model.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Iterable

import numpy as np

from bench.prediction.machine_model import Machine
from bench.prediction.seconds import achieved_seconds, trace_terms
from mm3d import ModelSizes, model_spec
from mm3d.grid.shape import GridShape
from mm3d.schemes.parallelism import Parallelism
from mm3d.tracing import dry_run
from mm3d.tracing.trace import Trace
from mm3d.training import costs
from mm3d.training.batches import divide_layers
from mm3d.training.schedules import Schedule, Times, clock
from mm3d.training.schedules.clock import Timeline, pairs
from mm3d.training.schedules.messages import operations

HALVES = ("forward", "backward_input", "backward_weights")


@dataclass(frozen=True)
class PipelineModel:
    """What is predicted: a model whose layers are divided among the stages of a schedule.

    Attributes
    ----------
    schedule : Schedule
        Its ranks are the stages of the mesh.
    scheme : str
        The parallelism of the layers.
    grid : GridShape
        The grid of each stage.
    sizes : ModelSizes
        Of the whole model, with the sequences of all micro-batches.
    dtype, recompute : str
        The type of all arrays, and the policy of recomputation.
    causal : bool
        Whether attention looks backward only.
    options : tuple of (str, object)
        Options of the scheme.
    weights_half : str
        As of `mm3d.Transformer`.
    """

    schedule: Schedule
    scheme: str
    grid: GridShape
    sizes: ModelSizes
    dtype: str = "float32"
    recompute: str = "none"
    causal: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    weights_half: str = "keep"

    @property
    def micro(self) -> ModelSizes:
        """Return the sizes of the whole model for one micro-batch."""
        return ModelSizes(**{**self.sizes,
                             "batch": self.sizes.batch // self.schedule.microbatches})

    @property
    def parts(self) -> list[range]:
        """Return the layers of each stage; ValueError when the model cannot be divided."""
        return divide_layers(self.schedule, self.schedule.ranks, self.sizes,
                             self.schedule.microbatches)

    @property
    def halves(self) -> bool:
        """Return whether the schedule takes B and W apart."""
        return any(action.kind == "W" for row in self.schedule.rows for action in row)

    @property
    def block_bytes(self) -> float:
        """Return the bytes of a rank's block of an activation, a mean over the ranks."""
        words = Parallelism(self.scheme, self.grid, self.micro.batch, self.micro.seq,
                            **dict(self.options)).outer.words(
            self.micro.batch * self.micro.seq, self.micro.hidden)
        return words * np.dtype(self.dtype).itemsize / self.grid.ranks

    def trace(self, layers: int, place: int = 0, **more: Any) -> Trace:
        """Trace one micro-batch in so many layers, on one rank of a stage."""
        how = {"halves": True, "weights_half": self.weights_half} if self.halves else {}
        return dry_run.extrapolate_step(
            self.scheme, self.grid.ranks, self.grid.sizes, place, dtype=self.dtype,
            options=dict(self.options), causal=self.causal, recompute=self.recompute,
            **how, **more, **{**self.micro, "layers": layers})


@dataclass(frozen=True)
class PredictedPipeline:
    """The predicted times of a pipeline's step.

    Attributes
    ----------
    timeline : Timeline
        In seconds.
    inside, between : float
        Seconds of the longest hop inside a node and between nodes; NaN where there is none.
    """

    timeline: Timeline
    inside: float
    between: float

    @property
    def without_hops(self) -> Fraction:
        """Return the seconds of the step if hops took no time."""
        times = self.timeline.times
        return clock(self.timeline.schedule,
                     Times(times.forward, times.backward, times.weights)).makespan


def predict_pipeline(model: PipelineModel, machine: Machine,
                     repeats: bool = False) -> PredictedPipeline:
    """Predict the times of a step on a machine; with `repeats` backward takes F once more."""
    lengths = [len(part) for part in model.parts]
    steps = {layers: _chunk_seconds(model, machine, layers, repeats) for layers in set(lengths)}
    found = {pair: hop_seconds(machine, model.grid.ranks, model.block_bytes, *pair)
             for pair in pairs(model.schedule) if pair[0] != pair[1]}
    times = Times.by_stage(*zip(*(steps[layers] for layers in lengths)))
    links = {pair: Fraction(seconds) for pair, (seconds, _) in found.items()}
    times = Times(times.forward, times.backward, times.weights, links=links)
    longest = [max((seconds for seconds, level in found.values() if level == wanted),
                   default=np.nan) for wanted in ("node", "network")]
    return PredictedPipeline(clock(model.schedule, times), *longest)


def _chunk_seconds(model: PipelineModel, machine: Machine, layers: int,
                   repeats: bool) -> list[Fraction]:
    """Predict the seconds of F, B and W of so many layers; W is part of B where both are one."""
    trace = model.trace(layers, block=machine.elementwise_block)
    spent = trace_terms(machine, trace)
    phases = HALVES if model.halves else ("forward", "backward")
    seconds = [achieved_seconds(machine, spent[phase]) for phase in phases]
    seconds[1] += seconds[0] * repeats
    return [*map(Fraction, seconds), Fraction(0)][:3]


def hop_seconds(machine: Machine, places: int, size: float, source: int,
                target: int) -> tuple[float, str]:
    """Predict the seconds of a hop of all ranks of a stage to another, and the level of its links.

    Parameters
    ----------
    machine : Machine
        Its nodes hold consecutive ranks.
    places : int
        Ranks of a stage, each of which sends to the one of its own number.
    size : float
        Bytes that a rank sends.
    source, target : int
        The stages of the mesh.

    Returns
    -------
    (float, str)
        Of the slowest rank; "node", or "network" where one of them leaves its node.  The ranks of
        a node that send to others share its link.
    """
    place = np.arange(places)
    nodes = ((stage * places + place) // machine.ranks_per_node for stage in (source, target))
    own, other = nodes
    leaving = own[own != other]
    if not leaving.size:
        return achieved_seconds(machine, {
            "latency": machine.node.seconds_per_message,
            "node": size / machine.node.bytes_per_second}), "node"
    sharing = np.unique(leaving, return_counts=True)[1].max()
    return achieved_seconds(machine, {
        "latency": machine.network.seconds_per_message,
        "network": sharing * size / machine.network.bytes_per_second}), "network"


def peak_bytes(model: PipelineModel, stage: int) -> float:
    """Return the bytes of a rank of a stage at the peak, by the closed form."""
    micro = model.micro
    specs = [partial(model_spec, causal=model.causal, recompute=model.recompute)(
        micro, part=model.parts[part]) for part in model.schedule.stages[stage]]
    parallelism = Parallelism(model.scheme, model.grid, micro.batch, micro.seq,
                              **dict(model.options))
    return np.dtype(model.dtype).itemsize * costs.peak_words(
        model.schedule, stage, specs, parallelism, model.weights_half)


def largest_peak_bytes(model: PipelineModel) -> float:
    """Return the bytes at the peak of a rank of the stage that needs the most."""
    return max(peak_bytes(model, stage) for stage in range(model.schedule.ranks))


def plan_pipelines(models: Iterable[PipelineModel], machine: Machine) -> list[
        tuple[PipelineModel, PredictedPipeline, float, bool]]:
    """Predict models; return each with its bytes at the peak and whether they fit, best first."""
    found = []
    for model in models:
        peak = largest_peak_bytes(model)
        found.append((model, predict_pipeline(model, machine), peak,
                      peak <= machine.memory_bytes))
    return sorted(found, key=lambda one: (not one[3], one[1].timeline.makespan))


def sent_blocks(model: PipelineModel, stage: int) -> int:
    """Return how many blocks a rank of a stage sends to other stages in a step."""
    return sum(one.kind == "send" for one in operations(model.schedule, stage))
