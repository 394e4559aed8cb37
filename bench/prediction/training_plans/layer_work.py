"""Price a layer of a GPT, and its ends, for one micro-batch: seconds and bytes of a rank.

Closed forms, a millisecond each, price the layers of all plans; dry runs of one layer, some tens
of milliseconds, those of the best.
"""

import sys
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple, Sequence

import msgspec
import numpy as np

from bench.cases.variants import itemsize
from bench.prediction.closed_form_plan import PhaseWork, Price, collectives_of, grid_work
from bench.prediction.kernels import attention_of, priced
from bench.prediction.layer_blocks import (BlockSizes, LayerKind, elementwise_coefficients,
                                           launches)
from bench.prediction.pipelines.chunk_events import run_once
from bench.prediction.pipelines.pipeline_model import LAYERS, PASSES, PipelineModel, build_once
from bench.prediction.pipelines.training_step import own_experts
from bench.prediction.seconds import achieved_seconds, gemm_seconds, trace_terms, with_strides
from bench.prediction.training_plans.choices import Choice, Training
from bench.prediction.training_plans.expert_work import (EXPERT_DIRECTION, WIDE, Calls, exchanges,
                                                         gathered_words, grouping_seconds)
from mm3d.grid.activations import chunks_of
from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.schemes.closed_form import ProductShape, largest_block
from mm3d.tracing.events import Gemm, HALVES, PHASES
from mm3d.tracing.trace import Trace

sized_once = cache(BlockSizes)
# Bytes that the ends read and write, forward and backward: in arrays of logits, and of a table of
# words, as gradients are added to those of the head and of the embedding.
END_PASSES = {"numpy": ((8, 0), (6, 0)), "own": ((1, 0), (3, 7)), "fused": ((2, 0), (2, 0))}


class PlannedLayer(NamedTuple):
    """What determines the work of a layer.

    `halves` is whether W is apart from B, `experts` the number of replicas that divide experts,
    and `strides` are those of the grid's directions, and of that of experts or of a context, over
    the nodes; () for the grid's own.
    """

    scheme: str
    grid: GridShape
    micro: int
    recompute: str
    halves: bool
    experts: int = 1
    strides: tuple[int, ...] = ()
    context: int = 1
    way: str = "gather"

    @classmethod
    def of(cls, choice: Choice, whole: bool = False) -> "PlannedLayer":
        """Return the layer of a plan; with `whole` as if W were never apart, in any place."""
        divided = choice.expert_parallel > 1 or choice.context > 1    # among neighbours along d
        names = (*choice.grid, *["d"] * divided)
        strides = choice.strides if not whole and (choice.inside or divided) else ()
        return cls(choice.scheme, choice.grid, choice.micro, choice.recompute,
                   not whole and choice.schedule.startswith("zb"), choice.expert_parallel,
                   tuple(strides[name] for name in names) if strides else (), choice.context,
                   choice.way)

    @property
    def anywhere(self) -> "PlannedLayer":
        """Return the layer without its place on the nodes."""
        return self._replace(strides=()) if self.strides else self

    @property
    def placed(self) -> dict[str, int]:
        """Return the strides by direction; {} for the grid's own."""
        return dict(zip((*self.grid, "c" if self.context > 1 else EXPERT_DIRECTION), self.strides))

    def positions(self, training: Training) -> int:
        """Return how many positions of each sequence the first replica of a context has."""
        return sum(map(len, chunks_of(training.seq, self.context, 0)))


class LayerBytes(NamedTuple):
    """The bytes of a rank that a layer fills in one micro-batch, beside parameters.

    `saved` are kept from forward to backward, `operands` from B to W; `working` are the others
    during backward, `ends_working` those in the last stage, where logits are.  `grown` are those
    that each further layer of a stage adds beside `saved` during B, where W is apart.
    """

    saved: float
    operands: float
    working: float
    ends_working: float
    grown: float = 0.0


