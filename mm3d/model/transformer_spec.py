"""Define the spec of a Transformer: its layers, without ranks and arrays."""

from collections import Counter
from typing import Mapping

from mm3d.model.chain_specs import ChainSpec, ModelSpec, RecomputedSpec, Repeated, ResidualSpec
from mm3d.model.dropout import DropoutResidualSpec
from mm3d.model.experts.options import ExpertOptions, check_experts_given
from mm3d.model.layer_specs import AttentionSpec, GeluSpec, LayerNormSpec, LinearSpec
from mm3d.model.masks import dropped_of_65536
from mm3d.model.recomputation import parse_policy
from mm3d.model.sizes import ModelSizes
from mm3d.model.specs import LayerSpec


def model_spec(sizes: Mapping[str, int], causal: bool = False, recompute: str = "none",
               part: range | None = None, dropout: float = 0.0,
               experts: ExpertOptions | None = None) -> ModelSpec:
    """Return the spec of a stack of pre-LN Transformer layers, without ranks and arrays.

    Parameters
    ----------
    sizes : ModelSizes
        Sizes of the model.
    causal : bool
        Whether a position attends only to itself and those before it.
    recompute : str
        Name of a policy, see `mm3d.model.recomputation`.
    part : range, optional
        The layers of a part of the model, such as a stage of a pipeline; they keep their numbers.
        All layers, if not given.
    dropout : float
        Probability that an element of a residual branch is dropped (`mm3d.model.dropout`).
    experts : ExpertOptions, optional
        Options of the layers that have experts (`mm3d.model.experts`).

    Raises
    ------
    ValueError
        When no policy has that name, the model does not have the layers of the part, or `dropout`
        is no probability below 1.
    """
    sizes, policy = ModelSizes(**sizes), parse_policy(recompute)
    whole = range(sizes.layers)
    part = whole if part is None else part
    if part != whole and (not part or part.step != 1 or not {part[0], part[-1]} <= {*whole}):
        raise ValueError(f"layers {part.start} to {part.stop - 1} are no part of a model with "
                         f"layers 0 to {sizes.layers - 1}")
    if experts is not None:
        check_experts_given(experts)
        layers = experts.layer_specs(sizes, causal, policy, part, dropout)
        return ModelSpec(sizes.batch, sizes.seq, sizes.hidden, ChainSpec(layers), part.start)
    block = transformer_layer(sizes, causal, policy.selective, dropout)

    def recomputed_group(layers: int) -> ChainSpec:
        if layers == 1:
            return Repeated((RecomputedSpec(block),), "layers")
        return RecomputedSpec((Repeated(block, "layers", layers),), "layers")
    groups = Counter(policy.groups(len(part)))
    chain = [Repeated((recomputed_group(layers),), times=times)
             for layers, times in groups.items()]
    return ModelSpec(sizes.batch, sizes.seq, sizes.hidden, ChainSpec(tuple(
        chain or [Repeated(block, "layers", len(part))])), part.start)


def transformer_layer(sizes: ModelSizes, causal: bool = False, selective: bool = False,
                      dropout: float = 0.0, experts: LayerSpec | None = None
                      ) -> tuple[ResidualSpec, ResidualSpec]:
    """Return the specs of one Transformer layer: attention, then the multi-layer perceptron.

    With `selective` each linear layer and the layer before it are recomputed in backward;
    `dropout` is the probability that an element is dropped before it is added to the input.
    The layer `experts`, if given, takes the place of the perceptron.
    """
    dropped_of_65536(dropout)    # refuses what is no probability
    h, wide, head = sizes.hidden, sizes.mlp_factor * sizes.hidden, sizes.hidden // sizes.heads

    def residual(name: str, *layers: LayerSpec) -> ResidualSpec:
        if selective and len(layers) > 2:
            layers = (RecomputedSpec(layers[:2], name), RecomputedSpec(layers[2:], name))
        if dropout:
            return DropoutResidualSpec(layers, name, h, dropout)
        return ResidualSpec(layers, name)

    attention = residual("attention",
                         LayerNormSpec("ln1", h),
                         LinearSpec("attention.qkv", "up", (h, 3, h), head),
                         AttentionSpec("attention.attention", h, sizes.heads, causal),
                         LinearSpec("attention.proj", "down", (h, h), head))
    if experts is not None:
        return attention, residual("mlp", LayerNormSpec("ln2", h), experts)
    return attention, residual("mlp",
                               LayerNormSpec("ln2", h),
                               LinearSpec("mlp.up", "up", (h, wide), adds_bias=False),
                               GeluSpec("mlp.gelu", wide, "mlp.up"),
                               LinearSpec("mlp.down", "down", (wide, h)))
