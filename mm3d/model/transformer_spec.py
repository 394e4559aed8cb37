"""Define the spec of a Transformer: its layers, without ranks and arrays."""

from collections import Counter
from typing import Mapping

from mm3d.model.chain_specs import ChainSpec, ModelSpec, RecomputedSpec, Repeated, ResidualSpec
from mm3d.model.layer_specs import AttentionSpec, GeluSpec, LayerNormSpec, LinearSpec
from mm3d.model.recomputation import parse_policy
from mm3d.model.sizes import ModelSizes
from mm3d.model.specs import LayerSpec


def model_spec(sizes: Mapping[str, int], causal: bool = False,
               recompute: str = "none") -> ModelSpec:
    """Return the spec of a stack of pre-LN Transformer layers, without ranks and arrays.

    Parameters
    ----------
    sizes : ModelSizes
        Sizes of the model.
    causal : bool
        Whether a position attends only to itself and those before it.
    recompute : str
        Name of a policy, see `mm3d.model.recomputation`.

    Raises
    ------
    ValueError
        When no policy has that name.
    """
    sizes, policy = ModelSizes(**sizes), parse_policy(recompute)
    block = transformer_layer(sizes, causal, policy.selective)

    def recomputed_group(layers: int) -> ChainSpec:
        if layers == 1:
            return Repeated((RecomputedSpec(block),), "layers")
        return RecomputedSpec((Repeated(block, "layers", layers),), "layers")
    groups = Counter(policy.groups(sizes.layers))
    chain = [Repeated((recomputed_group(layers),), times=times)
             for layers, times in groups.items()]
    return ModelSpec(sizes.batch, sizes.seq, sizes.hidden, ChainSpec(tuple(
        chain or [Repeated(block, "layers", sizes.layers)])))


def transformer_layer(sizes: ModelSizes, causal: bool = False,
                      selective: bool = False) -> tuple[ResidualSpec, ResidualSpec]:
    """Return the specs of one Transformer layer: attention, then the multi-layer perceptron.

    With `selective` each linear layer and the layer before it are recomputed in backward.
    """
    h, wide, head = sizes.hidden, sizes.mlp_factor * sizes.hidden, sizes.hidden // sizes.heads

    def residual(name: str, *layers: LayerSpec) -> ResidualSpec:
        if selective:
            layers = (RecomputedSpec(layers[:2], name), RecomputedSpec(layers[2:], name))
        return ResidualSpec(layers, name)

    return (residual("attention",
                     LayerNormSpec("ln1", h),
                     LinearSpec("attention.qkv", "up", (h, 3, h), head),
                     AttentionSpec("attention.attention", h, sizes.heads, causal),
                     LinearSpec("attention.proj", "down", (h, h), head)),
            residual("mlp",
                     LayerNormSpec("ln2", h),
                     LinearSpec("mlp.up", "up", (h, wide), adds_bias=False),
                     GeluSpec("mlp.gelu", wide, "mlp.up"),
                     LinearSpec("mlp.down", "down", (wide, h))))