@dataclass(frozen=True)
class LayerWork:
    """The seconds of a rank in a layer, those of W also a part of backward, for one micro-batch.

    `ends` are those of embedding, head and loss, forward and backward.
    """

    forward: float
    backward: float
    weights: float
    ends: tuple[float, float]
    filled: LayerBytes


class Layers:
    """Remember the work of layers, which trainings share that differ in GPUs, batch and links."""

    def __init__(self, training: Training) -> None:
        machine = msgspec.structs.replace(training.machine, node=None, network=None)
        self.training = one = replace(training, gpus=0, batch=0, machine=machine, overlap=False,
                                      named="", asked="", keeps=None, stages=0)
        self.filled, self.counted, self.alone = (cache(partial(work, one)) for work in (
            screened_bytes, screen_layer, trace_alone))
        self.traces = cache(lambda layer: trace_layer(one, layer, self.alone(layer)))


def screened_bytes(training: Training, layer: PlannedLayer) -> tuple[LayerBytes, float]:
    """Estimate the bytes of a layer, and the seconds of its elementwise passes.

    Both are linear in a rank's elements of activations, and of scores: bytes in those of one
    sequence, which are computed one after the other.
    """
    machine, size = training.machine, itemsize(training.dtype)
    blocks = _blocks(training, layer)
    elements = blocks.elements()
    kind = LayerKind.of(blocks.sizes, training.gpt.experts)
    moved = sum(words @ elements for words in elementwise_coefficients(
        machine.kernels, attention_of(machine, training.dtype), kind, training.dtype))
    share, arrays = blocks.scores_held(layer.way)
    elements[-1] *= share / blocks.batch
    saved, working, operands, grown = (size * float(words @ elements) for words in layer_words(
        layer.recompute, training.dtype, kind))
    working += max(size, WIDE) * _gathered(training, layer)
    # In 16 bits a ring's backward alone holds scores.
    if machine.elementwise_block == sys.maxsize and (size > 2 or layer.way == "ring"):
        working = max(working, arrays * max(size, 4) * elements[-1] / blocks.sizes.group)
    working += size * blocks.words_of_others(layer.way)    # keys and values, and gradients
    logits = _logits(training, layer)    # their gradient overwrites them
    return (LayerBytes(saved, operands, working, max(working, size * logits), grown),
            achieved_seconds(machine, {"memory": size * float(moved)
                                       / machine.memory_bandwidth}))


@cache
def layer_words(recompute: str, dtype: str, kind: LayerKind) -> tuple[np.ndarray, ...]:
    """Return the words that a layer saves, and those of its further arrays in backward.

    After these are those of `LayerBytes.operands` and `LayerBytes.grown`.  All are per word of
    `BlockSizes.elements`, but of the scores of a sequence alone.
    """
    rows, found, size = [], [], itemsize(dtype)
    # As many rows as make products, rather than gradients of weights, the peak.
    experts, group = kind.experts, kind.layers
    hidden, more = (256, 8) if experts else (64, 8)
    for ranks, batch, seq in ((1, 2, 128), (4, 2, 128), (3, 2, 128), (1, 8, 128), (1, 2, 256)):
        batch *= more
        grid, sizes = GridShape("x", (ranks,)), kind.small(hidden, batch, seq)
        stack = Stack(**sizes, causal=True, dtype=dtype, recompute=recompute, experts=experts)
        whole, apart = (traced_bytes([PipelineModel(
            build_once(name, 1, 1), "1d", (grid,), stack).trace(group * layers)
            for layers in range(1, most + 1)], group=group)
            for name, most in (("gpipe", 1), ("zb-h1", 2)))
        rows.append(BlockSizes("1d", grid, sizes).elements())
        rows[-1][-1] *= (size > 2) / batch    # in 16 bits kernels hold no scores
        gradients = gathered_words("1d", grid, replace(sizes, layers=1), experts, 1)
        found.append((whole.saved / size, whole.working / size - gradients,
                      apart.operands / size, apart.grown / size))
    return tuple(np.maximum(words, 0) for words in np.linalg.lstsq(
        np.array(rows), np.array(found), rcond=None)[0].T)


