"""Predict a step of training a GPT by a machine model: seconds, their shares, and memory by kind.

The step is a dry run of `mm3d.GPT` (`pipeline_seconds`): embedding, layers, head and loss, sums of
gradients over replicas.  The optimizer is added from the bytes that one fused kernel of AdamW
moves.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property

from msgspec.structs import replace as changed

from bench.cases.variants import itemsize
from bench.prediction.layer_blocks import ADDED, weight_parts
from bench.prediction.machine_model import Machine, load_machine
from bench.prediction.memory_fit import state_by_kind
from bench.prediction.pipelines.pipeline_model import PipelineModel
from bench.prediction.pipelines.pipeline_seconds import (PredictedPipeline, Spent,
                                                         predict_pipeline)
from bench.prediction.seconds import achieved_seconds, collective_terms
from mm3d import ModelSizes
from mm3d.config import Config, Division, Model
from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.model.experts.costs import with_inner
from mm3d.model.experts.options import ExpertOptions
from mm3d.schemes import find_scheme
from mm3d.schemes.closed_form import ProductShape
from mm3d.tracing.events import Collective, HALVES, PHASES
from mm3d.training.mesh import expert_shards

SHARES = ("products", "elementwise", "links", "latency", "hops", "replicas", "optimizer", "bubble")
GRADIENT_READS = 2    # by the norm that is clipped, and by the step
GPU_KERNELS = ("own", "fused")    # of `Machine.kernels`


@dataclass(frozen=True)
class TrainingStep:
    """The predicted seconds of a step of training; `work` has `shares` without hops and bubble."""

    seconds: float
    pipeline: PredictedPipeline
    work: dict[str, float]

    @cached_property
    def shares(self) -> dict[str, float]:
        """Return the seconds of the stage that works the longest, by `SHARES`.

        They are those of products; elementwise passes; links between its ranks; latency of
        messages and of kernels; hops between stages that the step waits for; sums and gathers over
        replicas that it waits for; optimizer; and all else, the bubble.
        """
        known = self.work | {"hops": float(self.pipeline.seconds - self.pipeline.without_hops)}
        return known | {"bubble": max(0.0, self.seconds - sum(known.values()))}


def predict_step(model: PipelineModel, machine: Machine, repeats: bool = False,
                 overlap: bool = False, inside: str = "") -> TrainingStep:
    """Predict a step of training a model with a vocabulary; see also `predict_pipeline`.

    Backward `repeats` the whole forward, as Megatron-LM does where activations are recomputed;
    this library leaves out the last product.  With `overlap` sums over replicas go on behind the
    backward of the last micro-batch, and gathers behind the forward of the first; with ZeRO 2 and
    3 behind those of every micro-batch.
    """
    found = predict_pipeline(model, machine, repeats, overlap, inside)
    times, schedule = found.timeline.times, model.schedule
    busy = [sum((times.of("F", one) + times.of("BW", one) for one in stages), Fraction(0))
            for stages in schedule.stages]
    sums = float(max(found.sums))
    if overlap:
        sums = max(0.0, sums - float(min(busy)))
    sums += tied_seconds(model, machine, inside)
    optimizer = adamw_seconds(machine, _divided(model, 1), model.stack.dtype)
    written = unadded_seconds(machine, _divided(model, 2), model.stack.dtype)
    rank = max(range(schedule.ranks), key=busy.__getitem__)
    work = dict.fromkeys(SHARES, 0.0) | {"replicas": sums, "optimizer": optimizer,
                                         "elementwise": -written}
    for stage in schedule.stages[rank]:
        for term, seconds in _terms_of_micro(model, machine, found.spent[stage], repeats,
                                             overlap).items():
            work[term] += seconds * schedule.microbatches
    return TrainingStep(float(found.timeline.makespan) - written + sums + optimizer, found, work)


def predict_gpu_step(model: Model, dtype: str, name: str) -> tuple[dict[str, float], int]:
    """Predict a step of training a model in a dtype, by AdamW, on one GPU of a machine.

    Returns the seconds by `GPU_KERNELS`, and the most bytes of arrays at a time, AdamW's among
    them, in a dry run of this library.  Raises UsageError when there is no such machine, or it has
    no rate for the dtype.
    """
    machine = load_machine(name, dtype)
    whole = PipelineModel.of(Config(replace(model, dtype=dtype), Division(scheme="serial")), 1)
    seconds = {kernels: predict_step(whole, changed(machine, kernels=kernels)).seconds
               for kernels in GPU_KERNELS}
    return seconds, int(whole.whole_step(0, 0, optimizer=True).peak)


def _terms_of_micro(model: PipelineModel, machine: Machine, spent: Spent, repeats: bool,
                    overlap: bool) -> dict[str, float]:
    """Return the seconds of a micro-batch in a stage of the schedule, by some of `SHARES`."""
    phases = HALVES if model.halves else PHASES[1:]
    names = {"gemm": "products", "memory": "elementwise", "node": "links", "network": "links",
             "latency": "latency"}
    total = dict.fromkeys([*names.values(), "replicas"], 0.0)
    for phase, times in ((PHASES[0], 1 + repeats), *((one, 1) for one in phases)):
        for term, seconds in spent.own[phase].items():
            total[names[term]] += times * seconds / getattr(machine.achieved, term)
        own = achieved_seconds(machine, spent.own[phase])
        total["replicas"] += times * (spent.seconds(machine, phase, overlap) - own)
    return total


def parameters_of_ranks(model: PipelineModel) -> list[tuple[float, float]]:
    """Return the parameters of the first rank of each stage, by dividing the model.

    First are those that every replica has, then those of the experts that it has.
    """
    sizes, schedule, parts = model.sizes, model.schedule, model.parts
    divided = weight_parts(model.scheme, model.grids[0])
    layers = [sum(len(parts[one]) for one in stages) for stages in schedule.stages]
    first, last = (schedule.rank_of[one] for one in (0, schedule.stage_count - 1))
    extra = [0.0] * schedule.ranks
    if model.vocab:
        positions = sizes.seq if sizes.architecture.positions == "learned" else 0
        extra[first] += (model.vocab + positions) * sizes.hidden / divided
        extra[last] += cost.vectors_of_norm(sizes) * sizes.hidden / divided    # of the last one
    if model.vocab and (last != first or not model.tied):
        extra[last] += model.vocab * sizes.hidden / divided
    where = model.scheme, model.grids[0], sizes, model.experts
    layer, routed = layer_parameters(*where), expert_parameters(*where, model.expert_parallel)
    return [(layer * count + more, routed * count) for count, more in zip(layers, extra)]


@cache
def layer_parameters(scheme: str, grid: GridShape, sizes: ModelSizes,
                     experts: ExpertOptions | None = None) -> float:
    """Return the parameters of a layer on the first rank, whose blocks of weights are the largest.

    Vectors are taken to be divided evenly.  With experts it is the mean of the layers, with their
    routers and shared experts, without the others.
    """
    one, every = replace(sizes, layers=1), experts.every if experts else 1
    products = cost.list_products(one)
    vectors = cost.parameters(one) - sum(
        times * product.N * product.K for product, times in products.items())
    found = (_words_of_weights(scheme, grid, products) + vectors) / weight_parts(scheme, grid)
    if experts:
        design = experts.design
        columns = experts.count + design.shared_gate
        found += (columns * sizes.hidden / weight_parts(scheme, grid)
                  - _perceptron(scheme, grid, one)) / every
        if design.shared is not None:
            found += _perceptron(scheme, grid, with_inner(one, design.shared)) / every
    return found


@cache
def expert_parameters(scheme: str, grid: GridShape, sizes: ModelSizes,
                      experts: ExpertOptions | None, parts: int) -> float:
    """Return the parameters of the first rank's experts, which `parts` replicas divide.

    It is a mean of the layers.
    """
    if experts is None:
        return 0.0
    one = with_inner(replace(sizes, layers=1), experts.design.width)
    return own_experts(experts, parts) * _perceptron(scheme, grid, one) / experts.every


def own_experts(experts: ExpertOptions, parts: int) -> int:
    """Return the experts of the first of so many replicas that divide them."""
    return math.ceil(experts.count / parts)


def _perceptron(scheme: str, grid: GridShape, one: ModelSizes) -> float:
    """Return the parameters of the perceptron of a layer on the first rank."""
    how = one.architecture
    vectors = (how.biases == "all") * (how.gates * one.inner + one.hidden)
    return (_words_of_weights(scheme, grid, expert_products(one)) + vectors
            ) / weight_parts(scheme, grid)


def expert_products(one: ModelSizes) -> dict[ProductShape, int]:
    """Return the products of an expert's perceptron, of the sizes of one layer."""
    routed = ExpertOptions(2, top=2, every=1)    # twice the rows of other products
    return {product: times for product, times in cost.list_products(one, routed).items()
            if product.M > one.tokens}


