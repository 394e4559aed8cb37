"""List the layers of a Transformer, in order: Figure 6 of the paper."""

from typing import Sequence

from mm3d.model.builder import Builder
from mm3d.model.chains import Chain, Recomputed, Residual
from mm3d.model.dropout import Dropout, DropoutResidual
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.layers import Attention, Gelu, Layer, LayerNorm, Linear
from mm3d.model.recomputation import parse_policy
from mm3d.model.stack import Stack


def transformer_layers(build: Builder, stack: Stack, part: range | None = None) -> list[Layer]:
    """Make a stack of pre-LN Transformer layers: residual blocks, or groups that are recomputed.

    Parameters
    ----------
    build : Builder
        Makes the parameters.
    stack : Stack
        The layers' sizes and options.
    part : range, optional
        The layers of a part of the model, such as a stage of a pipeline; they keep their numbers.
        All layers, if not given.

    Raises
    ------
    ValueError
        When no policy has that name, or `dropout` is no probability below 1.
    """
    experts = stack.experts
    policy, whole = parse_policy(stack.recompute), range(stack.layers)
    numbers = [*(whole if part is None else part)]

    def layer(number: int) -> list[Layer]:
        here = experts if experts and experts.in_layer(number) else None
        with build.block(f"layers.{number}"):
            return _layer(build, stack, policy.selective, here)
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
           experts: ExpertOptions | None) -> list[Layer]:
    """Make one layer: attention, then the multi-layer perceptron, or `experts` in its place.

    With `selective` each linear layer and the layer before it are recomputed in backward.
    """
    sizes, h, dropout = stack.sizes, stack.hidden, stack.dropout
    wide, head = sizes.inner, sizes.head

    def residual(name: str, layers: Sequence[Layer]) -> Chain:
        if selective and len(layers) > 2:
            layers = [build.named(Recomputed(*half), name, "recomputed")
                      for half in (layers[:2], layers[2:])]
        if dropout:
            drop = Dropout(build.outer, h, dropout, build.full_name(name), build.mask_key)
            return build.named(DropoutResidual(drop, *layers), name, "residual")
        return build.named(Residual(*layers), name, "residual")

    attention = residual("attention", [
        LayerNorm(build, "ln1", h),
        Linear(build, "attention.qkv", "up", (h, 3, h), head),
        build.named(Attention(build.inner, h, head, stack.causal), "attention.attention",
                    "attention"),
        Linear(build, "attention.proj", "down", (h, h), head)])
    norm = LayerNorm(build, "ln2", h)
    if experts is not None:
        return [attention, residual("mlp", [norm, experts.make_layer(build, "experts", sizes)])]
    up = Linear(build, "mlp.up", "up", (h, wide), adds_bias=False)
    return [attention, residual("mlp", [
        norm, up, build.named(Gelu(up, build.inner, wide), "mlp.gelu", "gelu"),
        Linear(build, "mlp.down", "down", (wide, h))])]