@dataclass(frozen=True)
class ScreenedLayer:
    """Forward and backward of a layer, and of the ends of a GPT, in any place on the nodes.

    `weights` is the share of backward that W takes.
    """

    passes: tuple[PhaseWork, PhaseWork]
    ends: tuple[PhaseWork, PhaseWork]
    weights: float
    filled: LayerBytes


def screen_layer(training: Training, layer: PlannedLayer) -> ScreenedLayer:
    """Count the work of a layer by closed forms."""
    machine, experts, group = training.machine, training.gpt.experts, training.group
    stack = training.stack(layer.micro, layer.recompute, group)
    of_rank = experts and replace(experts, count=own_experts(experts, layer.experts),
                                  top=min(experts.top, own_experts(experts, layer.experts)))
    found, _ = grid_work(layer.scheme, layer.grid, machine, stack, (layer.context, layer.way),
                         of_rank)
    split = grouping_seconds(training, layer.scheme, layer.grid, layer.micro, layer.experts)
    counts = launches(machine.kernels, attention_of(machine, training.dtype), layer.recompute,
                      LayerKind.of(stack.sizes, of_rank), training.dtype)
    started = [machine.launch_seconds * count / machine.achieved.latency + times * split
               for count, times in zip(counts, (1, 2 + (layer.recompute == "full")))]
    halves = cost.flops_of_halves(stack.sizes, experts)
    share = halves["backward_weights"] / (
        sum(halves.values()) + cost.flops_again(stack.sizes, layer.recompute, experts))
    moves: tuple[Calls, Calls] = (), ()
    if layer.experts > 1:
        moves = exchanges(training, layer.experts, layer.recompute == "full",
                          _blocks(training, layer).outer_block)
    passes = tuple(PhaseWork((found[phase].seconds_alone + more) / group, tuple(
        (event, calls / group) for event, calls in (*found[phase].collectives, *own)))
        for phase, more, own in zip(PHASES, started, moves))
    return ScreenedLayer(passes, _screened_ends(training, layer), share,
                         screened_bytes(training, layer)[0])


def screened_work(layer: PlannedLayer, screened: ScreenedLayer, price: Price) -> LayerWork:
    """Price a layer by the result of `screen_layer`, which does not depend on strides."""
    passes, ends = (tuple(one.seconds(price, layer.placed) for one in both)
                    for both in (screened.passes, screened.ends))
    return LayerWork(*passes, screened.weights * passes[1], ends, screened.filled)


def _screened_ends(training: Training, layer: PlannedLayer) -> tuple[PhaseWork, PhaseWork]:
    """Return the work of the ends, forward and backward, by closed forms."""
    machine, gpt, kind = training.machine, training.gpt, find_scheme(layer.scheme)
    shape = ProductShape("up", layer.micro * layer.positions(training), gpt.hidden, gpt.vocab)
    both = (kind.transposed_moves(layer.grid, ProductShape("down", shape.M, shape.K, shape.N))
            if gpt.tied else kind.product_moves(layer.grid, shape))
    size = itemsize(training.dtype)
    product = sum(one.count * gemm_seconds(machine, Gemm(1, *one[:3], training.dtype))
                  for one in kind.local_products(layer.grid, shape))
    arrays = np.array([_logits(training, layer), gpt.hidden * gpt.vocab / layer.grid.ranks])
    return tuple(PhaseWork(achieved_seconds(machine, {
        "gemm": times * product,
        "memory": float(passes @ arrays) * size / machine.memory_bandwidth}),
        collectives_of(moves, layer.grid, size))
        for times, passes, moves in zip((1, 2), np.array(END_PASSES[machine.kernels]), both))


def _blocks(training: Training, layer: PlannedLayer) -> BlockSizes:
    """Return the block sizes of a layer."""
    return sized_once(layer.scheme, layer.grid, training.stack(layer.micro, "none", 1).sizes,
                      layer.context)