def _words_of_weights(scheme: str, grid: GridShape, products: dict[ProductShape, int]) -> int:
    """Return the words of weights, as if all ranks that divide one had as much as the first."""
    kind, ranks = find_scheme(scheme), grid.ranks
    even = kind.local_products(grid, ProductShape("up", ranks, ranks, ranks))[0]
    gathered = ranks ** 2 // (even.inner * even.columns)    # parts of a weight in a product
    own = [(times, kind.local_products(grid, product)[0]) for product, times in products.items()]
    return gathered * sum(times * local.inner * local.columns for times, local in own)


def _divided(model: PipelineModel, zero: int) -> float:
    """Return the parameters of a rank of the largest stage, divided from a stage of ZeRO on."""
    shares = shards_of(model) if model.zero >= zero else (1, 1)
    most = max(parameters_of_ranks(model), key=sum)
    return sum(count / share for count, share in zip(most, shares))


def shards_of(model: PipelineModel) -> tuple[float, float]:
    """Return the replicas among which ZeRO divides a copy of the model, and a rank's experts."""
    shards = model.dividing
    return shards, shards_of_experts(model.experts, model.expert_parallel, shards)


@cache
def shards_of_experts(experts: ExpertOptions | None, parts: int, shards: int) -> float:
    """Return among how many ranks ZeRO divides the experts of the first rank.

    Experts stay whole: where ranks have more than others, it is less than the number of ranks.
    `parts` replicas divide the experts, and `shards` a copy of the model.
    """
    own = own_experts(experts, parts) if experts else 1
    return own / math.ceil(own / expert_shards(shards, parts))


