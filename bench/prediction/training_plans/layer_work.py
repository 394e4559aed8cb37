"""Price a layer of a GPT, and its ends, for one micro-batch: seconds and bytes of a rank.

Closed forms, a millisecond each, price the layers of all plans; dry runs of one layer, some tens
of milliseconds, those of the best.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, Sequence

import numpy as np

from bench.cases.variants import itemsize
from bench.prediction.closed_form_plan import (BlockSizes, LayerKind, PhaseWork,
                                               collectives_of, elementwise_coefficients,
                                               grid_work, line_elements)
from bench.prediction.kernels import with_kernels
from bench.prediction.pipeline_model import PipelineModel, build_once
from bench.prediction.pipeline_seconds import HALVES
from bench.prediction.seconds import (achieved_seconds, gemm_seconds, trace_terms,
                                      with_strides)
from bench.prediction.training_plans.choices import Choice, Training
from mm3d import ModelSizes
from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.schemes.closed_form import ProductShape, largest_block
from mm3d.tracing import dry_run
from mm3d.tracing.events import Boundary, Collective, Gemm, Overlapped, PHASES
from mm3d.tracing.trace import Trace

# Bytes that the ends of a GPT read and write, in arrays of logits: forward and backward.
LOGIT_ARRAYS = 2    # that are held at once
LOGIT_PASSES = {"own": (8, 6), "fused": (2, 2)}


class Layer(NamedTuple):
    """What determines the work of a layer.

    `halves` is whether W is apart from B, and `strides` are those of the grid's directions over
    the nodes; () for the grid's own.
    """

    scheme: str
    grid: GridShape
    micro: int
    recompute: str
    halves: bool
    strides: tuple[int, ...] = ()

    @classmethod
    def of(cls, choice: Choice, whole: bool = False) -> "Layer":
        """Return the layer of a plan; with `whole` as if W were never apart, in any place."""
        strides = choice.strides if choice.inside and not whole else ()
        return cls(choice.scheme, choice.grid, choice.micro, choice.recompute,
                   not whole and choice.schedule.startswith("zb"),
                   tuple(strides[name] for name in choice.grid) if strides else ())

    @property
    def anywhere(self) -> "Layer":
        """Return the layer without its place on the nodes."""
        return self._replace(strides=()) if self.strides else self


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
    """The work of a rank in a layer, and in the ends of a GPT, for one micro-batch.

    Attributes
    ----------
    forward, backward, weights : float
        Seconds; those of W are part of backward.
    ends : (float, float)
        Seconds of embedding, head and loss, forward and backward.
    filled : LayerBytes
        Bytes.
    """

    forward: float
    backward: float
    weights: float
    ends: tuple[float, float]
    filled: LayerBytes


def screened_bytes(training: Training, layer: Layer) -> tuple[LayerBytes, float]:
    """Estimate the bytes of a layer, and the seconds of its elementwise passes.

    Both are linear in a rank's elements of activations, and of scores: bytes in those of one
    sequence, which are computed one after the other.
    """
    machine, size = training.machine, itemsize(training.dtype)
    blocks = _blocks(layer.scheme, layer.grid, training.stack(layer.micro, "none", 1).sizes)
    elements, kind = blocks.elements(), LayerKind.of(blocks.sizes)
    moved = sum(words @ elements for words in elementwise_coefficients(
        machine.kernels, machine.attention, kind))
    elements[-1] /= largest_block(layer.micro, blocks.sequences)
    saved, working, operands, grown = (size * float(words @ elements) for words in words_of(
        layer.recompute, training.dtype, kind))
    logits = _logits(training, layer)
    return (LayerBytes(saved, operands, working, max(working, size * LOGIT_ARRAYS * logits),
                       grown),
            achieved_seconds(machine, {"memory": size * float(moved)
                                       / machine.memory_bandwidth}))


@cache
def words_of(recompute: str, dtype: str, kind: LayerKind) -> tuple[np.ndarray, ...]:
    """Return the words that a layer saves, and those of its further arrays in backward.

    After these are those of `LayerBytes.operands` and `LayerBytes.grown`.  All are per word of
    `BlockSizes.elements`, but of the scores of a sequence alone.
    """
    rows, found, size = [], [], itemsize(dtype)
    for ranks, batch, seq in ((1, 2, 128), (4, 2, 128), (3, 2, 128), (1, 8, 128), (1, 2, 256)):
        sizes = kind.small(64, batch, seq)
        stack = Stack(**sizes, causal=True, dtype=dtype, recompute=recompute)
        whole, apart = (traced_bytes([PipelineModel(
            build_once(name, 1, 1), "1d", (GridShape("x", (ranks,)),), stack).trace(layers)
            for layers in range(1, most + 1)]) for name, most in (("gpipe", 1), ("zb-h1", 2)))
        rows.append(line_elements(ranks, sizes))
        rows[-1][-1] /= batch
        found.append((whole.saved / size, whole.working / size, apart.operands / size,
                      apart.grown / size))
    return tuple(np.maximum(words, 0) for words in np.linalg.lstsq(
        np.array(rows), np.array(found), rcond=None)[0].T)


@cache
def launches(kernels: str, attention: str, recompute: str, kind: LayerKind) -> tuple[int, int]:
    """Count the operations that a rank starts in a layer, forward and backward."""
    sizes = kind.small(64, 2, 8)
    trace = with_kernels(dry_run.trace_step("1d", 2, **sizes, recompute=recompute), kernels,
                         attention, "float32", sizes.head)
    return tuple(sum(times for (when, _, event), times in trace.events.items() if when == phase
                     and not isinstance(event, (Boundary, Collective, Overlapped)))
                 for phase in PHASES)


@dataclass(frozen=True)
class ScreenedLayer:
    """The work of a layer by closed forms, in any place on the nodes.

    Attributes
    ----------
    passes, ends : (PhaseWork, PhaseWork)
        Forward and backward, of the layer and of the ends of a GPT.
    weights : float
        The share of backward that W takes.
    filled : LayerBytes
        Bytes.
    """

    passes: tuple[PhaseWork, PhaseWork]
    ends: tuple[PhaseWork, PhaseWork]
    weights: float
    filled: LayerBytes


def screen_layer(training: Training, layer: Layer) -> ScreenedLayer:
    """Count the work of a layer by closed forms."""
    machine, stack = training.machine, training.stack(layer.micro, layer.recompute, 1)
    found, _ = grid_work(layer.scheme, layer.grid, machine, stack)
    started = [machine.launch_seconds * count / machine.achieved.latency for count in launches(
        machine.kernels, machine.attention, layer.recompute, LayerKind.of(stack.sizes))]
    halves = cost.flops_of_halves(stack.sizes)
    share = halves["backward_weights"] / (
        sum(halves.values()) + cost.flops_again(stack.sizes, layer.recompute))
    passes = tuple(replace(found[phase], seconds_alone=found[phase].seconds_alone + more)
                   for phase, more in zip(PHASES, started))
    return ScreenedLayer(passes, _screened_ends(training, layer), share,
                         screened_bytes(training, layer)[0])


def screened_work(training: Training, layer: Layer, screened: ScreenedLayer) -> LayerWork:
    """Price a layer by the result of `screen_layer`, which does not depend on strides."""
    strides = dict(zip(layer.grid, layer.strides))
    passes, ends = (tuple(one.seconds(training.machine, strides) for one in both)
                    for both in (screened.passes, screened.ends))
    return LayerWork(*passes, screened.weights * passes[1], ends, screened.filled)


def _screened_ends(training: Training, layer: Layer) -> tuple[PhaseWork, PhaseWork]:
    """Return the work of the ends, forward and backward, by closed forms."""
    machine, gpt, kind = training.machine, training.gpt, find_scheme(layer.scheme)
    shape = ProductShape("up", layer.micro * training.seq, gpt.hidden, gpt.vocab)
    size = itemsize(training.dtype)
    product = sum(one.count * gemm_seconds(machine, Gemm(1, *one[:3], training.dtype))
                  for one in kind.local_products(layer.grid, shape))
    logits = size * _logits(training, layer)
    return tuple(PhaseWork(achieved_seconds(machine, {
        "gemm": times * product, "memory": passes * logits / machine.memory_bandwidth}),
        collectives_of(moves, layer.grid, size))
        for times, passes, moves in zip((1, 2), LOGIT_PASSES[machine.kernels],
                                        kind.product_moves(layer.grid, shape)))


@cache
def _blocks(scheme: str, grid: GridShape, sizes: ModelSizes) -> BlockSizes:
    return BlockSizes(scheme, grid, sizes)


def _logits(training: Training, layer: Layer) -> float:
    """Return the largest number of logits of a rank."""
    blocks = _blocks(layer.scheme, layer.grid, training.stack(layer.micro, "none", 1).sizes)
    return (largest_block(layer.micro, blocks.sequences)
            * largest_block(training.seq, blocks.positions)
            * largest_block(training.gpt.vocab, blocks.features))


def trace_alone(training: Training, layer: Layer) -> tuple[Trace, ...]:
    """Run a layer dry; where W is apart, two layers as well."""
    alone = replace(_of_one_layer(training, layer), vocab=0)
    return tuple(alone.trace(layers, block=training.machine.elementwise_block)
                 for layers in range(1, 2 + layer.halves))


def trace_layer(training: Training, layer: Layer,
                alone: tuple[Trace, ...] = ()) -> tuple[Trace, ...]:
    """Run a GPT of one layer dry; return also the result of `trace_alone`, before it."""
    return (*(alone or trace_alone(training, layer)), _of_one_layer(training, layer).trace(
        1, block=training.machine.elementwise_block))


def _of_one_layer(training: Training, layer: Layer) -> PipelineModel:
    return PipelineModel(
        build_once("zb-h1" if layer.halves else "gpipe", 1, 1), layer.scheme, (layer.grid,),
        training.stack(layer.micro, layer.recompute, 1), vocab=training.gpt.vocab,
        tied=training.gpt.tied)


def traced_bytes(alone: Sequence[Trace], whole: Trace | None = None) -> LayerBytes:
    """Return the bytes of a layer by `trace_alone`, and those of its ends by the GPT `whole`."""
    one, *two = alone
    working = [found.peak - found.parameters - one.saved for found in (one, whole or one)]
    return LayerBytes(one.saved, one.operands, *working, *(
        found.peak - one.peak - one.parameters - one.saved for found in two))


def traced_work(training: Training, layer: Layer, traces: tuple[Trace, ...]) -> LayerWork:
    """Price a layer by the result of `trace_layer`, which does not depend on strides."""
    alone, both = traces[0], traces[-1]
    strides = dict(zip(layer.grid, layer.strides))
    own, all_of_it = (_phase_seconds(training, with_strides(one, strides) if strides else one)
                      for one in (alone, both))
    ends = tuple(whole - part for whole, part in zip(all_of_it, own))
    return LayerWork(*own, ends[:2], traced_bytes(traces[:-1], both))


def _phase_seconds(training: Training, trace: Trace) -> tuple[float, float, float]:
    """Return the seconds of forward, of backward, and of W within it."""
    machine = training.machine
    spent = trace_terms(machine, with_kernels(trace, machine.kernels, machine.attention,
                                              training.dtype, training.gpt.sizes().head))
    seconds = {phase: achieved_seconds(machine, terms) for phase, terms in spent.items()}
    weights = seconds.get(HALVES[-1], 0.0)
    backward = sum(seconds.get(phase, 0.0) for phase in ("backward", *HALVES[1:]))
    return seconds[PHASES[0]], backward, weights