def _logits(training: Training, layer: PlannedLayer) -> float:
    """Return the largest number of logits of a rank."""
    blocks = _blocks(training, layer)
    return (blocks.batch * largest_block(layer.positions(training), blocks.positions)
            * largest_block(training.gpt.vocab, blocks.features))


def trace_alone(training: Training, layer: PlannedLayer) -> tuple[Trace, ...]:
    """Run a group of layers dry; where W is apart, two groups as well."""
    alone, group = replace(_of_one_group(training, layer), vocab=0), training.group
    return tuple(run_once(alone, group * groups, training.machine.elementwise_block, LAYERS)
                 for groups in range(1, 2 + layer.halves))


def trace_layer(training: Training, layer: PlannedLayer,
                alone: tuple[Trace, ...] = ()) -> tuple[Trace, ...]:
    """Run a GPT of one group dry; return also the result of `trace_alone`, before it."""
    return (*(alone or trace_alone(training, layer)), run_once(
        _of_one_group(training, layer), training.group, training.machine.elementwise_block,
        *PASSES))


def _of_one_group(training: Training, layer: PlannedLayer) -> PipelineModel:
    """Return a model of one group of layers, on as many replicas as divide the experts."""
    return PipelineModel(
        build_once("zb-h1" if layer.halves else "gpipe", 1, 1), layer.scheme, (layer.grid,),
        training.stack(layer.micro, layer.recompute, training.group), data=layer.experts,
        expert_parallel=layer.experts, vocab=training.gpt.vocab, tied=training.gpt.tied,
        context=layer.context, context_way=layer.way)


def layer_bytes(training: Training, layer: PlannedLayer, alone: Sequence[Trace],
                whole: Trace | None = None) -> LayerBytes:
    """Return the result of `traced_bytes`, with gradients of experts as wide as in training."""
    found, size = traced_bytes(alone, whole, training.group), itemsize(training.dtype)
    more = (max(size, WIDE) - size) * _gathered(training, layer)
    return found._replace(working=found.working + more, ends_working=found.ends_working + more)


def _gathered(training: Training, layer: PlannedLayer) -> int:
    """Return the result of `gathered_words`."""
    return gathered_words(layer.scheme, layer.grid, training.stack(layer.micro, "none", 1).sizes,
                          training.gpt.experts, layer.experts)


def traced_bytes(alone: Sequence[Trace], whole: Trace | None = None,
                 group: int = 1) -> LayerBytes:
    """Return the bytes of a layer by `trace_alone`, and those of its ends by the GPT `whole`.

    Both have a `group` of layers, by which kept bytes are divided.
    """
    one, *two = alone
    working = [found.peak - found.parameters - one.saved for found in (one, whole or one)]
    return LayerBytes(one.saved / group, one.operands / group, *working, *(
        (found.peak - one.peak - one.parameters - one.saved) / group for found in two))


def traced_work(training: Training, layer: PlannedLayer, traces: tuple[Trace, ...]) -> LayerWork:
    """Price a layer by the result of `trace_layer`, which does not depend on strides."""
    alone, both = traces[0], traces[-1]
    model, strides = _of_one_group(training, layer), layer.placed
    own, all_of_it = (_phase_seconds(training, model, with_strides(
        one, lambda event: strides[event.direction]) if strides else one)
                      for one in (alone, both))
    ends = tuple(whole - part for whole, part in zip(all_of_it, own))
    return LayerWork(*(seconds / training.group for seconds in own), ends[:2],
                     layer_bytes(training, layer, traces[:-1], both))


def _phase_seconds(training: Training, model: PipelineModel,
                   trace: Trace) -> tuple[float, float, float]:
    """Return the seconds of forward, of backward, and of W within it."""
    machine = training.machine
    spent = trace_terms(machine, priced(trace, machine, model.stack, model.masked))
    seconds = {phase: achieved_seconds(machine, terms) for phase, terms in spent.items()}
    weights = seconds.get(HALVES[-1], 0.0)
    backward = sum(seconds.get(phase, 0.0) for phase in (PHASES[1], *HALVES))
    return seconds[PHASES[0]], backward, weights