def adamw_seconds(machine: Machine, parameters: float, dtype: str) -> float:
    """Predict the seconds of AdamW on a rank that changes so many parameters.

    One kernel reads gradients twice, for a norm that is clipped, reads and writes masters and
    moments, and writes values.  This library's kernel of a GPU reads gradients once, as nothing is
    clipped.
    """
    size = itemsize(dtype)
    wide = max(size, 4)
    read = wide if machine.kernels == "own" else GRADIENT_READS * size
    moved = read + 6 * wide + size * (size == 2)
    return achieved_seconds(machine, {"memory": moved * parameters / machine.memory_bandwidth})


def unadded_seconds(machine: Machine, gradients: float, dtype: str) -> float:
    """Predict by how much a trace of the first micro-batch is too long, of a rank's gradients.

    This library's products write them, where traces have kernels that move `ADDED` numbers to add
    to each.  In 16 bits a product is rounded into a wider gradient, which moves as many bytes.
    """
    size = itemsize(dtype)
    if machine.kernels != "own" or size == 2:
        return 0.0
    return achieved_seconds(machine, {"memory": ADDED * size * gradients
                                      / machine.memory_bandwidth})


def tied_seconds(model: PipelineModel, machine: Machine, inside: str = "") -> float:
    """Predict the seconds in which the first and the last stage sum a tied table's gradient."""
    schedule = model.schedule
    first, last = (schedule.rank_of[one] for one in (0, schedule.stage_count - 1))
    if not model.tied or first == last:
        return 0.0
    return table_seconds(
        machine, model.vocab * model.sizes.hidden / weight_parts(model.scheme, model.grids[0]),
        model.stack.dtype, abs(last - first) * model.strides(inside)["s"])


def table_seconds(machine: Machine, words: float, dtype: str, stride: int) -> float:
    """Predict the seconds in which two ranks, a stride apart, sum a gradient of so many words."""
    return achieved_seconds(machine, collective_terms(machine, Collective(
        "all_reduce", "s", 2, stride, int(words * itemsize(dtype)))))


def flops_of_step(model: PipelineModel) -> dict[str, float]:
    """Count the operations of a step, of all replicas: "model", and "hardware" with recomputation.

    The model's are those of all products forward and twice again backward, scores without regard
    to the mask, and the head, as Narayanan et al. (arXiv 2104.04473) count.
    """
    sizes, stack = model.sizes, model.stack
    useful = sum(cost.flops(sizes, stack.experts).values())
    useful += 6 * sizes.tokens * sizes.hidden * model.vocab
    again = cost.flops_again(sizes, stack.recompute, stack.experts)
    return {"model": model.data * useful, "hardware": model.data * (useful + again)}


def memory_by_kind(model: PipelineModel, stage: int, peak: float,
                   activations: float) -> dict[str, float]:
    """Return the peak bytes of the first rank of a stage by kind.

    The stage, its peak and the activations, saved for backward at that moment, are as
    `fullest_stage` returns them.  Values, gradients, masters and moments are by dividing the
    model.  All else are buffers: of collectives, of gathered weights, and intermediate arrays.
    """
    parts = [state_by_kind(model.stack.dtype, count, model.zero, shards)
             for count, shards in zip(parameters_of_ranks(model)[stage], shards_of(model))]
    found = {name: sum(one[name] for one in parts) for name in parts[0]}
    found["activations"] = activations
    return found | {"buffers": max(0.0, peak - sum(found.values())), "all": peak}
