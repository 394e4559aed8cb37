"""Predict what the exchange of tokens costs in a layer with experts, by dry runs.

Replicas of one rank each divide the experts (expert parallelism beside data parallelism), and all
experts get equally many tokens.  Words are exact for that routing, seconds are a model's.
"""

import math
from dataclasses import dataclass

import numpy as np

from bench.prediction.machine_model import Machine
from bench.prediction.seconds import (
    achieved_seconds, collective_terms, gemm_seconds, step_seconds)
from mm3d import ModelSizes
from mm3d.model.experts.options import ExpertOptions
from mm3d.tracing.dry_run import trace_step
from mm3d.tracing.events import Collective, Gemm
from mm3d.tracing.trace import Trace
from mm3d.training.dry_replicas import replicas_with_experts


@dataclass(frozen=True)
class Overhead:
    """Hold what the exchange of a layer with experts costs a rank, forward and backward.

    Attributes
    ----------
    experts : ExpertOptions
        The options.
    parallel : int
        Number of ranks that divide the experts.
    words, bytes : int
        Words that the rank sends in its all-to-alls, and their bytes.
    by_hand : float
        4 k T h (n - 1) / n words, for T tokens of h features on each of n ranks.
    products, layer : float
        Seconds of the matrix products alone, and of all but the exchange.
    inside : float
        Seconds of the exchange, dispatch and combine and the counts of choices, with all ranks in
        one node; NaN where they are too many.
    between : float
        The same with one rank in each node, or in full nodes where one node has too few ranks.
    peak : int
        Bytes at the peak of the rank, for this layer alone.
    """

    experts: ExpertOptions
    parallel: int
    words: int
    bytes: int
    by_hand: float
    products: float
    layer: float
    inside: float
    between: float
    peak: int


def predict_overhead(machine: Machine, experts: ExpertOptions, parallel: int, sizes: ModelSizes,
                     dtype: str) -> Overhead:
    """Predict the overhead of one layer.

    Parameters
    ----------
    machine : Machine
        The machine.
    experts : ExpertOptions
        The options.
    parallel : int
        Number of ranks that divide the experts.
    sizes : ModelSizes
        Sizes of the layer; the batch is that of each rank.
    dtype : str
        Type of all arrays.

    Raises
    ------
    ValueError
        When experts cannot be divided so.
    """
    replicas = replicas_with_experts(experts, sizes.batch, sizes.seq, parallel,
                                     expert_parallel=parallel, way="exchange")
    trace = trace_step("serial", 1, block=machine.elementwise_block, dtype=dtype, experts=experts,
                       replicas=replicas, **{**sizes, "layers": 1})
    moved = [traffic for phase in trace.phases for (_, kind), traffic in
             trace.traffic[phase].items() if kind == "all_to_all"]
    words = sum(one.words for one in moved)
    node = machine.ranks_per_node
    return Overhead(
        experts, parallel, words, words * np.dtype(dtype).itemsize,
        4 * experts.top * sizes.tokens * sizes.hidden * (parallel - 1) / parallel,
        sum(times * achieved_seconds(machine, {"gemm": gemm_seconds(machine, event)})
            for event, times in trace.count(Gemm).items()),
        sum(step_seconds(machine, trace).values()) - _exchange(machine, trace, 1),
        math.nan if node % parallel else _exchange(machine, trace, 1),
        _exchange(machine, trace, 1 if parallel > node else node), trace.peak)


def dense_seconds(machine: Machine, sizes: ModelSizes, dtype: str) -> float:
    """Predict the seconds of the same layer with one perceptron in place of the experts."""
    trace = trace_step("serial", 1, block=machine.elementwise_block, dtype=dtype,
                       **{**sizes, "layers": 1})
    return sum(step_seconds(machine, trace).values())


def _exchange(machine: Machine, trace: Trace, stride: int) -> float:
    """Predict the seconds of all collectives where the ranks on their lines are `stride` apart."""
    return sum(times * achieved_seconds(machine, collective_terms(
        machine, event._replace(stride=stride))) for event, times in
        trace.count(Collective).items())
