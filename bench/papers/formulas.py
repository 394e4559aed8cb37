"""The formulas of papers, by name; what the project computes anyway is computed by its own code.

Sizes are whole numbers, all else may be fractions: results are exact.  A formula rises with each
argument that may be rounded in print, or falls with it.
"""

from fractions import Fraction
from math import prod
from typing import Any, Callable, Sequence

from bench.papers import models, pipelines
from bench.prediction.memory_fit import state_bytes
from mm3d.model import cost
from mm3d.model.sizes import ModelSizes
from mm3d.schemes import find_scheme

Number = int | Fraction


def ratio(over: Sequence[Number], under: Sequence[Number] = ()) -> Fraction:
    """Divide a product by a product."""
    return Fraction(prod(over)) / prod(under)


def total(parts: Sequence[Number], under: Number = 1) -> Fraction:
    """Divide a sum by a number."""
    return Fraction(sum(parts)) / under


def percent_more(new: Number, old: Number) -> Fraction:
    """Return by how many percent one number is more than another."""
    return 100 * Fraction(new) / old - 100


def gpt_parameters(layers: int, hidden: int, vocabulary: int, sequence: int, tables: int = 1,
                   experts: int = 0) -> int:
    """Count the parameters of a GPT, with as many tables of its vocabulary, and positions.

    With experts in each layer, these have no biases, and there is a router.
    """
    dense = cost.parameters(ModelSizes(layers, hidden, 1, 1, sequence))
    if experts:
        dense += layers * (experts * (8 * hidden ** 2 + hidden) - 8 * hidden ** 2 - 5 * hidden)
    return dense + (tables * vocabulary + sequence) * hidden


def t5_parameters(hidden: int, layers: int, vocabulary: int, attention: Sequence[int],
                  perceptron: Sequence[int], every: int = 0, experts: int = 1) -> int:
    """Count the parameters of an encoder and a decoder of `layers`, and of two tables.

    `attention` has heads, and features of each; a `perceptron` matrices, which are three where it
    is gated, and inner features.  One of `every` layers has experts, and a router; 0 for none.
    """
    routed, one = 2 * layers // every if every else 0, hidden * prod(perceptron)
    return (12 * layers * hidden * prod(attention) + 2 * vocabulary * hidden
            + (2 * layers - routed) * one + routed * experts * (one + hidden))


def step_flops(layers: int, hidden: int, vocabulary: int, sequence: int, batch: Number = 1,
               passes: Sequence[int] = (3, 3, 3), under: Sequence[Number] = ()) -> Fraction:
    """Count the operations of a training step of a GPT, divided by numbers, as seconds and GPUs.

    A forward counts `passes` times, in linear layers, in attention and in the head: three times
    with a backward, four times if that repeats it.
    """
    sizes = ModelSizes(layers, hidden, 1, 1, sequence)
    linear = sum(2 * one.M * one.N * one.K * times for one, times in cost.products(sizes).items())
    parts = linear, cost.flops(sizes)["forward"] - linear, 2 * sequence * hidden * vocabulary
    return Fraction(batch) / prod(under) * sum(
        times * part for times, part in zip(passes, parts, strict=True))


def replica_bytes(parameters: Number, shards: int, zero: int) -> Fraction:
    """Return the bytes of a rank's values, gradients and optimizer in a stage of ZeRO."""
    return Fraction(parameters) * state_bytes(zero, Fraction(shards))


def activation_bytes(policy: str, hidden: int, heads: int, sequence: int, batch: int, tensor: int,
                     layers: int) -> Fraction:
    """Return what layers keep for backward by Table 2 of Korthikanti et al., on `tensor` ranks.

    The policy is "none", "selective", "full", or with sequence parallelism "sequence" or
    "sequence+selective"; the batch is a micro-batch.
    """
    scores = Fraction(5 * heads * sequence, hidden * tensor)
    whole, divided = 10 + Fraction(24, tensor), Fraction(34, tensor)
    shares = {"none": whole + scores, "sequence": divided + scores, "selective": whole,
              "sequence+selective": divided, "full": Fraction(2)}
    if policy not in shares:
        raise ValueError(f"policy {policy!r}: one of {', '.join(shares)} would do")
    return layers * sequence * batch * hidden * shares[policy]


def tensor_bytes(scheme: str, ranks: int, layers: int, hidden: int, sequence: int,
                 batch: int = 1, value: int = 2) -> Fraction:
    """Return the bytes that a rank of a parallelism moves in a step, by ring collectives."""
    found = find_scheme(scheme)
    moved = cost.words(scheme, found.grid_shape(found.default_grid(ranks)),
                       ModelSizes(layers, hidden, ranks, batch, sequence))
    return Fraction(value * sum(sum(one.values()) for one in moved.values()), ranks)


FORMULAS: dict[str, Callable[..., Any]] = {one.__name__: one for one in (
    ratio, total, percent_more, gpt_parameters, t5_parameters, step_flops, replica_bytes,
    activation_bytes, tensor_bytes, *models.FORMULAS, *pipelines.FORMULAS)}
