"""List the layers of a Transformer, in order: Figure 6 of the paper."""

from typing import Sequence

from mm3d.model.attention.layer import Attention, RingAttention
from mm3d.model.builder import Builder
from mm3d.model.chains import Chain, Recomputed, Residual
from mm3d.model.dropout import Dropout
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.layers import Layer, Linear, make_norm, perceptron_layers
from mm3d.model.recomputation import parse_policy
from mm3d.model.rotary import Rotary, Turns
from mm3d.model.stack import Stack


def transformer_layers(build: Builder, stack: Stack, part: range | None = None) -> list[Layer]:
    """Make a stack of pre-LN Transformer layers: residual blocks, or groups that are recomputed.

    `part` has the layers of a part of the model, such as a stage of a pipeline, which keep their
    numbers; by default all.  Raises ValueError when no policy has that name, or `dropout` is no
    probability below 1.
    """
    experts = stack.experts
    policy, whole = parse_policy(stack.recompute), range(stack.layers)
    numbers = [*(whole if part is None else part)]
    rotary = stack.architecture.positions == "rotary"
    turns = Turns(build.inner, stack.sizes.head, str(stack.dtype),
                  stack.architecture) if rotary else None

    def layer(number: int) -> list[Layer]:
        here = experts if experts and experts.in_layer(number) else None
        with build.block(f"layers.{number}"):
            return _layer(build, stack, policy.selective, here, turns)
    if not policy.group_size:
        return [one for number in numbers for one in layer(number)]
    groups = []
    for start in range(0, len(numbers), policy.group_size):
        group = [one for number in numbers[start:start + policy.group_size]
                 for one in layer(number)]
        recomputed = experts.recompute(build, group) if experts else Recomputed(*group)
        groups.append(build.named(recomputed, f"layers.{numbers[start]}", "recomputed"))
    return groups


def _layer(build: Builder, stack: Stack, selective: bool,
           experts: ExpertOptions | None, turns: Turns | None) -> list[Layer]:
    """Make one layer: attention, then the multi-layer perceptron, or `experts` in its place.

    With `selective` the layers up to each linear layer are recomputed in backward.  Queries and
    keys are rotated by `turns`, if there are any.
    """
    sizes, h, dropout, architecture = stack.sizes, stack.hidden, stack.dropout, stack.architecture
    features, keys = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
    all_biases = architecture.biases == "all"

    def residual(name: str, layers: Sequence[Layer]) -> Chain:
        if selective and len(layers) > 2:
            layers = [build.named(Recomputed(*half), name, "recomputed")
                      for half in (layers[:2], layers[2:])]
        drop = Dropout(build.outer, h, dropout, build.full_name(name),
                       build.mask_key) if dropout else None
        return build.named(Residual(*layers, dropout=drop), name, "residual")

    rotary = [] if turns is None else [build.named(
        Rotary(build.inner, sizes.group + 1, keys, turns), "attention.rotary", "rotary")]
    context = build.inner.context
    kind = RingAttention if context and context.way == "ring" else Attention
    attention = residual("attention", [
        make_norm(build, "ln1", h, architecture),
        Linear(build, "attention.qkv", "up", (h, sizes.group + 2, keys), sizes.head,
               has_bias=architecture.biases != "none"), *rotary,
        build.named(kind(build.inner, features, sizes.head, stack.causal, sizes.group,
                         architecture.window), "attention.attention", "attention"),
        Linear(build, "attention.proj", "down", (features, h), sizes.group * sizes.head,
               has_bias=all_biases)])
    norm = make_norm(build, "ln2", h, architecture)
    if experts is not None:
        return [attention, residual("mlp", [norm, experts.make_layer(build, "experts", sizes)])]
    return [attention, residual("mlp", [
        norm, *perceptron_layers(build, "mlp", h, sizes.inner, architecture.gates, all_biases)])]
