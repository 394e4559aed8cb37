"""List the layers of a Transformer, in order (Figure 6 of the paper), and state what they are."""

from dataclasses import dataclass
from typing import Any, Sequence

from mm3d.arrays.plain_numbers import plain_number
from mm3d.grid.agreement import text_of
from mm3d.model.architecture import FIELD, Architecture
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


Fact = float | int | str    # what an attribute of a file can be
TRANSFORMER = "model_spec"    # what checkpoints of all versions call its layers


@dataclass(frozen=True)
class Definition:
    """State facts of a model, by name, as checkpoints hold them."""

    function: dict[str, Fact]    # facts that the outputs depend on, beside the parameters
    # Facts that matter to a training alone: losses, gradients, and rounding.
    training: dict[str, Fact]

    def extended(self, function: dict[str, Any], training: dict[str, Any]) -> "Definition":
        """Return these facts and more, with None as a text."""
        return Definition(self.function | _as_facts(function), self.training | _as_facts(training))


def define_transformer(stack: Stack, make_layers: Any) -> Definition:
    """Return the definition of a Transformer; parameters as in `mm3d.Transformer`."""
    function = {"layers": stack.layers, "hidden": stack.hidden, "heads": stack.heads,
                "causal": bool(stack.causal), "epsilon": stack.architecture.epsilon}
    function |= architecture_facts(stack.architecture)
    made_by = getattr(make_layers, "func", make_layers)    # a part of the layers of a pipeline
    training = {"dtype": str(stack.dtype), "dropout": stack.dropout, "described_by": (
        TRANSFORMER if made_by is transformer_layers else text_of(made_by))}
    if stack.dropout:
        fits = -2 ** 63 <= stack.seed < 2 ** 64    # in a number of a file; masks have any seed
        training["mask_seed"] = stack.seed if fits else str(stack.seed)
    found = Definition({}, {}).extended(function, training)
    return found if stack.experts is None else found.extended(*_define_experts(stack.experts))


def architecture_facts(architecture: Architecture) -> dict[str, Fact]:
    """Return what an architecture adds to a definition, beside its epsilon."""
    return _as_facts({f"{FIELD}.{name}": text_of(value) if isinstance(value, tuple) else value
                      for name, value in vars(architecture).items() if name != "epsilon"})


def _define_experts(experts: ExpertOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what experts add to a definition."""
    function = {"count": experts.count, "top": experts.top, "every": experts.every,
                "gate": experts.gate, "capacity": experts.capacity}
    training = {"balance": experts.balance, "z": experts.z, "bias_rate": experts.bias_rate,
                "convention": experts.convention,
                "jitter": 0.0}    # of the router's input: earlier checkpoints state it
    if experts.capacity is not None:    # these say how it is counted
        function |= {"convention": training.pop("convention"), "order": experts.dropping_order,
                     "min_capacity": experts.least_capacity}
    function |= experts.design.given()
    return tuple({f"experts.{name}": value for name, value in facts.items()}
                 for facts in (function, training))


def _as_facts(values: dict[str, Any]) -> dict[str, Fact]:
    """Return values as facts."""
    return {name: "none" if value is None else plain_number(value)
            for name, value in values.items()}
