"""The formulas of papers, by name; what the project computes anyway is computed by its own code.

Sizes are whole numbers, all else may be fractions: results are exact.  A formula rises with each
argument that may be rounded in print, or falls with it.  Published models are read by name.  Times
of pipelines are F, B (the gradient of the input) and W of a chunk, and perhaps that of a message.
"""

from fractions import Fraction
from math import prod
from typing import Any, Callable, Sequence

from bench.prediction.memory_fit import state_bytes
from bench.prediction.model_file import load_model
from mm3d.model import cost
from mm3d.model.sizes import ModelSizes
from mm3d.names import check_name
from mm3d.pretrained.shapes import parameter_shapes
from mm3d.schemes import find_scheme
from mm3d.training.schedules import Times, build, time_actions
from mm3d.training.schedules.builders.auto import least_cost

ExactNumber = int | Fraction
ROUTED = (".experts.up.", ".experts.down.")    # in names of parameters that not all tokens use
MEASURES = ("bubble", "bubble_rate", "bubble_over_work", "idle_share")    # of a `Timeline`


def ratio(over: Sequence[ExactNumber], under: Sequence[ExactNumber] = ()) -> Fraction:
    """Divide a product by a product."""
    return Fraction(prod(over)) / prod(under)


def total(parts: Sequence[ExactNumber], under: ExactNumber = 1) -> Fraction:
    """Divide a sum by a number."""
    return Fraction(sum(parts)) / under


def percent_more(new: ExactNumber, old: ExactNumber) -> Fraction:
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


def step_flops(layers: int, hidden: int, vocabulary: int, sequence: int, batch: ExactNumber = 1,
               passes: Sequence[int] = (3, 3, 3), under: Sequence[ExactNumber] = ()) -> Fraction:
    """Count the operations of a training step of a GPT, divided by numbers, as seconds and GPUs.

    A forward counts `passes` times, in linear layers, in attention and in the head: three times
    with a backward, four times if that repeats it.
    """
    sizes = ModelSizes(layers, hidden, 1, 1, sequence)
    linear = sum(2 * one.M * one.N * one.K * times
                 for one, times in cost.list_products(sizes).items())
    parts = linear, cost.flops(sizes)["forward"] - linear, 2 * sequence * hidden * vocabulary
    return Fraction(batch) / prod(under) * sum(
        times * part for times, part in zip(passes, parts, strict=True))


def replica_bytes(parameters: ExactNumber, shards: int, zero: int) -> Fraction:
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
    check_name("policy", policy, shares)
    return layers * sequence * batch * hidden * shares[policy]


def tensor_bytes(scheme: str, ranks: int, layers: int, hidden: int, sequence: int,
                 batch: int = 1, value: int = 2) -> Fraction:
    """Return the bytes that a rank of a parallelism moves in a step, by ring collectives."""
    found = find_scheme(scheme)
    moved = cost.words(scheme, found.grid_shape(found.default_grid(ranks)),
                       ModelSizes(layers, hidden, ranks, batch, sequence))
    return Fraction(value * sum(sum(one.values()) for one in moved.values()), ranks)


def model_parameters(model: str) -> int:
    """Count the parameters of a model."""
    return load_model(model).parameters


def active_parameters(model: str) -> Fraction:
    """Count the parameters that a token uses, of all experts those it is sent to."""
    found = load_model(model)
    experts = found.experts
    return sum((prod(shape) * (Fraction(experts.top, experts.count)
                               if any(part in name for part in ROUTED) else Fraction(1))
                for name, shape in parameter_shapes(found.model()).items()), Fraction(0))


def model_flops(model: str, sequence: int, passes: int = 1) -> int:
    """Count the operations of a sequence in a model: forward, or with backward 3 passes."""
    found = load_model(model)
    layers = cost.flops(found.sizes(1, sequence), found.experts)["forward"]
    return passes * (layers + 2 * sequence * found.hidden * found.vocab)


def flops_of_tokens(model: str, tokens: ExactNumber) -> Fraction:
    """Return 6 operations for each parameter and token."""
    return 6 * model_parameters(model) * Fraction(tokens)


def bubble(schedule: str, measure: str, stages: int, microbatches: int,
           times: Sequence[ExactNumber] = (1, 1, 1)) -> Fraction:
    """Time a schedule action by action, and return one of `MEASURES`."""
    check_name("measure", measure, MEASURES)
    found = build(schedule, stages, microbatches)
    return getattr(time_actions(found, Times.equal(found.stage_count, *times)), measure)


def interleaved_rate(stages: int, microbatches: int, layers: int, times: Sequence[ExactNumber]
                     ) -> Fraction:
    """Return the rate of interleaved 1F1B as the zero-bubble paper counts it.

    Its bubble is (p - 1) (F + B + W) / v plus (2 v - 1) p - 2 hops.  Each of the v chunks of a
    rank is one layer; two more than the model has stand for the embeddings.  (With a hop for each
    message there would be 2 (p v - 1).)
    """
    *steps, hop = times
    chunks = (layers + 2) // stages
    found = Fraction((stages - 1) * sum(steps), chunks) + ((2 * chunks - 1) * stages - 2) * hop
    return found / (microbatches * sum(steps) + found)


def searched_rate(memory: int, stages: int, microbatches: int, hidden: int, heads: int,
                  sequence: int, times: Sequence[ExactNumber]) -> Fraction:
    """Return the rate of the best schedule that `auto` finds.

    A rank may hold the activations of `memory` micro-batches for each of the `stages`.  W still
    needs 32 h of their 34 h + 5 a s, in bytes over s b (the paper's Table 1).
    """
    kept = Fraction(32 * hidden, 34 * hidden + 5 * heads * sequence)
    found = Times.equal(stages, *times)
    return time_actions(build("auto", stages, microbatches, times=found, memory=memory * stages,
                              kept=kept), found).bubble_rate


def least_rate(memory: int, stages: int, microbatches: int,
               times: Sequence[ExactNumber]) -> Fraction:
    """Return a rate that no schedule with one stage a rank falls below in this memory."""
    least = least_cost(stages, microbatches, Times.equal(stages, *times),
                       Fraction(memory * stages))
    return 1 - microbatches * sum(times[:3]) / Fraction(least)


def claimed_bubble(schedule: str, stages: int, times: Sequence[ExactNumber]) -> Fraction:
    """Return the bubble as DeepSeek-V3 states it, F&B being F + B: of 1f1b, zb-h1 or dualpipe-v.

    DualPipeV has two chunks a rank, so that half of its pipeline stages are its ranks.
    """
    forward, backward, weights = times
    whole = backward + weights    # B in print
    found = {"1f1b": forward + whole, "zb-h1": forward + whole - 2 * weights,
             "dualpipe-v": forward + whole + whole - 3 * weights}
    check_name("schedule", schedule, found)
    return Fraction((stages - 1) * found[schedule])


FORMULAS: dict[str, Callable[..., Any]] = {one.__name__: one for one in (
    ratio, total, percent_more, gpt_parameters, t5_parameters, step_flops, replica_bytes,
    activation_bytes, tensor_bytes, model_parameters, active_parameters, model_flops,
    flops_of_tokens, bubble, interleaved_rate, searched_rate, least_rate, claimed_bubble)}
